"""Tenants of a scenario: what they ask of REST, and the book of what was acknowledged to them."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec

from rackloom.twin.scenario.site_actions import MakeInstances
from rackloom.twin.scenario.stage import Answer, Json, NotSeen, Site

ASK_AGAIN = 0.2
"""Seconds after a connection was lost."""
PAGE = "pageSize=100"
CREATED, NOT_FOUND, SERVER_ERROR = 201, 404, 500


class Made(msgspec.Struct, frozen=True):
    """An object that was acknowledged."""

    id: str
    tenant: str


class MadeInstance(msgspec.Struct, frozen=True):
    """An instance that was acknowledged, and the machine it was told to be on."""

    id: str
    tenant: str
    machine: str


class Tenants:
    """All tenants of a scenario. Every request is repeated until it was answered."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.partitions: dict[str, Made] = {}
        self.vpcs: dict[str, Made] = {}
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
                raise NotSeen(f"DELETE instance/{one.id}: {_told(answer)}")
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
        shown: Json = _body(answer, "GET", path)
        return shown

    async def _instances(self, step: MakeInstances, path: str, body: Json) -> list[Json]:
        """The new instances in order of their numbers; those whose answer was lost are looked for first."""
        while True:
            answer = await self._site.rest(step.tenant, "POST", path, body)
            if answer is not None:
                made = _body(answer, "POST", path)
                return _numbered(made if isinstance(made, list) else [made])
            listed = await self._must(step.tenant, "GET", f"instance?{PAGE}")
            if found := [one for one in listed if one["name"].startswith(f"{step.group}-")]:
                return _numbered(found)

    async def _make(self, tenant: str, path: str, body: Json) -> Made:
        while True:
            answer = await self._site.rest(tenant, "POST", path, body)
            if answer is not None:
                return Made(_body(answer, "POST", path)["id"], tenant)
            listed = await self._must(tenant, "GET", f"{path}?{PAGE}")
            if found := [one for one in listed if one["name"] == body["name"]]:
                return Made(found[0]["id"], tenant)

    async def _any_id(self, tenant: str, path: str) -> str:
        return str((await self._must(tenant, "GET", path))[0]["id"])

    async def _must(self, tenant: str, method: str, path: str, body: Json | None = None) -> Any:
        return _body(await self._ask(tenant, method, path, body), method, path)

    async def _ask(self, tenant: str, method: str, path: str, body: Json | None = None) -> Answer:
        answer = await self._site.rest(tenant, method, path, body)
        if answer is None:
            await asyncio.sleep(ASK_AGAIN)
            return await self._ask(tenant, method, path, body)
        if answer.status >= SERVER_ERROR:
            raise NotSeen(f"{method} {path}: {_told(answer)}")
        return answer


def _numbered(shown: list[Json]) -> list[Json]:
    return sorted(shown, key=lambda one: int(one["name"].rpartition("-")[2]))


def _body(answer: Answer, method: str, path: str) -> Any:
    if answer.status >= 300:
        raise NotSeen(f"{method} {path}: {_told(answer)}")
    return answer.body


def _told(answer: Answer) -> str:
    detail = answer.body.get("message") if isinstance(answer.body, dict) else None
    return f"{answer.status} {detail or answer.body or ''}".strip()
