"""Which clique this node is in: the rule, over what its GPUs say.

A clique is a set of GPUs that can share memory over NVLink. Every GPU of a node must name the same one.
Source: nvmlDeviceGetGpuFabricInfo (states and status); NVIDIA's DRA driver with CrashOnNVLinkFabricErrors.
"""

from enum import IntEnum

import msgspec

from rackloom.claim.domain.driver import OLDEST_DRIVER, is_too_old
from rackloom.claim.node.values import Health
from rackloom.errors import Refused, Retry
from rackloom.topology.identity import GpuKey

NO_CLUSTER = "00000000-0000-0000-0000-000000000000"
"""What a GPU behind the NVSwitches of a single machine reports: no fabric beyond the machine."""
FABRIC_RETRY_SECONDS = 10.0


class FabricState(IntEnum):
    """How far a GPU has registered with the fabric manager (NVML_GPU_FABRIC_STATE_*)."""

    NOT_SUPPORTED = 0
    NOT_STARTED = 1
    IN_PROGRESS = 2
    COMPLETED = 3


class GpuFabric(msgspec.Struct, frozen=True, kw_only=True):
    """What one GPU says of its NVLink fabric."""

    name: str
    """For messages: `GPU 0 (GPU-...)`."""
    state: FabricState
    status: int = 0
    """NVML return code of the registration, once it is completed; 0 is success."""
    cluster_uuid: str = NO_CLUSTER
    clique_id: int = 0
    key: GpuKey = GpuKey()
    tray: int | None = None
    health: Health = Health.UNKNOWN
    health_message: str = "this driver does not report the health of the fabric"


class NodeFabric(msgspec.Struct, frozen=True, kw_only=True):
    """What all GPUs of the node say; a node without GPUs has none."""

    gpus: tuple[GpuFabric, ...] = ()
    driver_version: str | None = None


def clique_of(fabric: NodeFabric) -> str:
    """`<clusterUUID>.<cliqueId>`, or "" for a node without an NVLink fabric beyond itself.

    Raises `Retry` while that cannot be said, naming the GPU.
    """
    found = {_clique(gpu) for gpu in fabric.gpus} - {""}
    if len(found) > 1:
        raise Retry(
            f"the GPUs of this node are in {len(found)} cliques ({', '.join(sorted(found))}):"
            " the fabric is being partitioned, or partitioned wrongly",
            after=FABRIC_RETRY_SECONDS,
        )
    return found.pop() if found else ""


def check_driver(fabric: NodeFabric) -> None:
    """Raise `Refused` for a driver whose IMEX daemon cannot resolve its peers' names again while it runs."""
    version = fabric.driver_version
    if version is not None and is_too_old(version):
        raise Refused(
            f"NVIDIA's driver {version} is older than {OLDEST_DRIVER}, which first follows peers by DNS name",
            nearest_fix=f"install driver {OLDEST_DRIVER} or later on the node",
        )


def _clique(gpu: GpuFabric) -> str:
    if gpu.state is FabricState.NOT_SUPPORTED:
        return ""
    if gpu.state is not FabricState.COMPLETED:
        raise Retry(
            f"{gpu.name} has not joined its NVLink fabric: {gpu.state.name.lower().replace('_', ' ')}",
            after=FABRIC_RETRY_SECONDS,
        )
    if gpu.status != 0:
        raise Retry(
            f"{gpu.name} could not join its NVLink fabric: NVML error {gpu.status}",
            after=FABRIC_RETRY_SECONDS,
        )
    return "" if gpu.cluster_uuid == NO_CLUSTER else f"{gpu.cluster_uuid}.{gpu.clique_id}"
