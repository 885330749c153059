"""The fabric of a node without GPUs, as a file declares it: for rehearsals, simulated nodes and tests.

    {"clusterUUID": "7b968a6d-...", "cliqueId": 1, "state": "completed", "driverVersion": "580.95.05",
     "gpus": [{"uuid": "GPU-...", "pciAddress": "0008:01:00.0", "chassisSerial": "1820325190001", "slot": 3,
               "tray": 2, "moduleId": 1, "fabricGuid": "0x7c0a...", "health": "Healthy"}]}

`state` is one of notSupported, notStarted, inProgress, completed. A GPU may override `clusterUUID`,
`cliqueId` and `state`; everything of a GPU may be left out.
"""

from enum import StrEnum
from pathlib import Path

import msgspec

from rackloom.claim.node.declared import declared_key
from rackloom.claim.node.imex.fabric import NO_CLUSTER, FabricState, GpuFabric, NodeFabric
from rackloom.claim.node.values import Health
from rackloom.errors import Refused


class _State(StrEnum):
    NOT_SUPPORTED = "notSupported"
    NOT_STARTED = "notStarted"
    IN_PROGRESS = "inProgress"
    COMPLETED = "completed"


class _Gpu(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    uuid: str | None = None
    pci_address: str | None = None
    chassis_serial: str | None = None
    slot: int | None = None
    tray: int | None = None
    module_id: int | None = None
    fabric_guid: str | None = None
    health: Health = Health.UNKNOWN
    cluster_uuid: str | None = msgspec.field(default=None, name="clusterUUID")
    clique_id: int | None = None
    state: _State | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    cluster_uuid: str = msgspec.field(default=NO_CLUSTER, name="clusterUUID")
    clique_id: int = 0
    state: _State = _State.COMPLETED
    driver_version: str | None = None
    gpus: tuple[_Gpu, ...]


def read_declared(path: Path) -> NodeFabric:
    """Read the file. Raises `Refused` naming what is wrong with it."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
        gpus = tuple(_gpu(index, gpu, file) for index, gpu in enumerate(file.gpus))
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise Refused(
            f"cannot use fabric file {path}: {error}", nearest_fix="docs/node-plugins.md shows its format"
        ) from error
    return NodeFabric(gpus=gpus, driver_version=file.driver_version)


def _gpu(index: int, gpu: _Gpu, file: _File) -> GpuFabric:
    return GpuFabric(
        name=f"GPU {index}" if gpu.uuid is None else f"GPU {index} ({gpu.uuid})",
        state=FabricState[(gpu.state or file.state).name],
        cluster_uuid=gpu.cluster_uuid or file.cluster_uuid,
        clique_id=file.clique_id if gpu.clique_id is None else gpu.clique_id,
        key=declared_key(
            uuid=gpu.uuid,
            pci_address=gpu.pci_address,
            chassis_serial=gpu.chassis_serial,
            slot=gpu.slot,
            module_id=gpu.module_id,
            fabric_guid=gpu.fabric_guid,
        ),
        tray=gpu.tray,
        health=gpu.health,
        health_message="declared",
    )
