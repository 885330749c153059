"""A scenario as values: steps in order of time, each something that is done or something that must be seen.

Times are seconds since the site first answered. Racks count from 1, as people count them; so do GPUs of a
tray (the module id), and instances of a group.
"""

from typing import ClassVar, Literal

import msgspec

Layer = Literal["carve", "cluster", "doctor"]
Speed = Literal["real", "virtual"]
Controller = Literal["nmx-c", "nmx-m"]
BOTH: frozenset[Speed] = frozenset({"real", "virtual"})
ONLY_VIRTUAL: frozenset[Speed] = frozenset({"virtual"})


class Step(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """What all steps have. `at`: not before this second; without it, as soon as the step before is over."""

    at: float | None = None
    layer: ClassVar[Layer] = "carve"
    speeds: ClassVar[frozenset[Speed]] = BOTH


class Action(Step, frozen=True, kw_only=True, tag_field="do"):
    """Something is done, or breaks."""


class Expectation(Step, frozen=True, kw_only=True, tag_field="expect"):
    """Something must be seen `within` so many seconds, and then stay so `for` so many more."""

    within: float
    stays: float = 0.0


# What tenants do, through REST.


class MakeLogicalPartition(Action, frozen=True, kw_only=True, tag="make-logical-partition"):
    """A tenant makes a logical partition."""

    name: str
    tenant: str = "red"


class MakeVpc(Action, frozen=True, kw_only=True, tag="make-vpc"):
    """A tenant makes a VPC, whose instances join `logical_partition`; without it, `set-interfaces` says."""

    name: str
    logical_partition: str = ""
    tenant: str = "red"


class MakeInstances(Action, frozen=True, kw_only=True, tag="make-instances"):
    """A tenant asks for a batch of whole trays; `group` names them from then on."""

    group: str
    vpc: str
    count: int = 1
    tenant: str = "red"


class SetInterfaces(Action, frozen=True, kw_only=True, tag="set-interfaces"):
    """A tenant puts each GPU of one instance into a logical partition; an empty name: into none."""

    instance: str
    """`group/number`."""
    logical_partitions: tuple[str, ...]
    """By GPU, first to last."""


class ReleaseInstances(Action, frozen=True, kw_only=True, tag="release-instances"):
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


class SwitchClaimsDomain(Action, frozen=True, kw_only=True, tag="switch-claims-domain"):
    """The controller of a rack says that it is the domain of another rack: the two contradict each other."""

    rack: int
    domain_of: int


class NmxcAction(Action, frozen=True, kw_only=True):
    """Something that can only happen to an NMX-C."""


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


class Heal(Action, frozen=True, kw_only=True, tag="heal"):
    """Whatever still is broken is repaired, on every layer."""


class End(Step, frozen=True, kw_only=True):
    """After the last step of every file: what was asked for has happened. No file writes it."""


# What must be seen.


class ExpectInstances(Expectation, frozen=True, kw_only=True, tag="instances"):
    """REST says this status of every instance of a group, `because` being a part of its newest message."""

    group: str
    status: str
    because: str = ""


class ExpectReleased(Expectation, frozen=True, kw_only=True, tag="released"):
    """REST no longer knows the instances of a group."""

    group: str


class ExpectInterface(Expectation, frozen=True, kw_only=True, tag="interface"):
    """REST says this status of one GPU of an instance, `because` being a part of its newest message."""

    instance: str
    gpu: int
    status: str
    because: str = ""


class ExpectLogicalPartition(Expectation, frozen=True, kw_only=True, tag="logical-partition"):
    """REST says this status of a logical partition."""

    name: str
    status: str


class ExpectDomain(Expectation, frozen=True, kw_only=True, tag="domain"):
    """REST names, for every GPU of a group, the domain uuid that its controller says now."""

    group: str


class ExpectReadAgain(Expectation, frozen=True, kw_only=True, tag="read-again"):
    """The service has read the controller of a rack anew since this step began."""

    rack: int = 1


class ExpectTogether(Expectation, frozen=True, kw_only=True, tag="together"):
    """On the true fabric, the GPUs of these groups are one partition, and nobody else is in it."""

    groups: tuple[str, ...]


class ExpectAlone(Expectation, frozen=True, kw_only=True, tag="alone"):
    """On the true fabric, no GPU of a group shares a partition with a GPU of anybody else."""

    group: str


class ExpectPartitions(Expectation, frozen=True, kw_only=True, tag="partitions"):
    """So many partitions of a true fabric hold GPUs."""

    count: int
    rack: int = 1


class ExpectUntouched(Expectation, frozen=True, kw_only=True, tag="untouched"):
    """A partition that somebody made by hand is as they made it."""

    name: str


class ExpectInvariants(Expectation, frozen=True, kw_only=True, tag="invariants"):
    """S1, S2 and S4 held at every change of a fabric so far; what was acknowledged is there (S10)."""


class ExpectFinding(Expectation, frozen=True, kw_only=True, tag="finding"):
    """The doctor finds it by this check, and names an instance's machine, a tray, or (without one) a rack."""

    check: str
    subject: str = ""
    instance: str = ""
    tray: int | None = None
    rack: int | None = None
    layer: ClassVar[Layer] = "doctor"


class ExpectNoFinding(Expectation, frozen=True, kw_only=True, tag="no-finding"):
    """The doctor finds nothing; or nothing of one check."""

    check: str = ""
    layer: ClassVar[Layer] = "doctor"


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One incident. `seen` names where such a one was reported, or what kind of fault it is."""

    name: str
    title: str
    seen: str
    racks: int
    profile: str
    processes: int = 1
    """Replicas of the service on the same records; several only in virtual time."""
    controller: Controller = "nmx-c"
    """What the racks are behind: each an NMX-C, or all of them one NMX-M (only in virtual time)."""
    steps: tuple[Step, ...]

    @property
    def layers(self) -> frozenset[Layer]:
        """The layers of a site that it needs."""
        return frozenset(step.layer for step in self.steps)

    @property
    def speeds(self) -> frozenset[Speed]:
        """The clocks by which every one of its steps can be played."""
        plain = self.processes == 1 and self.controller == "nmx-c"
        return frozenset.intersection(BOTH if plain else ONLY_VIRTUAL, *(step.speeds for step in self.steps))
