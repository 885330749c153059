"""What must be seen of a scenario's site: by its tenants, on the true fabrics, or by the doctor."""

from typing import ClassVar

from rackloom.twin.scenario.values import Expectation, Layer


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
    """REST names, for every GPU of a group, the uuid that its controller says; `changed`: a new one.

    New is what the last such step of the group did not see.
    """

    group: str
    changed: bool = False


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
