"""Steps of tenants: what they ask of REST, and the record of what was acknowledged to them.

Every request is repeated until it is answered. A create whose answer was lost is looked up by name
before it is repeated, so that nothing is made twice. The record keeps, per group, the machine that each
instance was told to be on (for S10), and which tenant was last given a machine (for S2).
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec

from rackloom.lab.scenario.model import NotObserved, TenantAction
from rackloom.lab.scenario.stage import Json, RestAnswer, SiteControl


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


# The requests, and the record of what was acknowledged.


RETRY_SECONDS = 0.2
"""Seconds after a connection was lost."""
PAGE_QUERY = "pageSize=100"
CREATED, NOT_FOUND, SERVER_ERROR = 201, 404, 500


class MadeObject(msgspec.Struct, frozen=True):
    """An object that was acknowledged."""

    id: str
    tenant: str


class MadeInstance(msgspec.Struct, frozen=True):
    """An instance that was acknowledged, and the machine it was told to be on."""

    id: str
    tenant: str
    machine: str


class ScenarioTenants:
    """All tenants of a scenario. Every request is repeated until it was answered."""

    def __init__(self, site: SiteControl) -> None:
        self._site = site
        self.partitions: dict[str, MadeObject] = {}
        self.vpcs: dict[str, MadeObject] = {}
        self.groups: dict[str, tuple[MadeInstance, ...]] = {}
        self.released: set[str] = set()
        self.holder: dict[str, str] = {}
        """Machine to the tenant that was last told to have it."""

    def instance(self, name: str) -> MadeInstance:
        """The instance that files call `group/number`."""
        group, _, number = name.partition("/")
        return self.groups[group][int(number) - 1]

    def kept(self) -> Iterator[MadeInstance]:
        """Every instance that was acknowledged and not given back."""
        for group, members in self.groups.items():
            if group not in self.released:
                yield from members

    async def make_partition(self, tenant: str, name: str) -> str:
        """A logical partition; returns its id."""
        body = {"name": name, "siteId": await self._any_id(tenant, "site")}
        self.partitions[name] = await self._make(tenant, "nvlink-logical-partition", body)
        return self.partitions[name].id

    async def make_vpc(self, tenant: str, name: str, partition: str) -> str:
        """A VPC with a default logical partition or (empty name) none; returns its id."""
        body = {
            "name": name,
            "siteId": await self._any_id(tenant, "site"),
            "nvLinkLogicalPartitionId": self.partitions[partition].id if partition else None,
        }
        self.vpcs[name] = await self._make(tenant, "vpc", body)
        return self.vpcs[name].id

    async def make_instances(self, step: MakeInstances) -> tuple[MadeInstance, ...]:
        """One instance, or a batch in one domain, all or none."""
        body: Json = {
            "vpcId": self.vpcs[step.vpc].id,
            "instanceTypeId": await self._any_id(step.tenant, "instance/type"),
        }
        if step.count == 1:
            shown = await self._instances(step, "instance", body | {"name": f"{step.group}-1"})
        else:
            batch = {"namePrefix": step.group, "count": step.count, "topologyOptimized": True}
            shown = await self._instances(step, "instance/batch", body | batch)
        made = tuple(MadeInstance(one["id"], step.tenant, one["machineId"]) for one in shown)
        self.groups[step.group] = made
        self.holder |= {one.machine: step.tenant for one in made}
        return made

    async def wire(self, instance: MadeInstance, partitions: tuple[str, ...]) -> None:
        """Put each GPU into a logical partition; an empty name: none."""
        wishes = [
            {"deviceInstance": device, "nvLinkLogicalPartitionId": self.partitions[name].id}
            for device, name in enumerate(partitions)
            if name
        ]
        path = f"instance/{instance.id}"
        await self._must(instance.tenant, "PATCH", path, {"nvLinkInterfaces": wishes})

    async def release(self, group: str) -> None:
        """Give the instances of a group back."""
        for one in self.groups[group]:
            answer = await self._ask(one.tenant, "DELETE", f"instance/{one.id}")
            if answer.status >= 300 and answer.status != NOT_FOUND:
                raise NotObserved(f"DELETE instance/{one.id}: {_answer_text(answer)}")
        self.released.add(group)

    async def shown(self, instance: MadeInstance) -> Json | None:
        """What REST shows of an instance now; None: there is none."""
        return await self._shown(instance.tenant, f"instance/{instance.id}")

    async def shown_partition(self, name: str) -> Json | None:
        """What REST shows of a logical partition now; None: there is none."""
        made = self.partitions[name]
        return await self._shown(made.tenant, f"nvlink-logical-partition/{made.id}")

    async def _shown(self, tenant: str, path: str) -> Json | None:
        answer = await self._ask(tenant, "GET", path)
        if answer.status == NOT_FOUND:
            return None
        shown: Json = _success_body(answer, "GET", path)
        return shown

    async def _instances(self, step: MakeInstances, path: str, body: Json) -> list[Json]:
        """The new instances in order of their numbers; those whose answer was lost are looked for first."""
        while True:
            answer = await self._site.rest(step.tenant, "POST", path, body)
            if answer is not None:
                made = _success_body(answer, "POST", path)
                return _by_number(made if isinstance(made, list) else [made])
            listed = await self._must(step.tenant, "GET", f"instance?{PAGE_QUERY}")
            if found := [one for one in listed if one["name"].startswith(f"{step.group}-")]:
                return _by_number(found)

    async def _make(self, tenant: str, path: str, body: Json) -> MadeObject:
        while True:
            answer = await self._site.rest(tenant, "POST", path, body)
            if answer is not None:
                return MadeObject(_success_body(answer, "POST", path)["id"], tenant)
            listed = await self._must(tenant, "GET", f"{path}?{PAGE_QUERY}")
            if found := [one for one in listed if one["name"] == body["name"]]:
                return MadeObject(found[0]["id"], tenant)

    async def _any_id(self, tenant: str, path: str) -> str:
        return str((await self._must(tenant, "GET", path))[0]["id"])

    async def _must(self, tenant: str, method: str, path: str, body: Json | None = None) -> Any:
        return _success_body(await self._ask(tenant, method, path, body), method, path)

    async def _ask(self, tenant: str, method: str, path: str, body: Json | None = None) -> RestAnswer:
        answer = await self._site.rest(tenant, method, path, body)
        if answer is None:
            await asyncio.sleep(RETRY_SECONDS)
            return await self._ask(tenant, method, path, body)
        if answer.status >= SERVER_ERROR:
            raise NotObserved(f"{method} {path}: {_answer_text(answer)}")
        return answer


def _by_number(shown: list[Json]) -> list[Json]:
    return sorted(shown, key=lambda one: int(one["name"].rpartition("-")[2]))


def _success_body(answer: RestAnswer, method: str, path: str) -> Any:
    if answer.status >= 300:
        raise NotObserved(f"{method} {path}: {_answer_text(answer)}")
    return answer.body


def _answer_text(answer: RestAnswer) -> str:
    detail = answer.body.get("message") if isinstance(answer.body, dict) else None
    return f"{answer.status} {detail or answer.body or ''}".strip()
