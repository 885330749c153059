"""CDI specs and the device files that they name: every change that a container runtime makes for a device.

There are two kinds of specs. A claim has a transient one, `<vendor>-claim_<uid>.yaml` of kind
`<vendor>/claim`, with one CDI device for each prepared device (`CdiDirectory`). All claims of a plugin
share one spec with the files of NVIDIA's driver (`DriverSpec`). Files hold JSON, which is YAML, and name
the oldest CDI version that has the features they use, so that old runtimes accept them.

The driver's libraries, programs and firmware must match the kernel module, so no image brings them: they
are bind-mounted from the host. `topology.discovery.nvidia_driver` finds them. `workload_edits` is the set for
containers with a GPU, `daemon_edits` the set for IMEX daemons.

How the loader in a container finds the libraries depends on nvidia-cdi-hook, if the host has it. The
runtime calls it for each container, with these commands in this order:

- `create-symlinks` makes the links that the host has among the libraries (libcuda.so.1), and three that
  programs expect although not every host has them. Without it each link is a mount.
- `enable-cuda-compat` puts the newer CUDA of an image before the driver's, if the driver's version
  allows that.
- `update-ldcache` tells the loader where the libraries are. Without it LD_LIBRARY_PATH does, and the
  image's own value of that variable is lost.

Older hooks fail for commands that they do not know. So the hook's program file is searched for the
command names, and never run. `DriverSpec` rewrites its spec whenever the driver appears or changes.
It never removes it: prepared claims name it, and their containers may start again.

The numbers of NVIDIA's device files are those of the kernel. /proc/devices names the majors. The minors of
nvidiactl (255), nvidia-modeset (254), nvidia-uvm (0) and nvidia-uvm-tools (1) are fixed in NVIDIA's kernel
modules. A MIG device also needs the capability files of its GPU instance and compute instance, and an IMEX
daemon that of fabric-imex-mgmt: their minors are in files below /proc/driver/nvidia/capabilities. IMEX
channels have their own major, and their number as minor.

A passed-through GPU needs /dev/vfio/<group> and /dev/vfio/vfio, or with IOMMUFD its own file below
/dev/vfio/devices and /dev/iommu (the kernel's VFIO documentation).

Source: the CDI specs of nvidia-container-toolkit 1.20 (pkg/nvcdi, internal/discover).
"""

import asyncio
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path, PurePosixPath

import msgspec
import structlog

from rackloom.claim.node.gpu.inventory import MigDevice, NodeGpu
from rackloom.claim.node.gpu.passthrough import VfioGpu
from rackloom.claim.node.plugin import (
    ContainerEdits,
    ContainerHook,
    ContainerMount,
    DeviceNode,
    NodeValue,
    PreparedClaim,
    PreparedDevice,
)
from rackloom.core.cluster.device_configs import IommuConfig, VfioBackendPolicy
from rackloom.core.cluster.names import OLDEST_IMEX_DRIVER
from rackloom.errors import Refused, Retry, file_error_text
from rackloom.runtime.durable_files import PARTIAL, remove_durably, write_durably
from rackloom.topology.discovery.nvidia_driver import (
    PROGRAM_PLACES,
    DriverFile,
    NvidiaDriver,
    driver_fingerprint,
    find_driver,
    loaded_version,
)
from rackloom.topology.discovery.sysfs import IMEX_CHANNEL_DEVICES, OWN_ROOT, Sysroot, character_devices

# Device files.


DRIVER_SECONDS = 5.0
"""Between two checks for a driver that is missing, or for a change of one that is there."""
OPEN_TO_ALL = 0o666
"""As with NVIDIA's driver, every process in the container may open GPUs and channels."""
_CAPS_DRIVER = "nvidia-caps"
_GPU_DRIVERS = ("nvidia", "nvidia-frontend")
"""The second is the name of drivers before 560."""
_CAPABILITY_FIELD = re.compile(r"^(DeviceFile\w+):\s*(\d+)\s*$", re.MULTILINE)


