"""The clients of a random run: tenants and an operator that act over REST and record every answer.

`RandomTenant` draws weighted actions: logical partitions, VPCs, instances, batches, interface changes,
releases, reads, and an attempt to use another tenant's partition. Each answer goes into the ledger. When the
connection is lost, the tenant audits: it lists everything and compares it with the ledger. An object in doubt
may be in either state. Any other difference breaks S7 or S10.

With `patience`, a tenant waits that long after each request, and the request must then be served (L2).

`RandomOperator` pauses a domain, cordons or drains a machine, and later takes it back. It repeats the
request until it is acknowledged, and notes in the ledger which changes this allows (S5).
"""

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import msgspec
from tests.simulation.carving.racks import JudgedRack, JudgedSite
from tests.simulation.carving.service import JudgedService
from tests.simulation.invariants.ledger import (
    InvariantViolated,
    Json,
    Ledger,
    LedgerInstance,
    LedgerObject,
    LedgerVpc,
    OnAnswer,
    desired_partitions_of,
)

from rackloom.lab.invariants.acknowledged import lost_object

OBJECT_NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
MAX_PARTITIONS, MAX_VPCS = 4, 3
UNDECIDED_STATUS = 503
"""The records could not be reached, and nothing was changed."""
UNDECIDED_SECONDS = 1.0
"""Until a read that was answered so is repeated."""
REFUSAL_STATUSES = (400, 403, 404, 409, UNDECIDED_STATUS)


class RestClient:
    """One organisation's access to the REST API. Every answer is reported to `answered`."""

    def __init__(
        self, org: str, token: str, plane: JudgedService, ledger: Ledger, answered: OnAnswer
    ) -> None:
        self.org = org
        self.plane = plane
        self.ledger = ledger
        self.operations = 0
        self._token = token
        self._answered = answered

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any] | None:
        """One request. Returns None if the connection was lost."""
        raw = None if body is None else msgspec.json.encode(body)
        reply = await self.plane.call(method, f"/v2/org/{self.org}/nico/{path}", self._token, raw)
        status, content = reply or (0, b"")
        answer = msgspec.json.decode(content) if status != 202 and content else None
        self._answered(self.org, method, path, status, answer)
        may_fail = self.plane.disk.failures > 0
        if status >= 500 and not (status == UNDECIDED_STATUS and may_fail):
            raise InvariantViolated(f"S10 {method} {path}: {status} {answer}")
        return (status, answer) if reply else None


