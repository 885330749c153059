"""What is done to a scenario's site: by tenants, by operators, by other hands, by mishap."""

from typing import ClassVar, Literal

from rackloom.twin.scenario.values import ONLY_VIRTUAL, Action, Speed

# What tenants do, through REST.


class TenantAction(Action, frozen=True, kw_only=True):
    """Somebody asks REST for something."""

    breaks: ClassVar[bool] = False


class MakeLogicalPartition(TenantAction, frozen=True, kw_only=True, tag="make-logical-partition"):
    """A tenant makes a logical partition."""

    name: str
    tenant: str = "red"


class MakeVpc(TenantAction, frozen=True, kw_only=True, tag="make-vpc"):
    """A tenant makes a VPC, whose instances join `logical_partition`; without it, `set-interfaces` says."""

    name: str
    logical_partition: str = ""
    tenant: str = "red"


class MakeInstances(TenantAction, frozen=True, kw_only=True, tag="make-instances"):
    """A tenant asks for a batch of whole trays; `group` names them from then on."""

    group: str
    vpc: str
    count: int = 1
    tenant: str = "red"


class SetInterfaces(TenantAction, frozen=True, kw_only=True, tag="set-interfaces"):
    """A tenant puts each GPU of one instance into a logical partition; an empty name: into none."""

    instance: str
    """`group/number`."""
    logical_partitions: tuple[str, ...]
    """By GPU, first to last."""


class ReleaseInstances(TenantAction, frozen=True, kw_only=True, tag="release-instances"):
    """A tenant gives a group back."""

    group: str


# What breaks around the switch controllers.


class SwitchStops(Action, frozen=True, kw_only=True, tag="switch-stops"):
    """The controller of a rack can no longer be reached; the fabric keeps working."""

    rack: int = 1


class SwitchAnswers(Action, frozen=True, kw_only=True, tag="switch-answers"):
    """It can be reached again."""

    rack: int = 1


class SwitchRestarts(Action, frozen=True, kw_only=True, tag="switch-restarts"):
    """It restarts, and may have forgotten something: names of partitions, all partitions, its domain uuid."""

    rack: int = 1
    forgets: Literal["nothing", "names", "partitions", "domain"] = "nothing"


class NmxcAction(Action, frozen=True, kw_only=True):
    """Something that can only happen to an NMX-C."""


class SwitchLeaderMoves(NmxcAction, frozen=True, kw_only=True, tag="switch-leader-moves"):
    """The controller on another switch tray of a rack leads, at its own address; the old one is silent."""

    rack: int = 1


class SwitchOldLeaderReturns(NmxcAction, frozen=True, kw_only=True, tag="switch-old-leader-returns"):
    """The controller that led a rack before its leader moved leads where it did again, with what it knew."""

    rack: int = 1


class SwitchOldLeaderYields(NmxcAction, frozen=True, kw_only=True, tag="switch-old-leader-yields"):
    """It has learned that another one leads, and lists no GPU any more."""

    rack: int = 1


class SwitchStandbyRegistered(NmxcAction, frozen=True, kw_only=True, tag="switch-standby-registered"):
    """An operator registers who would lead a rack next, too; before it leads it lists no GPU."""

    rack: int = 1


class SwitchLeaderRegistered(NmxcAction, frozen=True, kw_only=True, tag="switch-leader-registered"):
    """An operator tells the site at which address the leader of a rack answers now."""

    rack: int = 1


class SwitchClaimsDomain(Action, frozen=True, kw_only=True, tag="switch-claims-domain"):
    """The controller of a rack says that it is the domain of another rack: the two contradict each other."""

    rack: int
    domain_of: int


class SwitchMistreats(NmxcAction, frozen=True, kw_only=True, tag="switch-mistreats"):
    """Coming calls of one RPC are refused, answered without a header, or carried out without an answer."""

    rpc: str
    how: Literal["refuses", "loses-reply", "omits-header"]
    rack: int = 1
    times: int = 1


class SwitchHides(NmxcAction, frozen=True, kw_only=True, tag="switch-hides"):
    """So many lists leave out the partition that holds an instance's first GPU."""

    instance: str
    lists: int = 1


class NetworkBad(NmxcAction, frozen=True, kw_only=True, tag="network-bad"):
    """What the network does to the next change that is asked of a rack, or from now on to all calls."""

    how: Literal["applied-late", "applied-twice", "accepted-only", "dark", "slow", "notices-lost"]
    rack: int = 1
    speeds: ClassVar[frozenset[Speed]] = ONLY_VIRTUAL


class SwitchTrayOut(Action, frozen=True, kw_only=True, tag="switch-tray-out"):
    """One of the switch trays of a rack goes: every GPU and partition of it has less bandwidth."""

    rack: int = 1


class SwitchTrayBack(Action, frozen=True, kw_only=True, tag="switch-tray-back"):
    """It is put back."""

    rack: int = 1


# What happens to trays, GPUs and partitions behind the site's back.


class TrayPulled(Action, frozen=True, kw_only=True, tag="tray-pulled"):
    """The tray of an instance is taken out."""

    instance: str


class TrayReturned(Action, frozen=True, kw_only=True, tag="tray-returned"):
    """It is put back: the same one, or `swapped` for another with new fabric GUIDs in the same slot."""

    instance: str
    swapped: bool = False


class TrayMoved(Action, frozen=True, kw_only=True, tag="tray-moved"):
    """The tray of an instance is put where another one of its rack was, and that one where it was."""

    instance: str
    tray: int


class GpuHealthChanges(Action, frozen=True, kw_only=True, tag="gpu-health"):
    """A GPU gets worse or better."""

    instance: str
    gpu: int
    health: Literal["healthy", "degraded", "no-nvlink", "degraded-bandwidth"]


class PartitionByHand(Action, frozen=True, kw_only=True, tag="partition-by-hand"):
    """Somebody makes a partition on the switch, of GPUs wherever they are."""

    name: str
    instance: str
    gpus: tuple[int, ...]


class PartitionGone(Action, frozen=True, kw_only=True, tag="partition-gone"):
    """Somebody deletes, on the switch, the partition that holds the first GPU of an instance."""

    instance: str


class ListReadByHand(Action, frozen=True, kw_only=True, tag="list-read-by-hand"):
    """Somebody reads the members of the partition that holds the first GPU of an instance."""

    name: str
    instance: str


class ListWrittenByHand(Action, frozen=True, kw_only=True, tag="list-written-by-hand"):
    """They write the whole list back as they read it, as NMX-M's PUT does: what came since is dropped."""

    name: str


class HandLetsGo(Action, frozen=True, kw_only=True, tag="hand-lets-go"):
    """The partition that somebody made on the switch is deleted by them."""

    name: str


# What happens to the service and its machine.


class ServiceKilled(Action, frozen=True, kw_only=True, tag="service-killed"):
    """The site service ends (virtual: wherever it stands) and is started again on the same records."""

    down: float = 1.0


class ServiceDies(Action, frozen=True, kw_only=True, tag="service-dies"):
    """The service is killed at one of its next writes to the records or calls to a switch; 1: the next."""

    point: int
    speeds: ClassVar[frozenset[Speed]] = ONLY_VIRTUAL


class ClockSet(Action, frozen=True, kw_only=True, tag="clock-set"):
    """The clock of the service's machine is set forwards, or backwards."""

    by: float
    speeds: ClassVar[frozenset[Speed]] = ONLY_VIRTUAL
