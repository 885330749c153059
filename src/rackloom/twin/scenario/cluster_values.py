"""Steps of a scenario on the cluster: what users submit, what breaks on nodes, what must be seen of objects.

A tray is named by its rack and its place in it, both counted from 1.
"""

from typing import ClassVar, Literal

from rackloom.twin.scenario.values import Action, Expectation, Layer


class ClusterAction(Action, frozen=True, kw_only=True):
    """Something is done to the cluster, or breaks in it."""

    layer: ClassVar[Layer] = "cluster"


class ClusterExpectation(Expectation, frozen=True, kw_only=True):
    """Something must be seen of the cluster."""

    layer: ClassVar[Layer] = "cluster"


class TrayAction(ClusterAction, frozen=True, kw_only=True):
    """Something happens to one tray."""

    tray: int
    rack: int = 1


class UserAction(ClusterAction, frozen=True, kw_only=True):
    """A user asks the API server for something."""

    breaks: ClassVar[bool] = False


class Submit(UserAction, frozen=True, kw_only=True, tag="submit"):
    """A user creates the objects of a manifest (YAML)."""

    manifest: str
    namespace: str = "default"


class DeleteObject(UserAction, frozen=True, kw_only=True, tag="delete-object"):
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


class CliqueLabelLags(ClusterAction, frozen=True, kw_only=True, tag="clique-label-lags"):
    """GPU Feature Discovery writes what it finds only so many `seconds` later, from now on."""

    seconds: float


class FabricState(TrayAction, frozen=True, kw_only=True, tag="fabric-state"):
    """A GPU says (NVML) that it is joining its fabric, or that it has; the switches say nothing of it."""

    gpu: int
    state: Literal["in-progress", "completed"]


class ImexDaemonKilled(TrayAction, frozen=True, kw_only=True, tag="imex-daemon-killed"):
    """The pod of a ComputeDomain's IMEX daemon on a tray is killed."""


class ImexAddressesSwapped(ClusterAction, frozen=True, kw_only=True, tag="imex-addresses-swapped"):
    """The pods of the IMEX daemons on two trays are killed, and each new one has the address of the other."""

    trays: tuple[int, int]
    rack: int = 1


class ApiServerDown(ClusterAction, frozen=True, kw_only=True, tag="api-server-down"):
    """No request reaches the API server, and all watches end."""


class ApiServerBad(ClusterAction, frozen=True, kw_only=True, tag="api-server-bad"):
    """A part of our writes meet conflicts or lose answers, or of changes are heard twice or out of order."""

    how: Literal["conflict", "loses-reply", "events-twice", "events-late"]
    rate: float


class ApiServerStale(ClusterAction, frozen=True, kw_only=True, tag="api-server-stale"):
    """Our processes are stuck with one that falls behind: watches tell nothing; plain lists stay true."""


class ApiServerGood(ClusterAction, frozen=True, kw_only=True, tag="api-server-good"):
    """Everything reaches it and is answered again. Fails if what was bad has struck nothing."""

    breaks: ClassVar[bool] = False


class WatchesDrop(ClusterAction, frozen=True, kw_only=True, tag="watches-drop"):
    """All watches break; the API server still has what comes meanwhile."""


class WatchesExpire(ClusterAction, frozen=True, kw_only=True, tag="watches-expire"):
    """All watches break, and the API server no longer has what came since: 410 Gone."""


class SoleAction(ClusterAction, frozen=True, kw_only=True):
    """Something happens to Rackloom's controllers where they are one process, and none is elected."""


class ControllersKilled(SoleAction, frozen=True, kw_only=True, tag="controllers-killed"):
    """Rackloom's controllers are killed where they stand; others begin after so many seconds."""

    down: float = 1.0


class ControllersDie(SoleAction, frozen=True, kw_only=True, tag="controllers-die"):
    """So many `lives` of Rackloom's controllers end at their `point`-th step: before a write, or after it."""

    point: int
    lives: int = 1


class ControllersDoubled(SoleAction, frozen=True, kw_only=True, tag="controllers-doubled"):
    """Others begin beside Rackloom's controllers, as when a leader wakes up that was thought dead."""


class ControllersSingle(SoleAction, frozen=True, kw_only=True, tag="controllers-single"):
    """The others end."""


class ControllersClockSet(ClusterAction, frozen=True, kw_only=True, tag="controllers-clock-set"):
    """The clock of the controllers' machine is set forwards, or backwards."""

    by: float


class LeaderAction(ClusterAction, frozen=True, kw_only=True):
    """Something happens to the replica of Rackloom's controllers that was elected."""


class LeaderKilled(LeaderAction, frozen=True, kw_only=True, tag="leader-killed"):
    """It is killed where it stands and keeps the Lease; `down` seconds later it stands for election again."""

    down: float = 60.0


class LeaderCutOff(LeaderAction, frozen=True, kw_only=True, tag="leader-cut-off"):
    """Nothing arrives any more between it and the API server; the other replica still reaches that."""


class LeaderConnected(LeaderAction, frozen=True, kw_only=True, tag="leader-connected"):
    """What was cut off reaches the API server again."""


class ExpectLeader(ClusterExpectation, frozen=True, kw_only=True, tag="leader"):
    """The Lease names who leads, and no two ever did at once; `changed`: not whom the last such step saw."""

    changed: bool = False


class ExpectControllersEnded(ClusterExpectation, frozen=True, kw_only=True, tag="controllers-ended"):
    """So many lives of Rackloom's controllers have ended."""

    count: int


class ExpectImexMesh(ClusterExpectation, frozen=True, kw_only=True, tag="imex-mesh"):
    """So many nvidia-imex truly run, and each knows and reaches those of its own domain, and no other.

    `begun`: so many of them did not run when the last such step looked.
    """

    count: int
    begun: int | None = None


class ExpectGpus(ClusterExpectation, frozen=True, kw_only=True, tag="gpus"):
    """A node publishes (UUIDs) what is in its tray; `swapped`: nothing that the last such step saw."""

    tray: int
    rack: int = 1
    swapped: bool = False


class ExpectObject(ClusterExpectation, frozen=True, kw_only=True, tag="object"):
    """A field of an object, at the keys of `path`, is `equals` (as text); without that, it is not there."""

    kind: str
    name: str
    path: tuple[str, ...]
    equals: str | None = None
    namespace: str = "default"


class ExpectCondition(ClusterExpectation, frozen=True, kw_only=True, tag="condition"):
    """A condition of an object has this status, and `reason`."""

    kind: str
    name: str
    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str | None = None
    namespace: str = "default"


class ExpectGang(ClusterExpectation, frozen=True, kw_only=True, tag="gang"):
    """A gang's record has so many `seats` and `spares`; so many members are `running` on reserved seats.

    `moved`: so many have another seat than the last such step saw; `plans`: so many were recorded in all.
    """

    name: str
    seats: int
    spares: int = 0
    running: int | None = None
    moved: int | None = None
    plans: int | None = None
    namespace: str = "default"


class ExpectReserved(ClusterExpectation, frozen=True, kw_only=True, tag="reserved-trays"):
    """So many trays are reserved for gangs."""

    count: int


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
    """nvidia.com/gpu.clique is what the GPUs truly say; or (`present` false) none, or (`stale`) old."""

    tray: int
    rack: int = 1
    present: bool = True
    stale: bool = False


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
