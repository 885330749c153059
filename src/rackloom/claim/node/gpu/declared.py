"""The GPUs of a node without GPUs, as a file declares them: for rehearsals, simulated nodes and tests.

    {"driverVersion": "580.95.05", "cudaVersion": "13.0",
     "gpus": [{"minor": 0, "uuid": "GPU-...", "pciAddress": "0001:00:00.0",
               "product": "NVIDIA H100 80GB HBM3", "memoryBytes": 85899345920, "computeCapability": "9.0"}]}

docs/gpus.md names every field. The file is read again at each look, so that what it says may change: a number
that appears among a GPU's `xids` is an error that happens now, and a GPU that disappears is lost.
"""

import time
from pathlib import Path

import msgspec

from rackloom.claim.node.declared import declared_key
from rackloom.claim.node.gpu.inventory import Gpu, Inventory, Mig, Recovery, Xid
from rackloom.claim.node.values import Health
from rackloom.errors import Refused, Retry

_RECOVERIES = {one.name.lower().replace("_", "-"): one for one in Recovery}


class _File(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True, omit_defaults=True
):
    """Base of what the file holds."""


class DeclaredMig(_File, frozen=True, kw_only=True):
    """A MIG device, as `inventory.Mig`."""

    uuid: str
    profile: str
    gpu_instance: int
    compute_instance: int = 0
    profile_id: int
    placement_start: int
    placement_size: int = 1
    memory_bytes: int
    multiprocessors: int = 0
    copy_engines: int = 0
    decoders: int = 0
    encoders: int = 0
    jpeg_engines: int = 0
    ofa_engines: int = 0


class DeclaredGpu(_File, frozen=True, kw_only=True):
    """A GPU, as `inventory.Gpu`."""

    minor: int
    uuid: str
    pci_address: str
    product: str
    memory_bytes: int
    brand: str | None = None
    architecture: str | None = None
    compute_capability: str | None = None
    addressing_mode: str | None = None
    mig_mode: bool = False
    migs: tuple[DeclaredMig, ...] = ()
    clique: str = ""
    chassis_serial: str | None = None
    slot: int | None = None
    tray: int | None = None
    module_id: int | None = None
    fabric_guid: str | None = None
    fabric_health: Health = Health.UNKNOWN
    recovery: str | None = None
    xids: tuple[int, ...] = ()


class DeclaredInventory(_File, frozen=True, kw_only=True):
    """The whole file."""

    gpus: tuple[DeclaredGpu, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None


class DeclaredGpus:
    """A file in the place of NVIDIA's driver."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._told: frozenset[Xid] | None = None

    def read(self) -> Inventory:
        """What the file says now. Raises `Retry` naming what is wrong with it: it may be in the making."""
        file = self._file()
        try:
            return Inventory(
                gpus=tuple(_gpu(one) for one in file.gpus),
                driver_version=file.driver_version,
                cuda_version=file.cuda_version,
            )
        except (ValueError, KeyError) as error:
            raise Retry(f"cannot use inventory {self._path}: {error!r}", after=1.0) from error

    def wait(self, seconds: float) -> tuple[Xid, ...]:
        """Errors that the file tells of for the first time, after `seconds`."""
        time.sleep(seconds)
        told = frozenset(Xid(uuid=gpu.uuid, number=xid) for gpu in self._file().gpus for xid in gpu.xids)
        new = told - (self._told or frozenset())
        self._told = told
        return tuple(sorted(new, key=lambda xid: (xid.uuid, xid.number)))

    def unmonitored(self) -> frozenset[str]:
        """Every GPU of the file can be listened to."""
        return frozenset()

    def close(self) -> None:
        """Nothing is held."""

    def _file(self) -> DeclaredInventory:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=DeclaredInventory)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Retry(f"cannot use inventory {self._path}: {error}", after=1.0) from error


def check_declared(path: Path) -> None:
    """Raise `Refused` for a file that cannot be used as it is."""
    try:
        DeclaredGpus(path).read()
    except Retry as retry:
        raise Refused(retry.reason, nearest_fix="docs/gpus.md shows its format") from retry


def _gpu(one: DeclaredGpu) -> Gpu:
    plain = {name: getattr(one, name) for name in Gpu.__struct_fields__ if hasattr(one, name)}
    told = {
        "migs": tuple(Mig(**msgspec.structs.asdict(mig)) for mig in one.migs),
        "recovery": None if one.recovery is None else _RECOVERIES[one.recovery],
        "key": declared_key(
            uuid=one.uuid,
            pci_address=one.pci_address,
            chassis_serial=one.chassis_serial,
            slot=one.slot,
            module_id=one.module_id,
            fabric_guid=one.fabric_guid,
        ),
        "fabric_message": "declared",
    }
    return Gpu(**{**plain, **told})
