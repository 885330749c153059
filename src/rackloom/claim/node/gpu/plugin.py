"""The driver gpu.nvidia.com: preparing claims for GPUs, MIG devices and passed-through GPUs.

`prepare` resolves the devices and their configurations, finds the device files and the driver's CDI ids,
and only then changes how the GPUs are shared: what cannot be given needs no sharing. `unprepare` undoes
the sharing. `tidy` ends MPS daemons that no claim has, and looks after those of prepared claims, which a
restart forgot.

Device numbers come from the kernel: /proc/devices names the majors; the minors of nvidiactl (255),
nvidia-modeset (254), nvidia-uvm (0) and nvidia-uvm-tools (1) are fixed in NVIDIA's kernel modules; a MIG
device also needs the capability files of its GPU instance and compute instance, whose minors stand below
/proc/driver/nvidia/capabilities.

A passed-through GPU needs /dev/vfio/<group> and /dev/vfio/vfio, or with IOMMUFD its own file below
/dev/vfio/devices and /dev/iommu (the kernel's VFIO documentation). It gets no driver files: its driver is
in the virtual machine.

Three loops run beside: look at the GPUs, listen for XIDs, keep MPS daemons alive.
"""

import asyncio
import re
import stat
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from rackloom.claim.node.cdi import DRIVER_SECONDS, DriverSpec, device_node
from rackloom.claim.node.gpu.inventory import MigDevice, NodeGpu, ShareSettings, VfioGpu
from rackloom.claim.node.gpu.monitor import OBSERVE_SECONDS, GpuMonitor
from rackloom.claim.node.gpu.sharing import (
    ClaimedGpu,
    DriverPrograms,
    MpsDaemons,
    SharingPlan,
    apply_sharing,
    claimed_gpus,
    iommu_of_claimed,
    mps_daemon_of,
    plan_sharing,
    undo_sharing,
)
from rackloom.claim.node.imex.devices import CAPS_DRIVER
from rackloom.claim.node.plugin import (
    AllocatedClaim,
    CheckpointEntry,
    ContainerEdits,
    DeviceHealth,
    DeviceNode,
    DevicePool,
    NodeValue,
    PreparedClaim,
    PreparedDevice,
    PrepareState,
)
from rackloom.core.domains.device_configs import IommuConfig, VfioBackendPolicy
from rackloom.errors import Refused, Retry
from rackloom.topology.discovery.sysfs import character_devices

# Device files of NVIDIA's driver.


DEVICE_FILE_MODE = 0o666
_GPU_DRIVERS = ("nvidia", "nvidia-frontend")
"""The second is the name of drivers before 560."""
_CAPABILITY_MINOR = re.compile(r"^DeviceFileMinor:\s*(\d+)\s*$", re.MULTILINE)


class DriverFiles(NodeValue, frozen=True, kw_only=True):
    """Where the kernel tells of NVIDIA's driver, and where device files are seen from here."""

    proc_devices: Path = Path("/proc/devices")
    capabilities: Path = Path("/proc/driver/nvidia/capabilities")
    devices: Path = Path("/dev")

    def of_gpu(self, gpu: NodeGpu) -> tuple[DeviceNode, ...]:
        """For a whole GPU. Raises `Retry` while the driver is not loaded."""
        majors = self._majors()
        major = next((majors[name] for name in _GPU_DRIVERS if name in majors), None)
        if major is None:
            raise Retry(
                "NVIDIA's driver is not loaded: /proc/devices does not list it;"
                " load the nvidia module on the node",
                after=DRIVER_SECONDS,
            )
        nodes = [
            _device_node(f"nvidia{gpu.minor}", major, gpu.minor),
            _device_node("nvidiactl", major, 255),
        ]
        if (uvm := majors.get("nvidia-uvm")) is not None:
            nodes += [_device_node("nvidia-uvm", uvm, 0), _device_node("nvidia-uvm-tools", uvm, 1)]
        # A kernel without display support has no modeset device.
        if (modeset := majors.get("nvidia-modeset")) is not None:
            nodes.append(_device_node("nvidia-modeset", modeset, 254))
        return tuple(nodes)

    def of_mig(self, gpu: NodeGpu, mig: MigDevice) -> tuple[DeviceNode, ...]:
        """For a MIG device: the file of its GPU, and what gives access to the two instances."""
        instance = self.capabilities / f"gpu{gpu.minor}" / "mig" / f"gi{mig.gpu_instance}"
        files = (instance / "access", instance / f"ci{mig.compute_instance}" / "access")
        major = self._majors().get(CAPS_DRIVER)
        if major is None:
            raise Refused(
                f"{self.proc_devices} lists no character device {CAPS_DRIVER}",
                nearest_fix="load a driver of NVIDIA that knows MIG",
            )
        minors = [_capability_minor(file) for file in files]
        caps = (_device_node(f"nvidia-caps/nvidia-cap{minor}", major, minor) for minor in minors)
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

    def _majors(self) -> dict[str, int]:
        return {name: major for major, name in character_devices(self.proc_devices.read_text())}