def device_node(path: str, info: os.stat_result) -> DeviceNode:
    """A character device as the host has it."""
    return DeviceNode(
        path=path,
        major=os.major(info.st_rdev),
        minor=os.minor(info.st_rdev),
        file_mode=stat.S_IMODE(info.st_mode),
    )


def _read_majors(proc_devices: Path) -> dict[str, int]:
    return {name: major for major, name in character_devices(proc_devices.read_text())}


def _read_capability(file: Path) -> dict[str, str]:
    """`DeviceFileMinor` and `DeviceFileMode`, in decimal."""
    return dict(_CAPABILITY_FIELD.findall(file.read_text()))


class DriverFiles(NodeValue, frozen=True, kw_only=True):
    """The paths of the kernel's list of NVIDIA driver devices, and of device files as seen from here."""

    proc_devices: Path = Path("/proc/devices")
    capabilities: Path = Path("/proc/driver/nvidia/capabilities")
    devices: Path = Path("/dev")

    def of_gpu(self, gpu: NodeGpu) -> tuple[DeviceNode, ...]:
        """For a whole GPU. Raises `Retry` while the driver is not loaded."""
        majors = _read_majors(self.proc_devices)
        major = next((majors[name] for name in _GPU_DRIVERS if name in majors), None)
        if major is None:
            raise Retry(
                "NVIDIA's driver is not loaded: /proc/devices does not list it;"
                " load the nvidia module on the node",
                after=DRIVER_SECONDS,
            )
        uvm, modeset = majors.get("nvidia-uvm"), majors.get("nvidia-modeset")
        files = (
            (f"nvidia{gpu.minor}", major, gpu.minor),
            ("nvidiactl", major, 255),
            ("nvidia-uvm", uvm, 0),
            ("nvidia-uvm-tools", uvm, 1),
            # A kernel without display support has no modeset device.
            ("nvidia-modeset", modeset, 254),
        )
        return tuple(_gpu_node(name, number, minor) for name, number, minor in files if number is not None)

    def of_mig(self, gpu: NodeGpu, mig: MigDevice) -> tuple[DeviceNode, ...]:
        """The files of a MIG device: that of its GPU, and the access files of its two instances."""
        instance = self.capabilities / f"gpu{gpu.minor}" / "mig" / f"gi{mig.gpu_instance}"
        files = (instance / "access", instance / f"ci{mig.compute_instance}" / "access")
        major = _read_majors(self.proc_devices).get(_CAPS_DRIVER)
        if major is None:
            raise Refused(
                f"{self.proc_devices} lists no character device {_CAPS_DRIVER}",
                nearest_fix="load a driver of NVIDIA that knows MIG",
            )
        minors = [_capability_minor(file) for file in files]
        caps = (_gpu_node(f"nvidia-caps/nvidia-cap{minor}", major, minor) for minor in minors)
        return (*self.of_gpu(gpu), *caps)

    def existing(self, path: str) -> DeviceNode:
        """A device file as it is now. Raises `Retry` while there is none."""
        try:
            info = (self.devices.parent / path.lstrip("/")).stat()
        except OSError as error:
            raise Retry(f"{path} is not there: {error.strerror}", after=1.0) from error
        if not stat.S_ISCHR(info.st_mode):
            raise Retry(f"{path} is no device file", after=1.0)
        return device_node(path, info)


def _capability_minor(file: Path) -> int:
    """Raises `Retry` for an instance that is gone, because the GPU gets other partitions."""
    try:
        minor = _read_capability(file).get("DeviceFileMinor")
    except OSError as error:
        raise Retry(f"{file}: {error.strerror}", after=1.0) from error
    if minor is None:
        raise Retry(f"{file} names no device file", after=1.0)
    return int(minor)


def _gpu_node(name: str, major: int, minor: int) -> DeviceNode:
    return DeviceNode(path=f"/dev/{name}", major=major, minor=minor, file_mode=OPEN_TO_ALL)


