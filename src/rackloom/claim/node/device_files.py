"""Device files of NVIDIA's driver: which a container needs, and their numbers as the kernel has them.

/proc/devices names the majors. The minors of nvidiactl (255), nvidia-modeset (254), nvidia-uvm (0) and
nvidia-uvm-tools (1) are fixed in NVIDIA's kernel modules. A MIG device also needs the capability files of
its GPU instance and compute instance, and an IMEX daemon that of fabric-imex-mgmt: their minors are in files
below /proc/driver/nvidia/capabilities. IMEX channels have their own major, and their number as minor.

A passed-through GPU needs /dev/vfio/<group> and /dev/vfio/vfio, or with IOMMUFD its own file below
/dev/vfio/devices and /dev/iommu (the kernel's VFIO documentation).
"""

import os
import re
import stat
from pathlib import Path

from rackloom.claim.node.gpu.inventory import MigDevice, NodeGpu
from rackloom.claim.node.gpu.passthrough import VfioGpu
from rackloom.claim.node.plugin import DeviceNode, NodeValue
from rackloom.core.cluster.device_configs import IommuConfig, VfioBackendPolicy
from rackloom.core.cluster.names import OLDEST_IMEX_DRIVER
from rackloom.errors import Refused, Retry, file_error_text
from rackloom.topology.discovery.sysfs import IMEX_CHANNEL_DEVICES, character_devices

DRIVER_SECONDS = 5.0
"""Between two checks for a driver that is missing, or for a change of one that is there."""
OPEN_TO_ALL = 0o666
"""As NVIDIA's driver has GPUs and channels: anybody in the container may open them."""
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


# GPUs.


class DriverFiles(NodeValue, frozen=True, kw_only=True):
    """Where the kernel lists the devices of NVIDIA's driver, and where device files are seen from here."""

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
        """For a MIG device: the file of its GPU, and what gives access to the two instances."""
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
    """Raises `Retry` for an instance that is gone: the GPU is being partitioned anew."""
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
    """What a container needs to pass the GPU on."""
    if iommu.backend_policy is VfioBackendPolicy.PREFER_IOMMUFD and vfio.iommufd is not None:
        own, api = f"/dev/vfio/devices/{vfio.iommufd}", "/dev/iommu"
    else:
        own, api = f"/dev/vfio/{vfio.group}", "/dev/vfio/vfio"
    return (own, api) if iommu.enable_api_device else (own,)


# IMEX.


class ImexKernel(NodeValue, frozen=True, kw_only=True):
    """Where the kernel lists the IMEX channels, and the capability to manage IMEX."""

    proc_devices: Path = Path("/proc/devices")
    imex_capability: Path = Path("/proc/driver/nvidia/capabilities/fabric-imex-mgmt")

    def channel_major(self) -> int:
        """Major number of the channel devices. Raises `Refused` where the driver offers none."""
        return self._major(IMEX_CHANNEL_DEVICES)

    def has_channels(self) -> bool:
        """Whether the driver offers channels now."""
        try:
            self.channel_major()
        except Refused:
            return False
        return True

    def management_node(self) -> DeviceNode:
        """The device that lets a daemon manage the fabric. Raises `Refused` where there is none."""
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