def _capability_minor(file: Path) -> int:
    """Raises `Retry` for an instance that is gone: the GPU is being partitioned anew."""
    try:
        match = _CAPABILITY_MINOR.search(file.read_text())
    except OSError as error:
        raise Retry(f"{file}: {error.strerror}", after=1.0) from error
    if match is None:
        raise Retry(f"{file} names no device file", after=1.0)
    return int(match[1])


def _device_node(name: str, major: int, minor: int) -> DeviceNode:
    return DeviceNode(path=f"/dev/{name}", major=major, minor=minor, file_mode=DEVICE_FILE_MODE)


# Device files of a passed-through GPU.


def vfio_device_files(vfio: VfioGpu, iommu: IommuConfig) -> tuple[str, ...]:
    """What a container needs to pass the GPU on."""
    if iommu.backend_policy is VfioBackendPolicy.PREFER_IOMMUFD and vfio.iommufd is not None:
        own, api = f"/dev/vfio/devices/{vfio.iommufd}", "/dev/iommu"
    else:
        own, api = f"/dev/vfio/{vfio.group}", "/dev/vfio/vfio"
    return (own, api) if iommu.enable_api_device else (own,)


# Settings.


GPU_DRIVER = "gpu.nvidia.com"


class GpuSettings(NodeValue, frozen=True, kw_only=True):
    """Of one node."""

    node: str
    mps_home: Path
    """A directory for each MPS daemon."""
    files: DriverFiles = DriverFiles()
    shares: ShareSettings = ShareSettings()


# The driver.


log = structlog.get_logger(__name__)

GPU_KIND, MIG_KIND, VFIO_KIND = "gpu", "mig", "vfio"


