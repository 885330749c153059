"""The clients of a random run: tenants and an operator that act over REST and record every answer.

`RandomTenant` draws weighted actions: logical partitions, VPCs, instances, batches, interface changes,
releases, reads, and an attempt to use another tenant's partition. Each answer goes into the ledger.
When the connection is lost, the tenant audits: it lists everything and compares it with the ledger. An
object in doubt may be in either state; anything else that differs breaks S7 or S10.

With `patience`, a tenant waits that long after each request, and the request must then be served (L2).

`RandomOperator` pauses a domain, cordons or drains a machine, and later takes it back. It repeats the
request until it is acknowledged, and notes in the ledger what this allows the service to do (S5).
"""

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import msgspec

from rackloom.lab.invariants.ledger import (
    InvariantViolated,
    Json,
    Ledger,
    LedgerInstance,
    LedgerObject,
    LedgerVpc,
    OnAnswer,
    desired_partitions_of,
)
from rackloom.lab.virtual.racks import SimRack, SimSite
from rackloom.lab.virtual.service import SimulatedService

OBJECT_NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
MAX_PARTITIONS, MAX_VPCS = 4, 3
REFUSAL_STATUSES = (400, 403, 404, 409)


class RandomTenant:
    """One org. Every request is followed by a line in the book, or by a look at what became of it."""

    def __init__(
        self,
        org: str,
        token: str,
        plane: SimulatedService,
        book: Ledger,
        rng: random.Random,
        answered: OnAnswer,
        patience: float | None,
    ) -> None:
        self.org = org
        self.plane = plane
        self.book = book
        self.rng = rng
        self.site = ""
        self.type = ""
        self.operations = 0
        self._token = token
        self._answered = answered
        self._patience = patience
        self._gpus = plane.world.profile.gpus_per_tray
        self._asked = 0.0
        """Virtual time of the last request to change something: what was not answered is as old as that."""

    async def settle_in(self) -> None:
        """Learn the ids that everything else needs."""
        sites = await self.must("GET", "site")
        types = await self.must("GET", "instance/type?siteId=" + sites[0]["id"])
        self.site, self.type = sites[0]["id"], types[0]["id"]

    async def live(self, until: float, think: float) -> None:
        """Ask for one thing after another, `think` seconds apart on average."""
        while self.plane.tell_now() < until:
            await asyncio.sleep(self.rng.expovariate(1 / think))
            action = self.rng.choices(list(_ACTIONS), list(_ACTIONS.values()))[0]
            await action(self)
            self.operations += 1

    async def must(self, method: str, path: str) -> Any:
        """Ask until answered; anything but success is a defect."""
        while True:
            answer = await self.ask(method, path)
            if answer is not None:
                status, shown = answer
                if status >= 300:
                    raise InvariantViolated(f"S10 {self.org} {method} {path}: {status} {shown}")
                return shown

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any] | None:
        """One request; None when the connection was lost."""
        raw = None if body is None else msgspec.json.encode(body)
        whole = f"/v2/org/{self.org}/nico/{path}"
        answer = await self.plane.call(method, whole, self._token, raw)
        if answer is None:
            self._answered(self.org, method, path, 0, None)
            return None
        status, content = answer
        shown = msgspec.json.decode(content) if status != 202 and content else None
        self._answered(self.org, method, path, status, shown)
        if status >= 500:
            raise InvariantViolated(f"S10 {method} {path}: {status} {shown}")
        return status, shown

    async def audit(self) -> None:
        """Compare the book with what is there; what was not answered is learnt, the rest must be so (S10)."""
        shown = {kind: await self._all(path) for kind, path in _PATHS.items()}
        self._audit_partitions(shown["partitions"])
        self._audit_vpcs(shown["vpcs"])
        self._audit_instances(shown["instances"], self._asked)
        for kind in _PATHS:
            for one in self.book.of(self.org, kind):
                one.in_doubt = False
        self.book.unanswered.discard(self.org)

    async def _all(self, path: str) -> dict[str, Json]:
        return {one["id"]: one for one in await self.must("GET", f"{path}?pageSize=100")}

    def _audit_partitions(self, shown: dict[str, Json]) -> None:
        self._audit_kept("partitions", shown)
        for new in shown.keys() - self.book.partitions.keys():
            self.book.partitions[new] = LedgerObject(id=new, org=self.org, name=shown[new]["name"])
        for one in self.book.of(self.org, "partitions"):
            if shown[one.id]["status"] == "Deleting":
                one.state = "leaving"
            elif one.state == "leaving":
                raise InvariantViolated(f"S10 logical partition {one.name} was deleted, and is back")

    def _audit_vpcs(self, shown: dict[str, Json]) -> None:
        self._audit_kept("vpcs", shown)
        for new, one in shown.items():
            known = self.book.vpcs.get(new)
            if known and known.default != one["nvLinkLogicalPartitionId"] and not known.in_doubt:
                raise InvariantViolated(f"S10 the default of VPC {known.name} is not what was acknowledged")
            self.book.vpcs[new] = _ledger_vpc(self.org, one)

    def _audit_instances(self, shown: dict[str, Json], now: float) -> None:
        self._audit_kept("instances", shown)
        for new in shown.keys() - self.book.instances.keys():
            self.book.learn_instance(self.org, shown[new], now)
        for one in self.book.of(self.org, "instances"):
            self._audit_instance(one, shown[one.id], now)

    def _audit_instance(self, ledger_instance: LedgerInstance, shown: Json, now: float) -> None:
        if shown["status"] == "Terminating":
            ledger_instance.state = "leaving"
        elif ledger_instance.state == "leaving":
            raise InvariantViolated(
                f"S10 instance {ledger_instance.name} was released, and is {shown['status']} again"
            )
        wishes = desired_partitions_of(shown)
        # The interfaces of a released instance are on their way out with it.
        if wishes != ledger_instance.wishes and ledger_instance.state == "live":
            if not ledger_instance.in_doubt:
                raise InvariantViolated(
                    f"S10 instance {ledger_instance.name} wants {wishes}, acknowledged was {ledger_instance.wishes}"
                )
            ledger_instance.rewish(wishes, now)
        if shown["machineId"] != ledger_instance.machine:
            raise InvariantViolated(
                f"S10 instance {ledger_instance.name} moved from {ledger_instance.machine} to {shown['machineId']}"
            )

    def _audit_kept(self, kind: str, shown: dict[str, Json]) -> None:
        booked: dict[str, LedgerObject] = getattr(self.book, kind)
        if self.org not in self.book.unanswered and shown.keys() - booked.keys():
            raise InvariantViolated(
                f"S7 {kind} that nobody asked for: {sorted(shown.keys() - booked.keys())}"
            )
        if back := [one.name for one in booked.values() if one.state == "gone" and one.id in shown]:
            raise InvariantViolated(f"S10 {kind} that were gone are back: {back}")
        for one in self.book.of(self.org, kind):
            if one.id in shown:
                continue
            if one.state == "live" and not one.in_doubt:
                raise InvariantViolated(f"S10 {kind[:-1]} {one.name} was acknowledged, and is gone")
            if isinstance(one, LedgerInstance):
                self.book.forget_instance(one)
            one.state = "gone"

    async def _change(self, method: str, path: str, body: Any, target: LedgerObject | None) -> Any:
        """A request that changes something; None when it was refused, or lost and looked into."""
        if target is not None:
            target.in_doubt = True
        self._asked = self.plane.tell_now()
        answer = await self.ask(method, path, body)
        if answer is None:
            if target is None:
                self.book.unanswered.add(self.org)
            await self.audit()
            return None
        if target is not None:
            target.in_doubt = False
        status, shown = answer
        if status in REFUSAL_STATUSES:
            return None
        return shown if shown is not None else {}

    async def create_partition(self) -> None:
        """A new logical partition, perhaps under a name that was used before."""
        if len(self.book.of(self.org, "partitions")) >= MAX_PARTITIONS:
            return
        body = {"name": self.rng.choice(OBJECT_NAMES), "siteId": self.site}
        made = await self._change("POST", "nvlink-logical-partition", body, None)
        if made:
            self.book.partitions[made["id"]] = LedgerObject(id=made["id"], org=self.org, name=made["name"])

    async def delete_partition(self) -> None:
        """Delete one, used or not: what is used is refused."""
        if one := self._any("partitions"):
            path = f"nvlink-logical-partition/{one.id}"
            if await self._change("DELETE", path, None, one) is not None:
                one.state = "leaving"

    async def create_vpc(self) -> None:
        """A VPC with or without a default."""
        if len(self.book.of(self.org, "vpcs")) >= MAX_VPCS:
            return
        default = self._any("partitions") if self.rng.random() < 0.4 else None
        body = {
            "name": self.rng.choice(OBJECT_NAMES),
            "siteId": self.site,
            "nvLinkLogicalPartitionId": default.id if default else None,
        }
        if made := await self._change("POST", "vpc", body, None):
            self.book.vpcs[made["id"]] = _ledger_vpc(self.org, made)

    async def change_vpc(self) -> None:
        """Give a VPC another default, or none."""
        if vpc := self._any("vpcs"):
            default = self._any("partitions") if self.rng.random() < 0.6 else None
            body = {"nvLinkLogicalPartitionId": default.id if default else ""}
            if made := await self._change("PATCH", f"vpc/{vpc.id}", body, vpc):
                self.book.vpcs[vpc.id] = _ledger_vpc(self.org, made)

    async def delete_vpc(self) -> None:
        """Delete a VPC, empty or not."""
        vpc = self._any("vpcs")
        if vpc and await self._change("DELETE", f"vpc/{vpc.id}", None, vpc) is not None:
            vpc.state = "gone"

    async def create_instance(self) -> None:
        """One instance."""
        if vpc := self._any("vpcs"):
            body = {"name": self._new_name(), "vpcId": vpc.id, "instanceTypeId": self.type}
            body |= self._interfaces(vpc)
            now = self.plane.tell_now()
            if made := await self._change("POST", "instance", body, None):
                await self._expect(self.book.learn_instance(self.org, made, now))

    async def create_batch(self) -> None:
        """Several instances, all or none."""
        if vpc := self._any("vpcs"):
            body = {"namePrefix": self._new_name(), "vpcId": vpc.id, "instanceTypeId": self.type}
            body |= {"count": self.rng.randint(2, 3), "topologyOptimized": self.rng.random() < 0.7}
            body |= self._interfaces(vpc)
            now = self.plane.tell_now()
            for made in await self._change("POST", "instance/batch", body, None) or ():
                self.book.learn_instance(self.org, made, now)

    async def rewire_instance(self) -> None:
        """Other interfaces: moved, fewer, none."""
        one = self._any("instances")
        if one is None:
            return
        choice = self.rng.random()
        wishes = {} if choice < 0.25 else self._wishes(one.wishes if choice < 0.7 else {})
        now = self.plane.tell_now()
        if await self._change(
            "PATCH", f"instance/{one.id}", {"nvLinkInterfaces": _interfaces_body(wishes)}, one
        ):
            one.rewish(wishes, now)
            await self._expect(one)

    async def release_instance(self) -> None:
        """Release one, pending or ready."""
        one = self._any("instances")
        if one and await self._change("DELETE", f"instance/{one.id}", None, one) is not None:
            one.state = "leaving"

    async def look(self) -> None:
        """Only read."""
        await self.ask("GET", self.rng.choice(("nvlink-interface", "instance", "instance")))
        if one := self._any("instances"):
            await self.ask("GET", f"instance/{one.id}")

    async def trespass(self) -> None:
        """Ask for a logical partition of somebody else."""
        others = [partition for partition in self.book.partitions.values() if partition.org != self.org]
        one = self._any("instances")
        if not others or one is None:
            return
        wishes = {0: self.rng.choice(others).id}
        answer = await self.ask("PATCH", f"instance/{one.id}", {"nvLinkInterfaces": _interfaces_body(wishes)})
        if answer is not None and answer[0] not in REFUSAL_STATUSES:
            raise InvariantViolated(f"S2 {self.org} was given a GPU in a logical partition of another tenant")

    async def _expect(self, ledger_instance: LedgerInstance) -> None:
        """L2: where nothing is wrong, a wish is served soon."""
        if self._patience is None or self.plane.world.rack_of(ledger_instance.machine).network.dark:
            return
        await asyncio.sleep(self._patience)
        shown = await self.must("GET", f"instance/{ledger_instance.id}")
        if shown["status"] != "Ready":
            raise InvariantViolated(
                f"L2 {ledger_instance.name} is {shown['status']} {self._patience:.0f} s after it was asked for"
            )

    def _any(self, kind: str) -> Any:
        live = self.book.live(self.org, kind)
        return self.rng.choice(live) if live else None

    def _new_name(self) -> str:
        return f"vm-{self.rng.getrandbits(40):x}"

    def _interfaces(self, vpc: LedgerVpc) -> Json:
        if vpc.default is not None:
            return {} if self.rng.random() < 0.8 else {"nvLinkInterfaces": []}
        return {"nvLinkInterfaces": _interfaces_body(self._wishes({}))}

    def _wishes(self, present: dict[int, str]) -> dict[int, str]:
        wishes = dict(present)
        partitions = self.book.live(self.org, "partitions")
        for device in range(self._gpus):
            choice = self.rng.random()
            if partitions and choice < 0.6:
                wishes[device] = self.rng.choice(partitions).id
            elif choice < 0.75:
                wishes.pop(device, None)
        return wishes


