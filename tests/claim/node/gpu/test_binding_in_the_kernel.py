"""A PCI function that goes to vfio-pci and back, by the real kernel, in the machine of `make test-kernel`.

The function is the machine's random number generator, behind an IOMMU that QEMU shows.
"""

import os
import subprocess
from pathlib import Path

import pytest

from rackloom.claim.node.gpu.passthrough import PciBinder

BUS = Path("/sys/bus/pci")
DRIVER = "virtio-pci"
_RANDOM = "0x1005"
"""Device id of a virtio random number generator (legacy and transitional)."""

pytestmark = pytest.mark.skipif(
    "RACKLOOM_OWN_KERNEL" not in os.environ,
    reason="NEEDS A KERNEL OF ITS OWN: make test-kernel",
)


@pytest.fixture
def function() -> str:
    subprocess.run(["modprobe", "vfio-pci"], check=True)
    for device in (BUS / "devices").iterdir():
        if (device / "device").read_text().strip() == _RANDOM:
            return device.name
    pytest.fail("the machine has no function to take")


def driver_of(address: str) -> str | None:
    link = BUS / "devices" / address / "driver"
    return link.readlink().name if link.is_symlink() else None


def test_a_function_goes_to_vfio_and_back_whatever_was_cut_off(function):
    binder = PciBinder(BUS, Path("/proc"), driver=DRIVER)
    assert driver_of(function) == DRIVER
    for _ in range(2):
        binder.bind(function, "no-such-file")
        assert driver_of(function) == "vfio-pci"
    for _ in range(2):
        binder.release(function)
        assert driver_of(function) == DRIVER
    # Cut off after the driver has let go.
    (BUS / "devices" / function / "driver_override").write_text("vfio-pci")
    (BUS / "drivers" / DRIVER / "unbind").write_text(function)
    binder.bind(function, None)
    assert driver_of(function) == "vfio-pci"
    # And after vfio-pci has.
    (BUS / "devices" / function / "driver_override").write_text("\n")
    (BUS / "drivers/vfio-pci/unbind").write_text(function)
    binder.release(function)
    assert driver_of(function) == DRIVER
    assert (BUS / "devices" / function / "driver_override").read_text().strip() in ("", "(null)")


def test_a_function_whose_file_is_open_is_not_taken(function, tmp_path):
    from rackloom.errors import Retry

    device_file = Path("/dev/null")
    with device_file.open() as _, pytest.raises(Retry, match="is used by"):
        PciBinder(BUS, Path("/proc"), driver=DRIVER).bind(function, "null")
    assert driver_of(function) == DRIVER
