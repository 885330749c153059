"""What the drivers publish that tells devices apart, by what a template can use it for.

Names are those of gpu.nvidia.com and dra.net and the standard ones of resource.kubernetes.io. UUIDs, MAC and
IP addresses are left out on purpose: they exist on one machine only.
"""

from rackloom.claim.allocate.candidates import Candidate

NUMA_NODE = "resource.kubernetes.io/numaNode"
PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
PCI_BUS_ID = "resource.kubernetes.io/pciBusID"
RDMA = "dra.net/rdma"

GPU_TRAITS = ("gpu.nvidia.com/type", NUMA_NODE, PCIE_ROOT)
GPU_IDS = (PCI_BUS_ID, "gpu.nvidia.com/pciBusID")
GPU_MODEL = "gpu.nvidia.com/productName"
NIC_TRAITS = (RDMA, "dra.net/numaNode", NUMA_NODE, PCIE_ROOT, "dra.net/pciDevice")
NIC_IDS = ("dra.net/pciAddress", PCI_BUS_ID, "dra.net/rdmaDevice", "dra.net/ifName")
NIC_MODEL = ("dra.net/pciVendor", "dra.net/pciDevice")
TELLING = tuple(dict.fromkeys((*GPU_TRAITS, *GPU_IDS, GPU_MODEL, *NIC_TRAITS, *NIC_IDS, *NIC_MODEL)))

Scalar = str | int | bool


def value_of(device: Candidate, name: str) -> Scalar | None:
    """The value of a scalar attribute; None where there is none, or a list, which nothing equals."""
    found = device.attribute(name)
    values = () if found is None else (found.bool_, found.int_, found.string)
    return next((value for value in values if value is not None), None)


def first_text(device: Candidate, names: tuple[str, ...]) -> str | None:
    """The first of the named attributes that is a text."""
    return next((value for name in names if isinstance(value := value_of(device, name), str)), None)
