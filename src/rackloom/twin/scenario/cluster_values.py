"""Steps of a scenario on the cluster: what users submit, what breaks on nodes, what must be seen of objects.

A tray is named by its rack and its place in it, both counted from 1. The cluster runs in real time only:
its kubelets, plugins and daemons use threads and files of the machine.
"""

from typing import ClassVar, Literal

from rackloom.twin.scenario.values import ONLY_REAL, Action, Expectation, Layer, Speed


class ClusterAction(Action, frozen=True, kw_only=True):
    """Something is done to the cluster, or breaks in it."""

    layer: ClassVar[Layer] = "cluster"
    speeds: ClassVar[frozenset[Speed]] = ONLY_REAL


class ClusterExpectation(Expectation, frozen=True, kw_only=True):
    """Something must be seen of the cluster."""

    layer: ClassVar[Layer] = "cluster"
    speeds: ClassVar[frozenset[Speed]] = ONLY_REAL


class TrayAction(ClusterAction, frozen=True, kw_only=True):
    """Something happens to one tray."""

    tray: int
    rack: int = 1


class Submit(ClusterAction, frozen=True, kw_only=True, tag="submit"):
    """A user creates the objects of a manifest (YAML)."""

    manifest: str
    namespace: str = "default"


class DeleteObject(ClusterAction, frozen=True, kw_only=True, tag="delete-object"):
    """A user deletes an object."""

    kind: str
    name: str
    namespace: str = "default"


class NodeLost(TrayAction, frozen=True, kw_only=True, tag="node-lost"):
    """The power of a tray fails."""


class NodeBack(TrayAction, frozen=True, kw_only=True, tag="node-back"):
    """It starts again."""


class NodeReboots(TrayAction, frozen=True, kw_only=True, tag="node-reboots"):
    """A node goes and comes back at once."""


class GpuLost(TrayAction, frozen=True, kw_only=True, tag="gpu-lost"):
    """A GPU falls off the bus of its tray."""

    gpu: int


class GpuXid(TrayAction, frozen=True, kw_only=True, tag="gpu-xid"):
    """The driver reports an error of a GPU."""

    gpu: int
    xid: int


class NicLinkDown(TrayAction, frozen=True, kw_only=True, tag="nic-link-down"):
    """The link of a NIC (by its RDMA device, such as mlx5_0) goes down."""

    device: str


class CliqueLabelByHand(TrayAction, frozen=True, kw_only=True, tag="clique-label-by-hand"):
    """Somebody else writes nvidia.com/gpu.clique on the node of a tray."""

    value: str


class ImexDaemonKilled(TrayAction, frozen=True, kw_only=True, tag="imex-daemon-killed"):
    """The pod of a ComputeDomain's IMEX daemon on a tray is killed."""


class ApiServerDown(ClusterAction, frozen=True, kw_only=True, tag="api-server-down"):
    """No request reaches the API server, and all watches end."""


class ApiServerBad(ClusterAction, frozen=True, kw_only=True, tag="api-server-bad"):
    """A part of the writes fail with a conflict, or are carried out and their answer is lost."""

    how: Literal["conflict", "loses-reply"]
    rate: float


class ApiServerGood(ClusterAction, frozen=True, kw_only=True, tag="api-server-good"):
    """Everything reaches it and is answered again."""


class WatchesExpire(ClusterAction, frozen=True, kw_only=True, tag="watches-expire"):
    """All watches break, and the API server no longer has what came since: 410 Gone."""


class ControllersKilled(ClusterAction, frozen=True, kw_only=True, tag="controllers-killed"):
    """Rackloom's controllers are killed where they stand; others begin after so many seconds."""

    down: float = 1.0


class ExpectObject(ClusterExpectation, frozen=True, kw_only=True, tag="object"):
    """A field of an object, at the keys of `path`, is `equals` (as text); without that, it is not there."""

    kind: str
    name: str
    path: tuple[str, ...]
    equals: str | None = None
    namespace: str = "default"


class ExpectGone(ClusterExpectation, frozen=True, kw_only=True, tag="gone"):
    """There is no such object."""

    kind: str
    name: str
    namespace: str = "default"


class ExpectPods(ClusterExpectation, frozen=True, kw_only=True, tag="pods"):
    """So many pods with these labels are in this phase, on nodes whose kubelets say so now."""

    labels: str
    count: int
    phase: Literal["Pending", "Running", "Succeeded", "Failed"] = "Running"
    namespace: str = "default"


class ExpectOneClique(ClusterExpectation, frozen=True, kw_only=True, tag="one-clique"):
    """All pods with these labels are on nodes of one NVLink partition, as the true fabrics say."""

    labels: str
    namespace: str = "default"


class ExpectCliqueLabel(ClusterExpectation, frozen=True, kw_only=True, tag="clique-label"):
    """nvidia.com/gpu.clique of a tray is what the true fabric says; or, unless `present`, there is none."""

    tray: int
    rack: int = 1
    present: bool = True


class ExpectNode(ClusterExpectation, frozen=True, kw_only=True, tag="node"):
    """A node is Ready, or (`ready` false) is not."""

    tray: int
    rack: int = 1
    ready: bool = True


class ExpectDevices(ClusterExpectation, frozen=True, kw_only=True, tag="devices"):
    """So many devices of a driver are published of a tray; `tainted` counts those with a taint alone."""

    driver: str
    count: int
    tray: int
    rack: int = 1
    tainted: bool = False
