"""What the IMEX plugin reads of the kernel: device numbers of channels, and the management capability."""

import re
from pathlib import Path

import msgspec

from rackloom.claim.domain.driver import OLDEST_DRIVER
from rackloom.claim.node.values import DeviceNode
from rackloom.errors import Refused, why
from rackloom.topology.discovery.proc_devices import IMEX_CHANNELS, character_devices

CAPS_DRIVER = "nvidia-caps"
CHANNEL_MODE = 0o666
_CAP_FIELD = re.compile(r"^(DeviceFile\w+):\s*(\d+)\s*$", re.MULTILINE)


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """Where the kernel tells of NVIDIA's driver."""

    proc_devices: Path = Path("/proc/devices")
    imex_capability: Path = Path("/proc/driver/nvidia/capabilities/fabric-imex-mgmt")

    def channel_major(self) -> int:
        """Major number of the channel devices. Raises `Refused` where the driver offers none."""
        return self._major(IMEX_CHANNELS)

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
            fields = dict(_CAP_FIELD.findall(self.imex_capability.read_text()))
            minor, mode = int(fields["DeviceFileMinor"]), int(fields["DeviceFileMode"])
        except (OSError, KeyError) as error:
            raise Refused(
                f"{self.imex_capability} does not name the IMEX management device: {error!r}",
                nearest_fix=f"install NVIDIA's driver {OLDEST_DRIVER} or later on the node",
            ) from error
        path = f"/dev/nvidia-caps/nvidia-cap{minor}"
        return DeviceNode(path=path, major=self._major(CAPS_DRIVER), minor=minor, file_mode=mode)

    def _major(self, driver: str) -> int:
        try:
            text = self.proc_devices.read_text()
        except OSError as error:
            raise Refused(
                f"{self.proc_devices} cannot be read: {why(error)}",
                nearest_fix="name the kernel's list of devices as --proc-devices",
            ) from error
        for major, name in character_devices(text):
            if name == driver:
                return major
        raise Refused(
            f"{self.proc_devices} lists no character device {driver}",
            nearest_fix="load the nvidia module of a driver with IMEX support",
        )


def channel_node(major: int, channel: int) -> DeviceNode:
    """The device of one IMEX channel. Anybody in the container may open it, as NVIDIA's driver has it."""
    path = f"/dev/{IMEX_CHANNELS}/channel{channel}"
    return DeviceNode(path=path, major=major, minor=channel, file_mode=CHANNEL_MODE)