class RandomTenant(RestClient):
    """One tenant. Every request is followed by an entry in the ledger, or by an audit."""

    def __init__(
        self,
        org: str,
        token: str,
        plane: JudgedService,
        ledger: Ledger,
        rng: random.Random,
        answered: OnAnswer,
        patience: float | None,
    ) -> None:
        super().__init__(org, token, plane, ledger, answered)
        self.rng = rng
        self.site = ""
        self.type = ""
        self._patience = patience
        self._gpus = plane.world.profile.gpus_per_tray
        self._asked = 0.0
        """Virtual time of the last change that was requested: what is in doubt is as old as that."""

    async def read_ids(self) -> None:
        """Read the IDs that all other requests need."""
        sites = await self.must("GET", "site")
        types = await self.must("GET", "instance/type?siteId=" + sites[0]["id"])
        self.site, self.type = sites[0]["id"], types[0]["id"]

    async def live(self, until: float, think: float) -> None:
        """Make one request after another, `think` seconds apart on average."""
        await self.read_ids()
        while self.plane.now() < until:
            await asyncio.sleep(self.rng.expovariate(1 / think))
            action = self.rng.choices(list(_ACTIONS), list(_ACTIONS.values()))[0]
            await action(self)
            self.operations += 1

    async def must(self, method: str, path: str) -> Any:
        """Repeat a request until it is answered. Anything but success is a defect."""
        while True:
            answer = await self.ask(method, path)
            if answer is not None:
                status, answer = answer
                if status == UNDECIDED_STATUS:
                    await asyncio.sleep(UNDECIDED_SECONDS)
                    continue
                if status >= 300:
                    raise InvariantViolated(f"S10 {self.org} {method} {path}: {status} {answer}")
                return answer

    async def audit(self) -> None:
        """List everything and compare it with the ledger: only objects in doubt may differ (S10)."""
        listed = {kind: await self._all(path) for kind, path in _PATHS.items()}
        self._audit_partitions(listed["partitions"])
        self._audit_vpcs(listed["vpcs"])
        self._audit_instances(listed["instances"], self._asked)
        for kind in _PATHS:
            for obj in self.ledger.of(self.org, kind):
                obj.in_doubt = False
        self.ledger.unanswered.discard(self.org)

    async def _all(self, path: str) -> dict[str, Json]:
        return {obj["id"]: obj for obj in await self.must("GET", f"{path}?pageSize=100")}

    def _audit_partitions(self, listed: dict[str, Json]) -> None:
        self._audit_kept("partitions", listed)
        for new in listed.keys() - self.ledger.partitions.keys():
            self.ledger.partitions[new] = LedgerObject(id=new, org=self.org, name=listed[new]["name"])
        for partition in self.ledger.of(self.org, "partitions"):
            if listed[partition.id]["status"] == "Deleting":
                partition.state = "leaving"
            elif partition.state == "leaving":
                raise InvariantViolated(f"S10 logical partition {partition.name} was deleted, and is back")

    def _audit_vpcs(self, listed: dict[str, Json]) -> None:
        self._audit_kept("vpcs", listed)
        for new, vpc in listed.items():
            known = self.ledger.vpcs.get(new)
            if known and known.default != vpc["nvLinkLogicalPartitionId"] and not known.in_doubt:
                raise InvariantViolated(f"S10 the default of VPC {known.name} is not what was acknowledged")
            self.ledger.vpcs[new] = _ledger_vpc(self.org, vpc)

    def _audit_instances(self, listed: dict[str, Json], now: float) -> None:
        self._audit_kept("instances", listed)
        for new in listed.keys() - self.ledger.instances.keys():
            self.ledger.add_instance(self.org, listed[new], now)
        for instance in self.ledger.of(self.org, "instances"):
            self._audit_instance(instance, listed[instance.id], now)

    def _audit_instance(self, instance: LedgerInstance, answer: Json, now: float) -> None:
        if answer["status"] == "Terminating":
            instance.state = "leaving"
        elif instance.state == "leaving":
            raise InvariantViolated(
                f"S10 instance {instance.name} was released, and is {answer['status']} again"
            )
        desired = desired_partitions_of(answer)
        # The interfaces of a released instance are on their way out with it.
        if desired != instance.desired and instance.state == "live":
            if not instance.in_doubt:
                raise InvariantViolated(
                    f"S10 instance {instance.name} wants {desired}, acknowledged was {instance.desired}"
                )
            instance.change_desired(desired, now)
        for text in lost_object(f"instance {instance.name}", instance.machine, answer):
            raise InvariantViolated(f"S10 {text}")

    def _audit_kept(self, kind: str, listed: dict[str, Json]) -> None:
        recorded: dict[str, LedgerObject] = getattr(self.ledger, kind)
        if self.org not in self.ledger.unanswered and listed.keys() - recorded.keys():
            raise InvariantViolated(
                f"S7 {kind} that nobody asked for: {sorted(listed.keys() - recorded.keys())}"
            )
        if back := [obj.name for obj in recorded.values() if obj.state == "gone" and obj.id in listed]:
            raise InvariantViolated(f"S10 {kind} that were gone are back: {back}")
        for obj in self.ledger.of(self.org, kind):
            if obj.id in listed:
                continue
            if obj.state == "live" and not obj.in_doubt:
                raise InvariantViolated(f"S10 {next(lost_object(f'{kind[:-1]} {obj.name}'))}")
            if isinstance(obj, LedgerInstance):
                self.ledger.forget_instance(obj)
            obj.state = "gone"

    async def _change(self, method: str, path: str, body: Any, target: LedgerObject | None) -> Any:
        """Request a change. None if it was refused, or if the answer was lost and an audit was made."""
        if target is not None:
            target.in_doubt = True
        self._asked = self.plane.now()
        answer = await self.ask(method, path, body)
        if answer is None:
            if target is None:
                self.ledger.unanswered.add(self.org)
            await self.audit()
            return None
        if target is not None:
            target.in_doubt = False
        status, answer = answer
        if status in REFUSAL_STATUSES:
            return None
        return answer if answer is not None else {}

    async def create_partition(self) -> None:
        """A new logical partition, perhaps under a name that was used before."""
        if len(self.ledger.of(self.org, "partitions")) >= MAX_PARTITIONS:
            return
        body = {"name": self.rng.choice(OBJECT_NAMES), "siteId": self.site}
        created = await self._change("POST", "nvlink-logical-partition", body, None)
        if created:
            self.ledger.partitions[created["id"]] = LedgerObject(
                id=created["id"], org=self.org, name=created["name"]
            )

    async def delete_partition(self) -> None:
        """Delete one, used or not. The service must refuse if it is used."""
        if partition := self._choose("partitions"):
            path = f"nvlink-logical-partition/{partition.id}"
            if await self._change("DELETE", path, None, partition) is not None:
                partition.state = "leaving"

    async def create_vpc(self) -> None:
        """A VPC with or without a default."""
        if len(self.ledger.of(self.org, "vpcs")) >= MAX_VPCS:
            return
        default = self._choose("partitions") if self.rng.random() < 0.4 else None
        body = {
            "name": self.rng.choice(OBJECT_NAMES),
            "siteId": self.site,
            "nvLinkLogicalPartitionId": default.id if default else None,
        }
        if created := await self._change("POST", "vpc", body, None):
            self.ledger.vpcs[created["id"]] = _ledger_vpc(self.org, created)

    async def change_vpc(self) -> None:
        """Set another default logical partition of a VPC, or none."""
        if vpc := self._choose("vpcs"):
            default = self._choose("partitions") if self.rng.random() < 0.6 else None
            body = {"nvLinkLogicalPartitionId": default.id if default else ""}
            if changed := await self._change("PATCH", f"vpc/{vpc.id}", body, vpc):
                self.ledger.vpcs[vpc.id] = _ledger_vpc(self.org, changed)

    async def delete_vpc(self) -> None:
        """Delete a VPC, empty or not."""
        vpc = self._choose("vpcs")
        if vpc and await self._change("DELETE", f"vpc/{vpc.id}", None, vpc) is not None:
            vpc.state = "gone"

    async def create_instance(self) -> None:
        """One instance."""
        if vpc := self._choose("vpcs"):
            body = {"name": self._new_name(), "vpcId": vpc.id, "instanceTypeId": self.type}
            body |= self._interfaces(vpc)
            now = self.plane.now()
            if created := await self._change("POST", "instance", body, None):
                await self._expect(self.ledger.add_instance(self.org, created, now))

    async def create_batch(self) -> None:
        """Several instances, all or none."""
        if vpc := self._choose("vpcs"):
            body = {"namePrefix": self._new_name(), "vpcId": vpc.id, "instanceTypeId": self.type}
            body |= {"count": self.rng.randint(2, 3), "topologyOptimized": self.rng.random() < 0.7}
            body |= self._interfaces(vpc)
            now = self.plane.now()
            for created in await self._change("POST", "instance/batch", body, None) or ():
                self.ledger.add_instance(self.org, created, now)

    async def rewire_instance(self) -> None:
        """Change the interfaces of an instance: other partitions, fewer, or none."""
        instance = self._choose("instances")
        if instance is None:
            return
        choice = self.rng.random()
        desired = {} if choice < 0.25 else self._draw_partitions(instance.desired if choice < 0.7 else {})
        now = self.plane.now()
        if await self._change(
            "PATCH", f"instance/{instance.id}", {"nvLinkInterfaces": _interfaces_body(desired)}, instance
        ):
            instance.change_desired(desired, now)
            await self._expect(instance)

    async def release_instance(self) -> None:
        """Release one, pending or ready."""
        instance = self._choose("instances")
        if instance and await self._change("DELETE", f"instance/{instance.id}", None, instance) is not None:
            instance.state = "leaving"

    async def read(self) -> None:
        """Read without changing anything."""
        await self.ask("GET", self.rng.choice(("nvlink-interface", "instance", "instance")))
        if instance := self._choose("instances"):
            await self.ask("GET", f"instance/{instance.id}")

    async def trespass(self) -> None:
        """Request a logical partition of another tenant, which must be refused."""
        others = [partition for partition in self.ledger.partitions.values() if partition.org != self.org]
        instance = self._choose("instances")
        if not others or instance is None:
            return
        body = {"nvLinkInterfaces": _interfaces_body({0: self.rng.choice(others).id})}
        answer = await self.ask("PATCH", f"instance/{instance.id}", body)
        if answer is not None and answer[0] not in REFUSAL_STATUSES:
            raise InvariantViolated(f"S2 {self.org} was given a GPU in a logical partition of another tenant")

    async def _expect(self, instance: LedgerInstance) -> None:
        """L2: a request on a healthy rack is served within `patience`."""
        if self._patience is None or self.plane.world.rack_of(instance.machine).network.dark:
            return
        await asyncio.sleep(self._patience)
        answer = await self.must("GET", f"instance/{instance.id}")
        if answer["status"] != "Ready":
            raise InvariantViolated(
                f"L2 {instance.name} is {answer['status']} {self._patience:.0f} s after it was asked for"
            )

    def _choose(self, kind: str) -> Any:
        live = self.ledger.live(self.org, kind)
        return self.rng.choice(live) if live else None

    def _new_name(self) -> str:
        return f"vm-{self.rng.getrandbits(40):x}"

    def _interfaces(self, vpc: LedgerVpc) -> Json:
        if vpc.default is not None:
            return {} if self.rng.random() < 0.8 else {"nvLinkInterfaces": []}
        return {"nvLinkInterfaces": _interfaces_body(self._draw_partitions({}))}

    def _draw_partitions(self, present: dict[int, str]) -> dict[int, str]:
        desired = dict(present)
        partitions = self.ledger.live(self.org, "partitions")
        for device in range(self._gpus):
            choice = self.rng.random()
            if partitions and choice < 0.6:
                desired[device] = self.rng.choice(partitions).id
            elif choice < 0.75:
                desired.pop(device, None)
        return desired


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
    RandomTenant.read: 4,
    RandomTenant.trespass: 1,
}

