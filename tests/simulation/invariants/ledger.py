"""The ledger of REST answers to tenants, kept apart from the service's own records.

The ledger is the oracle for durability (S10) and for tenant isolation. An object that was acknowledged
must exist until its deletion was acknowledged. A change without an answer leaves the object `in_doubt`:
either the old or the new state is allowed until the tenant reads it again. `unanswered` names
organisations that do not know yet whether a create succeeded.

For each instance the ledger keeps the logical partition that each GPU should be in, and since when, so
that the invariants can tell an outdated status from a recent change. It also keeps which instance was
last acknowledged on each machine, which racks are paused, and until when a machine is being drained.

`InvariantViolated` is raised for a broken promise. Its text begins with the promise's name.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

Json = dict[str, Any]
LedgerState = Literal["live", "leaving", "gone"]


class LedgerObject(msgspec.Struct, kw_only=True):
    """An object with an acknowledged creation."""

    id: str
    org: str
    name: str
    state: LedgerState = "live"
    in_doubt: bool = False
    """A change was requested and not answered yet: the object has the old state or the requested one."""


class LedgerInstance(LedgerObject, kw_only=True):
    """An instance, and the logical partitions requested for its GPUs."""

    vpc: str
    machine: str
    desired: dict[int, str]
    """deviceInstance to logical partition. Other GPUs shall be in none."""
    since: dict[int, float]
    """deviceInstance to the virtual time of the request for its present partition (or for none)."""
    born: float

    def desired_since(self, device: int) -> float:
        """The time of the request for a GPU's present partition."""
        return self.since.get(device, self.born)

    def change_desired(self, desired: dict[int, str], now: float) -> None:
        """Record a request for other partitions."""
        for device in self.desired.keys() | desired.keys():
            if self.desired.get(device) != desired.get(device):
                self.since[device] = now
        self.desired = dict(desired)


class LedgerVpc(LedgerObject, kw_only=True):
    """A VPC and its default logical partition."""

    default: str | None


class Ledger:
    """All answers to all tenants."""

    def __init__(self) -> None:
        self.partitions: dict[str, LedgerObject] = {}
        self.vpcs: dict[str, LedgerVpc] = {}
        self.instances: dict[str, LedgerInstance] = {}
        self.holder: dict[str, str] = {}
        """Machine to the instance last acknowledged on it, until that is known to be gone."""
        self.unanswered: set[str] = set()
        """Organisations with an unanswered last create, which may have succeeded."""
        self.paused: dict[str, float] = {}
        """Rack to the virtual time at which its pause was acknowledged, until its end is requested."""
        self.drained_until: dict[str, float] = {}
        """Machine to the virtual time until which its GPUs may leave their requested partitions."""

    def owner_of(self, partition: str) -> str | None:
        """The org of a logical partition, deleted ones too."""
        found = self.partitions.get(partition)
        return None if found is None else found.org

    def on_machine(self, machine: str) -> LedgerInstance | None:
        """The instance on a machine."""
        held = self.holder.get(machine)
        return None if held is None else self.instances[held]

    def add_instance(self, org: str, answer: Json, now: float) -> LedgerInstance:
        """An instance that was just made."""
        desired = desired_partitions_of(answer)
        instance = LedgerInstance(
            id=answer["id"],
            org=org,
            name=answer["name"],
            vpc=answer["vpcId"],
            machine=answer["machineId"],
            desired=desired,
            since={},
            born=now,
        )
        self.instances[instance.id] = instance
        self.holder[instance.machine] = instance.id
        return instance

    def forget_instance(self, instance: LedgerInstance) -> None:
        """An instance that is known to be gone."""
        instance.state = "gone"
        if self.holder.get(instance.machine) == instance.id:
            del self.holder[instance.machine]

    def of(self, org: str, kind: str) -> list[Any]:
        """The live and leaving objects of an org: `partitions`, `vpcs` or `instances`."""
        objects: dict[str, LedgerObject] = getattr(self, kind)
        return [obj for obj in objects.values() if obj.org == org and obj.state != "gone"]

    def live(self, org: str, kind: str) -> list[Any]:
        """The objects of an org without a request to delete them."""
        return [obj for obj in self.of(org, kind) if obj.state == "live"]


def desired_partitions_of(answer: Json) -> dict[int, str]:
    """The logical partition of each GPU of an instance, as an answer shows it."""
    return {
        interface["deviceInstance"]: interface["nvLinkLogicalPartitionId"]
        for interface in answer["nvLinkInterfaces"]
        if interface["status"] != "Deleting"
    }


class InvariantViolated(AssertionError):
    """An invariant does not hold. The text begins with its name (S1 to S10, L1 to L5)."""


OnAnswer = Callable[[str, str, str, int, Any], None]
"""Called with every answer: org, method, path, status and body."""