def vfio_device_files(vfio: VfioGpu, iommu: IommuConfig) -> tuple[str, ...]:
    """The device files that a container needs to use the passed-through GPU."""
    if iommu.backend_policy is VfioBackendPolicy.PREFER_IOMMUFD and vfio.iommufd is not None:
        own, api = f"/dev/vfio/devices/{vfio.iommufd}", "/dev/iommu"
    else:
        own, api = f"/dev/vfio/{vfio.group}", "/dev/vfio/vfio"
    return (own, api) if iommu.enable_api_device else (own,)


class ImexKernel(NodeValue, frozen=True, kw_only=True):
    """The paths of the kernel's list of IMEX channels, and of the capability to manage IMEX."""

    proc_devices: Path = Path("/proc/devices")
    imex_capability: Path = Path("/proc/driver/nvidia/capabilities/fabric-imex-mgmt")

    def channel_major(self) -> int:
        """Major number of the channel devices. Raises `Refused` if the driver offers none."""
        return self._major(IMEX_CHANNEL_DEVICES)

    def has_channels(self) -> bool:
        """Whether the driver offers channels now."""
        try:
            self.channel_major()
        except Refused:
            return False
        return True

    def management_node(self) -> DeviceNode:
        """The device that lets a daemon manage the fabric. Raises `Refused` if there is none."""
        try:
            fields = _read_capability(self.imex_capability)
            minor, mode = int(fields["DeviceFileMinor"]), int(fields["DeviceFileMode"])
        except (OSError, KeyError) as error:
            raise Refused(
                f"{self.imex_capability} does not name the IMEX management device: {error!r}",
                nearest_fix=f"install NVIDIA's driver {OLDEST_IMEX_DRIVER} or later on the node",
            ) from error
        path = f"/dev/nvidia-caps/nvidia-cap{minor}"
        return DeviceNode(path=path, major=self._major(_CAPS_DRIVER), minor=minor, file_mode=mode)

    def _major(self, driver: str) -> int:
        try:
            majors = _read_majors(self.proc_devices)
        except OSError as error:
            raise Refused(
                f"{self.proc_devices} cannot be read: {file_error_text(error)}",
                nearest_fix="name the kernel's list of devices as --proc-devices",
            ) from error
        if driver not in majors:
            raise Refused(
                f"{self.proc_devices} lists no character device {driver}",
                nearest_fix="load the nvidia module of a driver with IMEX support",
            )
        return majors[driver]


def channel_node(major: int, channel: int) -> DeviceNode:
    """The device of one IMEX channel."""
    path = f"/dev/{IMEX_CHANNEL_DEVICES}/channel{channel}"
    return DeviceNode(path=path, major=major, minor=channel, file_mode=OPEN_TO_ALL)


# The CDI directory, and the encoding of a spec.