_PATHS = {"partitions": "nvlink-logical-partition", "vpcs": "vpc", "instances": "instance"}


def _ledger_vpc(org: str, answer: Json) -> LedgerVpc:
    default = answer["nvLinkLogicalPartitionId"]
    return LedgerVpc(id=answer["id"], org=org, name=answer["name"], default=default)


def _interfaces_body(desired: dict[int, str]) -> list[Json]:
    return [
        {"nvLinkLogicalPartitionId": partition, "deviceInstance": device}
        for device, partition in sorted(desired.items())
    ]


# The operator.


PROVIDER_ORG = "landlord"
COMPLETED_STATUSES = (200, 201, 409)
OPERATOR_ATTEMPTS = 60
OPERATOR_RETRY_SECONDS = 5.0
"""Seconds until a request that was lost, or not possible yet, is repeated."""


class RandomOperator(RestClient):
    """One step at a time, each with a reason. The end of a step is requested until it is acknowledged."""

    def __init__(
        self,
        token: str,
        world: JudgedSite,
        plane: JudgedService,
        ledger: Ledger,
        rng: random.Random,
        answered: OnAnswer,
    ) -> None:
        super().__init__(PROVIDER_ORG, token, plane, ledger, answered)
        self.world = world
        self.rng = rng

    async def work(self, until: float, think: float) -> None:
        """Step after step, `think` seconds apart on average."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / think))
            if self.plane.now() >= until:
                return
            step = self.rng.choice((self._pause, self._cordon, self._drain, self._drain))
            await step()
            self.operations += 1

    async def _pause(self) -> None:
        rack = self.rng.choice(self.world.racks)
        if await self._post(self._domain(rack, "pause")) == 200:
            self.ledger.paused[rack.name] = self.plane.now()
        await self._for_a_while()
        self.ledger.paused.pop(rack.name, None)
        await self._until_done(lambda: self._domain(rack, "resume"))

    async def _cordon(self) -> None:
        machine = self._any_machine()
        await self._post(f"machine/{machine}/cordon")
        await self._for_a_while()
        await self._until_done(lambda: f"machine/{machine}/uncordon")

    async def _drain(self) -> None:
        machine = self._any_machine()
        self.ledger.drained_until[machine] = math.inf
        await self._post(f"machine/{machine}/drain")
        await self._for_a_while()
        await self._until_done(lambda: f"machine/{machine}/drain/end")
        self.ledger.drained_until[machine] = self.plane.now()
        await self._until_done(lambda: f"machine/{machine}/uncordon")

    def _any_machine(self) -> str:
        return self.rng.choice(sorted(self.world.machines))

    def _domain(self, rack: JudgedRack, step: str) -> str:
        # The UUID may change at any time.
        return f"nvlink-domain/{rack.fabric.domain}/{step}"

    async def _for_a_while(self) -> None:
        await asyncio.sleep(self.rng.uniform(5, 60))

    async def _until_done(self, path: Callable[[], str]) -> None:
        for _ in range(OPERATOR_ATTEMPTS):
            if await self._post(path()) in COMPLETED_STATUSES:
                return
            await asyncio.sleep(OPERATOR_RETRY_SECONDS)
        raise InvariantViolated(f"S10 {path()}: not possible in {OPERATOR_ATTEMPTS} attempts")

    async def _post(self, path: str) -> int | None:
        """The status of the answer, or None if the connection was lost."""
        reply = await self.ask("POST", path, {"reason": "simulated maintenance"})
        if reply and reply[0] in (400, 401, 403):
            raise InvariantViolated(f"S10 {path}: {reply[0]} {reply[1]}")
        return reply[0] if reply else None
