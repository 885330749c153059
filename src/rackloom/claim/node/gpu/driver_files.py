"""Device files of NVIDIA's driver that a container needs.

Source: /proc/devices names the major numbers; minor numbers are fixed in NVIDIA's kernel modules (nvidiactl
255, nvidia-modeset 254, uvm 0, uvm-tools 1); capabilities say theirs below /proc/driver/nvidia/capabilities.
"""

import re
import stat
from pathlib import Path

from rackloom.claim.node.driver import DRIVER_SECONDS, device_node
from rackloom.claim.node.gpu.inventory import Gpu, Mig
from rackloom.claim.node.imex.host import CAPS_DRIVER
from rackloom.claim.node.values import DeviceNode, Value
from rackloom.errors import Refused, Retry
from rackloom.topology.discovery.proc_devices import character_devices

MODE = 0o666
_GPU_DRIVERS = ("nvidia", "nvidia-frontend")
"""The second is what drivers before 560 are called."""
_CAPABILITY_MINOR = re.compile(r"^DeviceFileMinor:\s*(\d+)\s*$", re.MULTILINE)


class DriverFiles(Value, frozen=True, kw_only=True):
    """Where the kernel tells of NVIDIA's driver, and where device files are seen from here."""

    proc_devices: Path = Path("/proc/devices")
    capabilities: Path = Path("/proc/driver/nvidia/capabilities")
    devices: Path = Path("/dev")

    def of_gpu(self, gpu: Gpu) -> tuple[DeviceNode, ...]:
        """For a whole GPU. Raises `Retry` while the driver is not loaded."""
        majors = self._majors()
        return (_node(f"nvidia{gpu.minor}", _gpu_major(majors), gpu.minor), *_common(majors))

    def of_mig(self, gpu: Gpu, mig: Mig) -> tuple[DeviceNode, ...]:
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
        caps = (_node(f"nvidia-caps/nvidia-cap{minor}", major, minor) for minor in minors)
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


def _common(majors: dict[str, int]) -> tuple[DeviceNode, ...]:
    """What every user of any GPU needs; a kernel without display support has no modeset device."""
    gpu = _gpu_major(majors)
    nodes = [_node("nvidiactl", gpu, 255)]
    if "nvidia-uvm" in majors:
        nodes += [
            _node("nvidia-uvm", majors["nvidia-uvm"], 0),
            _node("nvidia-uvm-tools", majors["nvidia-uvm"], 1),
        ]
    if "nvidia-modeset" in majors:
        nodes.append(_node("nvidia-modeset", majors["nvidia-modeset"], 254))
    return tuple(nodes)


def _gpu_major(majors: dict[str, int]) -> int:
    for name in _GPU_DRIVERS:
        if name in majors:
            return majors[name]
    raise Retry(
        "NVIDIA's driver is not loaded: /proc/devices does not list it; load the nvidia module on the node",
        after=DRIVER_SECONDS,
    )


def _capability_minor(file: Path) -> int:
    """Raises `Retry` for an instance that is gone: somebody is making others of the GPU."""
    try:
        told = _CAPABILITY_MINOR.search(file.read_text())
    except OSError as error:
        raise Retry(f"{file}: {error.strerror}", after=1.0) from error
    if told is None:
        raise Retry(f"{file} names no device file", after=1.0)
    return int(told[1])


def _node(name: str, major: int, minor: int) -> DeviceNode:
    return DeviceNode(path=f"/dev/{name}", major=major, minor=minor, file_mode=MODE)