_ACTIONS = {
    RandomTenant.create_partition: 3,
    RandomTenant.delete_partition: 1,
    RandomTenant.create_vpc: 2,
    RandomTenant.change_vpc: 1,
    RandomTenant.delete_vpc: 1,
    RandomTenant.create_instance: 5,
    RandomTenant.create_batch: 2,
    RandomTenant.rewire_instance: 6,
    RandomTenant.release_instance: 4,
    RandomTenant.look: 4,
    RandomTenant.trespass: 1,
}

_PATHS = {"partitions": "nvlink-logical-partition", "vpcs": "vpc", "instances": "instance"}


def _ledger_vpc(org: str, shown: Json) -> LedgerVpc:
    return LedgerVpc(id=shown["id"], org=org, name=shown["name"], default=shown["nvLinkLogicalPartitionId"])


def _interfaces_body(wishes: dict[int, str]) -> list[Json]:
    return [
        {"nvLinkLogicalPartitionId": partition, "deviceInstance": device}
        for device, partition in sorted(wishes.items())
    ]


# The operator.


PROVIDER_ORG = "landlord"
COMPLETED_STATUSES = (200, 201, 409)
OPERATOR_ATTEMPTS = 60
OPERATOR_RETRY_SECONDS = 5.0
"""Seconds until what was not answered, or not possible yet, is asked for again."""