class CdiDirectory:
    """The claim specs of one driver in a directory that runtimes read (/var/run/cdi)."""

    def __init__(self, root: Path, driver: str) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._vendor = f"k8s.{driver}"

    def write(self, uid: str, prepared: PreparedClaim) -> None:
        """Write the spec of a claim. A claim without edits gets no file, and its old file is removed."""
        devices = {_cdi_device_name(uid, device): device.edits for device in prepared.devices if device.edits}
        if not devices:
            self.remove(uid)
            return
        write_durably(self._path(uid), cdi_spec(f"{self._vendor}/claim", devices), mode=0o644)

    def write_shared(self, file: str, class_: str, device: str, edits: ContainerEdits) -> tuple[str, ...]:
        """Write a spec that outlives claims (`<vendor>-<file>.yaml`) and name its device."""
        path = self._root / f"{self._vendor}-{file}.yaml"
        kind = f"{self._vendor}/{class_}"
        write_durably(path, cdi_spec(kind, {device: edits}), mode=0o644)
        return (f"{kind}={device}",)

    def ids(self, uid: str, device: PreparedDevice) -> tuple[str, ...]:
        """The CDI ids of one device of a claim, which kubelet passes to the runtime."""
        own = (f"{self._vendor}/claim={_cdi_device_name(uid, device)}",) if device.edits else ()
        return (*device.shared_cdi_ids, *own)

    def has_all(self, uid: str, ids: Iterable[str]) -> bool:
        """Whether the claim's spec is there, if `ids` name a device of it."""
        needed = any(cdi_id.startswith(f"{self._vendor}/claim=") for cdi_id in ids)
        return not needed or self._path(uid).exists()

    def remove(self, uid: str) -> None:
        """Delete the spec of a claim, if there is one."""
        if self._path(uid).exists():
            remove_durably(self._path(uid))

    def claims(self) -> frozenset[str]:
        """UIDs of the claims that have a spec."""
        prefix = f"{self._vendor}-claim_"
        return frozenset(file.stem.removeprefix(prefix) for file in self._root.glob(f"{prefix}*.yaml"))

    def remove_partials(self) -> None:
        """Delete partial specs that a crash left."""
        for file in self._root.glob(f".{self._vendor}-*{PARTIAL}"):
            remove_durably(file)

    def _path(self, uid: str) -> Path:
        return self._root / f"{self._vendor}-claim_{uid}.yaml"


def cdi_spec(kind: str, devices: dict[str, ContainerEdits]) -> bytes:
    """A CDI spec file: `devices` of `kind` (`vendor/class`), and the edits that each one makes."""
    return msgspec.json.encode(
        {
            "cdiVersion": minimum_cdi_version(kind, devices),
            "kind": kind,
            "devices": [{"name": name, "containerEdits": edits} for name, edits in devices.items()],
        }
    )


def minimum_cdi_version(kind: str, devices: dict[str, ContainerEdits]) -> str:
    """The oldest CDI version that has the features used, so that old runtimes accept the spec."""
    if "." in kind.partition("/")[2]:
        return "0.6.0"
    return "0.5.0" if any(name[0].isdigit() for name in devices) else "0.3.0"


def _cdi_device_name(uid: str, device: PreparedDevice) -> str:
    return f"{uid}-{device.result.device}"


# The spec of NVIDIA's driver files, shared by all claims of a plugin.


log = structlog.get_logger(__name__)

_IMEX_PROGRAMS = ("nvidia-imex", "nvidia-imex-ctl", "nvidia-smi")
_IMEX_LIBRARIES = ("libnvidia-ml", "libcuda", "libnvidia-cfg", "libnvidia-nscq")
_IMEX_DEVICES = ("nvidiactl", "nvidia[0-9]*")
DRIVER_PROGRAMS = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
)
_UNVERSIONED = (
    "libcuda",
    "libcudadebugger",
    "libnvidia-*",
    "libnvcuvid",
    "libnvoptix",
    "libGLX_nvidia",
    "libEGL_nvidia",
    "libGLESv*_nvidia",
)
"""The driver's libraries whose names have no version."""
_EXPECTED_LINKS = {
    "libcuda": ("libcuda.so", "libcuda.so.1"),
    "libnvidia-opticalflow": ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
    "libGLX_nvidia": ("libGLX_indirect.so.0", None),
}
"""By library: a link that programs open, and its target. None means the library itself."""
_READ_ONLY = ("ro", "nosuid", "nodev", "rbind", "rprivate")
_HOOK = "nvidia-cdi-hook"
_HOOK_PLACES = (*PROGRAM_PLACES, "usr/local/nvidia/toolkit")
"""The last is the directory of GPU Operator."""
_CREATE_SYMLINKS, _CUDA_COMPAT, _UPDATE_CACHE = "create-symlinks", "enable-cuda-compat", "update-ldcache"
_COMMANDS = (_CREATE_SYMLINKS, _CUDA_COMPAT, _UPDATE_CACHE)


