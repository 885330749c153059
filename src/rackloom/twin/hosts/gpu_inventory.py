"""The GPUs of a machine profile as NVIDIA's driver would list them, for a node that has none.

What a profile does not know of its GPUs is made up: a UUID from the names, and what the product is known for.
"""

from uuid import NAMESPACE_DNS, uuid5

from rackloom.claim.node.gpu.declared import DeclaredGpu, DeclaredInventory
from rackloom.topology.machine import Gpu, Machine

_PRODUCTS = (
    ("GB300", "Blackwell", "10.3", 284208),
    ("GB200", "Blackwell", "10.0", 189471),
    ("B200", "Blackwell", "10.0", 183359),
    ("H200", "Hopper", "9.0", 143771),
    ("H100", "Hopper", "9.0", 81559),
    ("A100", "Ampere", "8.0", 40960),
    ("A10G", "Ampere", "8.6", 23028),
    ("V100", "Volta", "7.0", 32768),
    ("L20", "Ada Lovelace", "8.9", 46068),
    ("L4", "Ada Lovelace", "8.9", 23034),
)
"""Part of the product's name, architecture, compute capability, memory in MiB. The longer name is first."""
_MADE_UP_DRIVER, _MADE_UP_CUDA = "580.95.05", "13.0"


def declared_inventory(machine: Machine) -> DeclaredInventory:
    """NVIDIA's GPUs of the machine; other vendors' are unknown to NVIDIA's driver."""
    gpus = [gpu for gpu in machine.gpus if _is_nvidia(gpu)]
    versions = [gpu.driver_version for gpu in gpus if gpu.driver_version is not None]
    return DeclaredInventory(
        gpus=tuple(_declared(machine, gpu) for gpu in gpus),
        driver_version=versions[0] if versions else _MADE_UP_DRIVER,
        cuda_version=_MADE_UP_CUDA,
    )


def _is_nvidia(gpu: Gpu) -> bool:
    return not (gpu.pci_id or "10de:").startswith("1002:") and "MI300" not in (gpu.product or "")


def _declared(machine: Machine, gpu: Gpu) -> DeclaredGpu:
    product = gpu.product or "NVIDIA H100 80GB HBM3"
    name, architecture, capability, mebibytes = next(
        (row for row in _PRODUCTS if row[0] in product), (product, None, None, 0)
    )
    return DeclaredGpu(
        minor=gpu.index,
        uuid=gpu.uuid or f"GPU-{uuid5(NAMESPACE_DNS, f'{machine.name}/{gpu.index}')}",
        # As twin/hosts/sysroot.py makes one up.
        pci_address=gpu.pci_address or f"0fff:{gpu.index + 1:02x}:00.0",
        product=product if product.startswith("NVIDIA") else f"NVIDIA {name}",
        memory_bytes=(gpu.memory_mib or mebibytes) << 20,
        brand="Nvidia",
        architecture=architecture,
        compute_capability=capability,
        addressing_mode="None",
    )
