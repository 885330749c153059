"""Device files that containers are given: the driver's, and those of passed-through GPUs."""

import pytest

from rackloom.claim.node.cdi import DriverFiles, vfio_device_files
from rackloom.claim.node.gpu.inventory import NodeGpu
from rackloom.claim.node.gpu.passthrough import read_vfio, vfio_device
from rackloom.claim.node.pci_names import read_pci_names
from rackloom.core.cluster.device_configs import IommuConfig, VfioBackendPolicy
from rackloom.errors import Retry
from rackloom.topology.discovery.sysfs import Sysroot

GPU = NodeGpu(minor=2, uuid="GPU-1", pci_address="0000:01:00.0", product="", memory_bytes=0)


def lay(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


def test_device_files_need_a_loaded_driver(tmp_path):
    (tmp_path / "devices").write_text("Character devices:\n  1 mem\n\nBlock devices:\n")
    with pytest.raises(Retry, match="not loaded"):
        DriverFiles(proc_devices=tmp_path / "devices").of_gpu(GPU)
    (tmp_path / "devices").write_text("Character devices:\n195 nvidia-frontend\n\nBlock devices:\n")
    nodes = DriverFiles(proc_devices=tmp_path / "devices").of_gpu(GPU)
    assert [(node.path, node.minor) for node in nodes] == [("/dev/nvidia2", 2), ("/dev/nvidiactl", 255)]


def test_a_device_file_is_taken_as_it_is(tmp_path):
    files = DriverFiles()
    null = files.existing("/dev/null")
    assert (null.path, null.major, null.minor) == ("/dev/null", 1, 3)
    lay(tmp_path, "dev/vfio/17")
    with pytest.raises(Retry, match="is no device file"):
        DriverFiles(devices=tmp_path / "dev").existing("/dev/vfio/17")
    with pytest.raises(Retry, match="is not there"):
        DriverFiles(devices=tmp_path / "dev").existing("/dev/vfio/18")


def passed_through(root, address="0000:41:00.0", driver="vfio-pci"):
    at = root / f"sys/devices/pci0000:40/{address}"
    (at / "vfio-dev/vfio3").mkdir(parents=True)
    facts = {"class": "0x030200", "vendor": "0x10de", "device": "0x2330", "numa_node": "1"}
    for name, value in facts.items():
        (at / name).write_text(value + "\n")
    window = "0x0000380000000000 0x0000381fffffffff 0x000000000014220c"
    port = "0x000000000000e000 0x000000000000e07f 0x0000000000040101"
    (at / "resource").write_text(f"{port}\n{window}\njunk\n")
    for link, target in ((at / "driver", f"bus/pci/drivers/{driver}"), (at / "iommu_group", "groups/17")):
        (root / "sys" / target).mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../../{target}")
    (root / "sys/bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (root / "sys/bus/pci/devices" / address).symlink_to(f"../../../devices/pci0000:40/{address}")


def test_passed_through_gpus_are_found_and_keep_their_names(tmp_path):
    passed_through(tmp_path, "0000:41:00.0", driver="nvidia")
    passed_through(tmp_path, "0000:42:00.0")
    (vfio,) = read_vfio(Sysroot(tmp_path))
    assert (vfio.index, vfio.group, vfio.iommufd) == (1, 17, "vfio3")
    assert (vfio.vendor_id, vfio.device_id) == ("0x10de", "0x2330")
    assert (vfio.addressable_memory, vfio.pcie_root, vfio.numa_node) == (1 << 37, "pci0000:40", 1)
    assert vfio.product is None


@pytest.mark.parametrize("name", ["GH100 [H100 SXM5 80GB]", "x" * 64, "x" * 65])
def test_a_passed_through_gpu_has_the_name_of_the_hosts_list(tmp_path, name):
    passed_through(tmp_path)
    (tmp_path / "usr/share/misc").mkdir(parents=True)
    (tmp_path / "usr/share/misc/pci.ids").write_text(f"10de  NVIDIA Corporation\n\t2330  {name}\n")
    sysroot = Sysroot(tmp_path)
    (vfio,) = read_vfio(sysroot, read_pci_names(sysroot))
    attributes = vfio_device(vfio).attributes
    if len(name) > 64:
        assert "productName" not in attributes, "no attribute is longer"
    else:
        assert attributes["productName"].string == name


@pytest.mark.parametrize(
    ("policy", "api", "files"),
    [
        (VfioBackendPolicy.LEGACY_ONLY, False, ("/dev/vfio/17",)),
        (VfioBackendPolicy.LEGACY_ONLY, True, ("/dev/vfio/17", "/dev/vfio/vfio")),
        (VfioBackendPolicy.PREFER_IOMMUFD, False, ("/dev/vfio/devices/vfio3",)),
        (VfioBackendPolicy.PREFER_IOMMUFD, True, ("/dev/vfio/devices/vfio3", "/dev/iommu")),
    ],
)
def test_a_passed_through_gpu_is_given_as_it_is_wanted(tmp_path, policy, api, files):
    passed_through(tmp_path)
    (vfio,) = read_vfio(Sysroot(tmp_path))
    assert vfio_device_files(vfio, IommuConfig(backend_policy=policy, enable_api_device=api)) == files