class HookProgram(NodeValue, frozen=True, kw_only=True):
    """nvidia-cdi-hook as the host has it, and the commands that it knows."""

    path: str
    commands: frozenset[str]


def daemon_edits(driver: NvidiaDriver) -> ContainerEdits:
    """Programs, libraries and GPUs for nvidia-imex, without a hook. Empty if the host lacks nvidia-imex."""
    programs, libraries = driver.programs(*_IMEX_PROGRAMS), driver.libraries(*_IMEX_LIBRARIES)
    if not libraries or not any(file.path.name == "nvidia-imex" for file in programs):
        return ContainerEdits()
    return ContainerEdits(
        env=("NVIDIA_VISIBLE_DEVICES=void", _search_path(libraries)),
        mounts=_mounts(driver, (*programs, *libraries)),
        device_nodes=tuple(_device_nodes(driver.devices)),
    )


def workload_edits(driver: NvidiaDriver, hook: HookProgram | None = None) -> ContainerEdits:
    """Libraries, programs and firmware for a container with a GPU."""
    known = frozenset[str]() if hook is None else hook.commands
    libraries = driver.libraries(*(() if driver.version else _UNVERSIONED))
    links = tuple(_links(libraries))
    # Without a hook that makes links, a link is a mount of its target.
    mounted = [file for file in libraries if file.link is None or _CREATE_SYMLINKS not in known]
    mounts = _mounts(driver, (*mounted, *driver.programs(*DRIVER_PROGRAMS), *driver.firmware()))
    if _CREATE_SYMLINKS not in known:
        by_path = {mount.container_path: mount for mount in mounts}
        for file, link, _ in _expected(libraries):
            by_path.setdefault(str(link), _mount(driver, file.real, link))
        mounts = tuple(by_path.values())
    folders = sorted({str(file.path.parent) for file in libraries})
    calls = {
        _CREATE_SYMLINKS: [word for target, link in links for word in ("--link", f"{target}::{link}")],
        _CUDA_COMPAT: [f"--host-driver-version={driver.version}"] if driver.version else [],
        _UPDATE_CACHE: [word for folder in folders for word in ("--folder", folder)],
    }
    return ContainerEdits(
        env=("NVIDIA_VISIBLE_DEVICES=void", *(() if _UPDATE_CACHE in known else (_search_path(libraries),))),
        mounts=mounts,
        hooks=tuple(
            ContainerHook(hook_name="createContainer", path=hook.path, args=(_HOOK, command, *words))
            for command, words in calls.items()
            if hook is not None and command in known and words
        ),
    )


def find_hook_program(base: Path, host_base: Path) -> HookProgram | None:
    """nvidia-cdi-hook below `base`, which the host has at `host_base`. It is read, never run."""
    sysroot = Sysroot(base)
    for place in _HOOK_PLACES:
        path = PurePosixPath("/", place, _HOOK)
        if (real := sysroot.real(str(path))) is not None:
            # GPU Operator's is a script that calls the program beside it.
            named = (real, real.with_name(f"{real.name}.real"))
            programs = [file for path_ in named if (file := base.joinpath(*path_.parts[1:])).is_file()]
            commands = frozenset(
                name for name in _COMMANDS if any(_mentions(file, name) for file in programs)
            )
            return HookProgram(path=str(host_base.joinpath(*path.parts[1:])), commands=commands)
    return None