class GpuPlugin:
    """The GPUs of one node."""

    driver = GPU_DRIVER
    kinds = (GPU_KIND, MIG_KIND, VFIO_KIND)

    def __init__(
        self,
        settings: GpuSettings,
        monitor: GpuMonitor,
        programs: DriverPrograms,
        driver: DriverSpec | None = None,
    ) -> None:
        self._settings = settings
        self._monitor = monitor
        self._programs = programs
        self._driver = driver
        self._mps = MpsDaemons(programs, settings.mps_home)

    def missing(self) -> str | None:
        """NVIDIA's driver, on a node whose GPUs it should drive."""
        return self._monitor.missing

    async def pools(self) -> tuple[DevicePool, ...]:
        """The node's pool. Raises `Retry` until the GPUs were read once."""
        pool = await self._monitor.pool(self._settings.node)
        return (msgspec.structs.replace(pool, devices=tuple(map(self._settings.shares.of, pool.devices))),)

    def intent(self, claim: AllocatedClaim) -> Mapping[str, Any]:
        """How the GPUs will be shared: all that has to be undone."""
        wanted = claimed_gpus(claim, self._monitor.device)
        return {"sharing": msgspec.to_builtins(plan_sharing(claim.ref.uid, wanted))}

    async def prepare(self, claim: AllocatedClaim) -> PreparedClaim:
        """One attempt. Files first: a GPU that cannot be handed out needs no sharing."""
        wanted = claimed_gpus(claim, self._monitor.device)
        sharing = plan_sharing(claim.ref.uid, wanted)
        base = await self._base_ids(wanted)
        devices = tuple(self._device(gpu, sharing, base) for gpu in wanted)
        # The intent on disk holds the same plan, so whatever part of this was done can be undone.
        await apply_sharing(sharing, self._programs, self._mps)
        return PreparedClaim(devices=devices)

    async def changes(self, claim: AllocatedClaim) -> AsyncIterator[None]:
        """Never yields: a GPU that comes back is found by the next observation."""
        for _ in ():
            yield

    async def unprepare(self, entry: CheckpointEntry, others: Collection[CheckpointEntry]) -> None:
        """Give the GPUs back as they were. A GPU belongs to one claim at a time, so `others` have no part."""
        await self._monitor.need()
        await undo_sharing(_recorded_sharing(entry), self._programs, self._mps, self._monitor.answers)

    async def tidy(self, claims: Collection[CheckpointEntry]) -> None:
        """End MPS daemons that no claim has, and supervise those of prepared claims again after a restart."""
        used = [daemon.name for entry in claims for daemon in _recorded_sharing(entry).daemons]
        ready = [claim for claim in claims if claim.state is PrepareState.COMPLETED and not claim.undoing]
        await self._mps.keep([daemon for entry in ready for daemon in _recorded_sharing(entry).daemons], used)

    async def run(self, wake: Callable[[], None]) -> None:
        """Look at the GPUs, listen for their errors, and keep MPS daemons alive."""
        self._monitor.on_change(wake)
        await asyncio.gather(self._watch_gpus(), self._watch_xids(), self._restart_mps())

    async def health(self) -> tuple[DeviceHealth, ...]:
        """As of the newest look, and of the errors since."""
        return self._monitor.health(self._settings.node)

    async def _watch_gpus(self) -> None:
        while True:
            if self._driver is not None:
                await self._driver.refresh()
            await self._monitor.observe()
            await asyncio.sleep(DRIVER_SECONDS if self._monitor.missing else OBSERVE_SECONDS)

    async def _watch_xids(self) -> None:
        while True:
            try:
                await self._monitor.listen()
            except Retry as retry:
                log.info("gpu.no-events", reason=retry.reason)
                await asyncio.sleep(retry.after)

    async def _restart_mps(self) -> None:
        while True:
            await asyncio.sleep(OBSERVE_SECONDS)
            await self._mps.revive()

    async def _base_ids(self, wanted: Sequence[ClaimedGpu]) -> tuple[str, ...]:
        """CDI ids of the driver's files, which a GPU that is passed through does not need."""
        if self._driver is None or all(target.device.vfio is not None for target in wanted):
            return ()
        return await self._driver.ids()

    def _device(self, target: ClaimedGpu, sharing: SharingPlan, base: tuple[str, ...]) -> PreparedDevice:
        device, daemon = target.device, mps_daemon_of(target, sharing)
        kind = VFIO_KIND if device.vfio is not None else GPU_KIND if device.mig is None else MIG_KIND
        through = ContainerEdits() if daemon is None else self._mps.edits(daemon.name)
        return PreparedDevice(
            result=target.result,
            kind=kind,
            edits=ContainerEdits(
                env=("NVIDIA_VISIBLE_DEVICES=void", *through.env),
                device_nodes=self._nodes(target),
                mounts=through.mounts,
            ),
            shared_cdi_ids=() if kind == VFIO_KIND else base,
        )

    def _nodes(self, target: ClaimedGpu) -> tuple[DeviceNode, ...]:
        device, files = target.device, self._settings.files
        if device.vfio is not None:
            return tuple(map(files.existing, vfio_device_files(device.vfio, iommu_of_claimed(target))))
        if device.condition is None:
            return ()
        gpu = device.condition.gpu
        return files.of_gpu(gpu) if device.mig is None else files.of_mig(gpu, device.mig)


def _recorded_sharing(entry: CheckpointEntry) -> SharingPlan:
    return msgspec.convert(entry.record.get("sharing", {}), SharingPlan)