class RandomOperator:
    """One step at a time, each with a reason. What is taken back is asked for until it is."""

    def __init__(
        self,
        token: str,
        world: SimSite,
        plane: SimulatedService,
        book: Ledger,
        rng: random.Random,
        answered: OnAnswer,
    ) -> None:
        self.world = world
        self.plane = plane
        self.book = book
        self.rng = rng
        self.operations = 0
        self._token = token
        self._answered = answered

    async def work(self, until: float, think: float) -> None:
        """Step after step, `think` seconds apart on average."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / think))
            if self.plane.tell_now() >= until:
                return
            step = self.rng.choice((self._pause, self._cordon, self._drain, self._drain))
            await step()
            self.operations += 1

    async def _pause(self) -> None:
        rack = self.rng.choice(self.world.racks)
        if await self._ask(self._domain(rack, "pause")) == 200:
            self.book.paused[rack.name] = self.plane.tell_now()
        await self._for_a_while()
        self.book.paused.pop(rack.name, None)
        await self._until_done(lambda: self._domain(rack, "resume"))

    async def _cordon(self) -> None:
        machine = self._any_machine()
        await self._ask(f"machine/{machine}/cordon")
        await self._for_a_while()
        await self._until_done(lambda: f"machine/{machine}/uncordon")

    async def _drain(self) -> None:
        machine = self._any_machine()
        self.book.drained_until[machine] = math.inf
        await self._ask(f"machine/{machine}/drain")
        await self._for_a_while()
        await self._until_done(lambda: f"machine/{machine}/drain/end")
        self.book.drained_until[machine] = self.plane.tell_now()
        await self._until_done(lambda: f"machine/{machine}/uncordon")

    def _any_machine(self) -> str:
        return self.rng.choice(sorted(self.world.machines))

    def _domain(self, rack: SimRack, step: str) -> str:
        # The uuid may change at any time, and is asked for each time.
        return f"nvlink-domain/{rack.fabric.domain}/{step}"

    async def _for_a_while(self) -> None:
        await asyncio.sleep(self.rng.uniform(5, 60))

    async def _until_done(self, path: Callable[[], str]) -> None:
        for _ in range(OPERATOR_ATTEMPTS):
            if await self._ask(path()) in COMPLETED_STATUSES:
                return
            await asyncio.sleep(OPERATOR_RETRY_SECONDS)
        raise InvariantViolated(f"S10 {path()}: not possible in {OPERATOR_ATTEMPTS} attempts")

    async def _ask(self, path: str) -> int | None:
        """The status of the answer; None when the connection was lost."""
        body = msgspec.json.encode({"reason": "simulated maintenance"})
        answer = await self.plane.call("POST", f"/v2/org/{PROVIDER_ORG}/nico/{path}", self._token, body)
        status, content = answer if answer is not None else (0, b"")
        shown: Any = msgspec.json.decode(content) if content else None
        self._answered(PROVIDER_ORG, "POST", path, status, shown)
        if status >= 500 or status in (400, 401, 403):
            raise InvariantViolated(f"S10 {path}: {status} {shown}")
        return status or None