@dataclass(eq=False)
class DriverSpec:
    """The shared spec of one plugin's driver files.

    `base` is the host's root as it is seen from here, and `host_base` as the host has it. `make` turns a
    driver into edits. Without `required`, a node without the driver's files is served too if its devices
    are declared.
    """

    cdi: CdiDirectory
    make: Callable[[NvidiaDriver], ContainerEdits]
    _: KW_ONLY
    base: Path
    host_base: Path = OWN_ROOT
    sysroot: Path = OWN_ROOT
    required: bool = True
    driver: NvidiaDriver | None = field(default=None, init=False)
    """As of the newest refresh."""
    _fingerprint: tuple[object, ...] = field(default=(), init=False)
    _written: ContainerEdits = field(default=ContainerEdits(), init=False)
    _loaded: str | None = field(default=None, init=False)
    _ids: tuple[str, ...] = field(default=(), init=False)

    async def ids(self) -> tuple[str, ...]:
        """CDI ids that a container needs besides its claim's. Raises `Retry` while files are missing.

        They may be missing again: a driver container that is replaced takes its files with it.
        """
        await self.refresh()
        if self.required and (self.driver is None or not self._ids):
            where = ", ".join(str(root) for root in (self.base, self.base / "run/nvidia/driver"))
            raise Retry(f"the files of NVIDIA's driver are not ready in {where}", after=DRIVER_SECONDS)
        return self._ids

    async def refresh(self) -> bool:
        """Bring the spec up to date. Returns whether the driver changed. Cheap if nothing changed."""
        return await asyncio.to_thread(self._refresh)

    def _refresh(self) -> bool:
        loaded = loaded_version(self.sysroot)
        now = driver_fingerprint(self.base, loaded, *_HOOK_PLACES)
        if now == self._fingerprint:
            return False
        self._fingerprint = now
        driver = find_driver(self.base, self.host_base, loaded)
        changed = (loaded, driver) != (self._loaded, self.driver)
        self._loaded, self.driver = loaded, driver
        if changed:
            found = None if driver is None else (str(driver.root), driver.version)
            log.info("node.driver", loaded=loaded, files=found)
        edits = ContainerEdits() if driver is None else self.make(driver)
        if edits and edits != self._written:
            self._ids = self.cdi.write_shared("device_base", "device", "all", edits)
            self._written = edits
        return changed


def _mounts(driver: NvidiaDriver, files: tuple[DriverFile, ...]) -> tuple[ContainerMount, ...]:
    """Each file at its path. Links are resolved in the driver's root, not on the host."""
    return tuple(dict.fromkeys(_mount(driver, file.real, file.path) for file in files))


def _mount(driver: NvidiaDriver, real: PurePosixPath, path: PurePosixPath) -> ContainerMount:
    host_path = str(driver.host_root.joinpath(*real.parts[1:]))
    return ContainerMount(host_path=host_path, container_path=str(path), options=_READ_ONLY)


def _links(libraries: tuple[DriverFile, ...]) -> Iterator[tuple[str, PurePosixPath]]:
    """(target, link) of every link to make, each link once: the host's, then others that programs expect."""
    made: set[PurePosixPath] = set()
    for file in libraries:
        if file.link is not None:
            made.add(file.path)
            beside = "/" not in file.link
            yield (file.link if beside else str(file.real)), file.path
    for file, link, target in _expected(libraries):
        if link not in made:
            made.add(link)
            yield (target or file.real.name), link


def _expected(
    libraries: tuple[DriverFile, ...],
) -> Iterator[tuple[DriverFile, PurePosixPath, str | None]]:
    for file in libraries:
        name, _, version = file.path.name.partition(".so.")
        if file.link is None and version and name in _EXPECTED_LINKS:
            link, target = _EXPECTED_LINKS[name]
            yield file, file.path.with_name(link), target


def _search_path(libraries: tuple[DriverFile, ...]) -> str:
    return f"LD_LIBRARY_PATH={':'.join(sorted({str(file.path.parent) for file in libraries}))}"


def _device_nodes(directory: Path) -> Iterator[DeviceNode]:
    for pattern in _IMEX_DEVICES:
        for path in sorted(directory.glob(pattern)):
            if path.is_char_device():
                yield device_node(f"/dev/{path.name}", path.stat())


def _mentions(file: Path, command: str) -> bool:
    """Whether a program contains the text."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(command.encode()) >= 0
    except (OSError, ValueError):
        return False
