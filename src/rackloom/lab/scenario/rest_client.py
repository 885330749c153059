"""REST as the tenants and the operator of a scenario use it: every request is repeated until it is answered.

A create with a lost answer is looked up by name before it is repeated, so that nothing is made twice.
`MadeInstances` records per group the machine that each instance was acknowledged on (for S10), and which
tenant was last given a machine (for S2).
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec

from rackloom.lab.scenario.model import NotObserved

RETRY_SECONDS = 0.2
"""Seconds after a connection was lost."""
PAGE_QUERY = "pageSize=100"
FIRST_FAILURE, NOT_FOUND, SERVER_ERROR = 300, 404, 500
Json = dict[str, Any]


class RestAnswer(msgspec.Struct, frozen=True):
    """An answer of REST. `body` is None if it had none."""

    status: int
    body: Any


class RestSite(Protocol):
    """The part of a site that answers REST."""

    async def rest(
        self, tenant: str | None, method: str, path: str, body: Json | None = None
    ) -> RestAnswer | None:
        """One request of a tenant or (None) the operator. Returns None if the connection was lost."""


class MadeObject(msgspec.Struct, frozen=True):
    """An object that was acknowledged."""

    id: str
    tenant: str


class MadeInstance(MadeObject, frozen=True):
    """An instance that was acknowledged, and the machine it was acknowledged on."""

    machine: str


class ScenarioRestClient:
    """All tenants of a scenario, and the operator."""

    def __init__(self, site: RestSite) -> None:
        self._site = site
        self.partitions: dict[str, MadeObject] = {}
        """Logical partitions, by name."""
        self.vpcs: dict[str, MadeObject] = {}
        self.groups: dict[str, tuple[MadeInstance, ...]] = {}
        """Instances, by the name that the scenario gives their group."""
        self.trays: dict[str, MadeInstance] = {}
        """The instance in a tray, by the tray's name, on a site that was there before its steps."""
        self.released: set[str] = set()
        """Groups that were given back."""
        self.holder: dict[str, str] = {}
        """Machine to the tenant to which it was last acknowledged."""

    def instance(self, name: str) -> MadeInstance:
        """The instance that files call `group/number`, or that is in the tray of this name."""
        if name in self.trays:
            return self.trays[name]
        group, _, number = name.partition("/")
        return self.groups[group][int(number) - 1]

    def kept(self) -> Iterator[MadeInstance]:
        """Every instance that was acknowledged and not given back."""
        for group, members in self.groups.items():
            if group not in self.released:
                yield from members

    async def create(self, tenant: str, path: str, body: Json) -> MadeObject:
        """Create an object, which the name in its body identifies."""
        (made,) = await self.create_all(tenant, path, path, body, lambda name: name == body["name"])
        return MadeObject(made["id"], tenant)

    async def create_all(
        self, tenant: str, path: str, listing: str, body: Json, is_made: Callable[[str], bool]
    ) -> list[Json]:
        """The objects that a create made. After a lost answer `listing` is searched for their names."""
        while True:
            answer = await self._site.rest(tenant, "POST", path, body)
            if answer is not None:
                made = success_body(answer, "POST", path)
                return made if isinstance(made, list) else [made]
            listed = await self.must(tenant, "GET", f"{listing}?{PAGE_QUERY}")
            if found := [shown for shown in listed if is_made(shown["name"])]:
                return found

    async def any_id(self, tenant: str, path: str) -> str:
        """The id of the first object in a list."""
        return str((await self.must(tenant, "GET", path))[0]["id"])

    async def shown(self, made: MadeObject, path: str = "instance") -> Json | None:
        """The object as REST shows it now, or None if there is none."""
        path = f"{path}/{made.id}"
        answer = await self.ask(made.tenant, "GET", path)
        if answer.status == NOT_FOUND:
            return None
        shown: Json = success_body(answer, "GET", path)
        return shown

    async def must(self, tenant: str | None, method: str, path: str, body: Json | None = None) -> Any:
        """The body of a success, as a tenant or (None) the operator. Raises `NotObserved` for a refusal."""
        return success_body(await self.ask(tenant, method, path, body), method, path)

    async def ask(self, tenant: str | None, method: str, path: str, body: Json | None = None) -> RestAnswer:
        """The first answer. Raises `NotObserved` where the server failed."""
        while (answer := await self._site.rest(tenant, method, path, body)) is None:  # noqa: ASYNC110 (a lost connection)
            await asyncio.sleep(RETRY_SECONDS)
        require_below(answer, SERVER_ERROR, method, path)
        return answer


def success_body(answer: RestAnswer, method: str, path: str) -> Any:
    """The body of an answer. Raises `NotObserved` for a refusal."""
    require_below(answer, FIRST_FAILURE, method, path)
    return answer.body


def require_below(answer: RestAnswer, limit: int, method: str, path: str) -> None:
    """Raise `NotObserved` for an answer with a status of `limit` or more."""
    if answer.status >= limit:
        detail = answer.body.get("message") if isinstance(answer.body, dict) else None
        text = f"{answer.status} {detail or answer.body or ''}".strip()
        raise NotObserved(f"{method} {path}: {text}")
