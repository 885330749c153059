"""Every list of a tenant reads the rows of that tenant, however many rows another one has.

The OpenAPI document declares the lists, their filters and their pages. The refusal of an unknown order names
the orders. The databases count the rows, or the steps, that each request takes, with the statements and plans
of the service.
"""

import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import sqlalchemy as sa
from anyio.from_thread import BlockingPortal
from sqlalchemy.dialects.postgresql.asyncpg import AsyncAdapt_asyncpg_cursor as Cursor
from starlette.testclient import TestClient
from tests.carve.conftest import DOMAINS, PROFILE, TOPOLOGY

from benchmarks import crowd
from rackloom.carve.api.app import create_app
from rackloom.carve.api.auth import LocalIssuer, Role
from rackloom.carve.api.routing import ApiDeps
from rackloom.carve.inventory.enrolment import seed_embedded_site
from rackloom.carve.store import schema
from rackloom.carve.store.database import DatabaseBackend, Store

NUMBERS = {"sqlite": (200, 20_000), "postgresql": (60, 6_000)}
"""Own and foreign rows of each table. PostgreSQL takes longer to insert them. It rightly reads a table whole
to find more than a few hundredths of it."""
ORG, NEIGHBOUR = "small", "large"
NOW = 1500.0
OF_THE_SITE = {
    "instance/type": frozenset({"includeAllocationStats"}),
    "nvlink-domain": frozenset({"orderBy"}),
}
"""List -> parameters with which it counts the hardware of the site, which all tenants share."""
ROWS = 3_000
"""Rows that a request may read: its own rows once for each table that it joins, and again to count them."""
STEPS = 50_000
"""Of SQLite's virtual machine, for the same. It takes at least four to pass over a row."""


class _Watched:
    """A backend that counts the rows or steps of each read. It keeps the statements, to explain them."""

    def __init__(self, backend: DatabaseBackend) -> None:
        self._backend = backend
        self.is_shared = backend.is_shared
        self.cost = 0
        self.limit = ROWS if self.is_shared else STEPS
        self.plans: list[str] = []

    async def transact(self, work: Callable[[sa.Connection], Any], *, write: bool, org: str = "") -> Any:
        def watched(conn: sa.Connection) -> Any:
            watch = self._on_postgres if self.is_shared else self._on_sqlite
            return work(conn) if write else watch(conn, work)

        return await self._backend.transact(watched, write=write, org=org)

    async def survey(self, work: Callable[[sa.Connection], Any]) -> Any:
        return await self._backend.survey(work)

    def changes(self) -> AsyncGenerator[str | None, None]:
        return self._backend.changes()

    async def close(self) -> None:
        await self._backend.close()

    def _on_sqlite(self, conn: sa.Connection, work: Callable[[sa.Connection], Any]) -> Any:
        driver: Any = conn.connection.dbapi_connection
        texts: list[str] = []
        before, unit = self.cost, 100

        def step() -> int:
            self.cost += unit
            return 0

        driver.set_progress_handler(step, unit)
        driver.set_trace_callback(texts.append)
        try:
            return work(conn)
        finally:
            driver.set_progress_handler(None, 0)
            driver.set_trace_callback(None)
            if self.cost - before > self.limit:
                for text in texts:
                    plan = driver.execute(f"EXPLAIN QUERY PLAN {text}").fetchall()
                    self.plans.append("\n".join([text, *(f"    {row[3]}" for row in plan)]))

    def _on_postgres(self, conn: sa.Connection, work: Callable[[sa.Connection], Any]) -> Any:
        sent: list[tuple[str, Any]] = []
        execute = Cursor.execute

        def kept(cursor: Any, text: str, parameters: Any = None) -> None:
            sent.append((text, parameters))
            execute(cursor, text, parameters)

        before = self._rows(conn)
        with patch.object(Cursor, "execute", kept):
            result = work(conn)
        rows = self._rows(conn) - before
        self.cost += rows
        if rows > self.limit:
            for text, parameters in sent:
                plan = conn.exec_driver_sql(f"EXPLAIN ANALYZE {text}", tuple(parameters or ())).scalars()
                self.plans.append("\n".join([text, *plan]))
        return result

    def _rows(self, conn: sa.Connection) -> int:
        """The rows and index entries that this transaction has read."""
        counted = (
            "SELECT sum(pg_stat_get_xact_tuples_returned(oid)) FROM pg_class"
            " WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'i')"
        )
        return int(conn.exec_driver_sql(counted).scalar_one())


class _Lists:
    """The REST API over a store with a small tenant beside a large one."""

    def __init__(self, client: TestClient, backend: _Watched, token: str) -> None:
        self._client = client
        self._backend = backend
        self._headers = {"Authorization": f"Bearer {token}"}
        self.document = client.get("/openapi.json").json()

    def get(self, path: str, **query: Any) -> Any:
        return self._client.get(path, params=query, headers=self._headers)

    def declared(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """The path and the parameters of each list that a tenant may read."""
        for path, methods in self.document["paths"].items():
            operation = methods.get("get", {})
            parameters = operation.get("parameters", [])
            is_list = any(parameter["name"] == "pageNumber" for parameter in parameters)
            if is_list and Role.TENANT_ADMIN in operation["x-rackloom-roles"]:
                yield (
                    path,
                    [
                        parameter
                        for parameter in parameters
                        if Role.TENANT_ADMIN in _roles(parameter, operation)
                    ],
                )

    def orders(self, path: str) -> list[str]:
        """The orders of a list, which the refusal of an unknown one names. A list may have none."""
        answer = self.get(path, orderBy="NO_SUCH_FIELD_ASC")
        named = "" if answer.status_code == 200 else answer.json()["data"]["orderBy"]
        return [word.strip(",") for word in named.split() if word.strip(",").endswith(("_ASC", "_DESC"))]

    def too_expensive(self, path: str, **query: Any) -> str | None:
        """The plans of a request that looks at more than the rows of its tenant."""
        self._backend.cost = 0
        self._backend.plans.clear()
        answer = self.get(path, **query)
        assert answer.status_code == 200, (path, query, answer.text)
        if self._backend.cost <= self._backend.limit:
            return None
        return "\n".join([f"{path} {query} cost {self._backend.cost}", *self._backend.plans])


def _roles(parameter: dict[str, Any], operation: dict[str, Any]) -> list[str]:
    roles: list[str] = parameter["schema"].get("x-rackloom-roles", operation["x-rackloom-roles"])
    return roles


KINDS = {
    "siteId": "site",
    "tenantId": "tenant",
    "vpcId": "vpc",
    "instanceId": "instance",
    "nvLinkLogicalPartitionId": "partition",
    "instanceTypeId": "type",
    "resourceTypeId": "type",
    "infrastructureProviderId": "provider",
}


def _values(name: str, schema: dict[str, Any], ids: dict[str, str]) -> list[Any]:
    """Values of a filter. An enumeration gives only its first, because plans don't depend on the value."""
    if "items" in schema:
        return _values(name, schema["items"], ids)
    if "anyOf" in schema:
        return [value for kind in schema["anyOf"] for value in _values(name, kind, ids)]
    if "enum" in schema:
        return schema["enum"][:1]
    match schema.get("format", schema.get("type")):
        case "boolean":
            return [True, False]
        case "integer":
            return [schema["minimum"]]
        case "date-time":
            return ["1970-01-01T00:20:00Z"]
        case "ipvanyaddress":
            return ["10.0.0.1"]
        case "uuid":
            return [ids[KINDS.get(name, "partition")]]
        case "string":
            return [{"objectId": ids["vpc"], "machineId": ids["machine"]}.get(name, "object 1")]
    return []


def _put_statistics(conn: sa.Connection, known: Sequence[sa.Row[Any]]) -> None:
    conn.exec_driver_sql("DELETE FROM sqlite_stat1")
    conn.exec_driver_sql("INSERT INTO sqlite_stat1 VALUES (?, ?, ?)", [tuple(row) for row in known])


@pytest.fixture(scope="module")
def lists_url(postgres_server: Any) -> str:
    postgres_server.execute("CREATE DATABASE lists")
    return str(postgres_server.url("lists"))


@pytest.fixture(scope="module", params=["sqlite", "sqlite grown", "postgresql"])
def lists(
    request: pytest.FixtureRequest, portal: BlockingPortal, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[_Lists, dict[str, str]]]:
    """A store with statistics of its rows, or with those from the time when it was small."""
    home = tmp_path_factory.mktemp("home")
    kind, has_grown = request.param.split()[0], request.param.endswith("grown")
    if kind == "sqlite":
        store = Store.open(home)
    else:
        store = portal.call(Store.connect, request.getfixturevalue("lists_url"))
    issuer = LocalIssuer(home)
    numbers = itertools.count()
    urls = {domain: f"http://switch/{domain}" for domain in DOMAINS}

    def seed(conn: sa.Connection) -> dict[str, str]:
        def new() -> str:
            return crowd.object_id("site", "any", next(numbers))

        seed_embedded_site(conn, TOPOLOGY, PROFILE, urls, now=1.0, ids=new)
        tables = {"site": schema.site, "type": schema.instance_type, "provider": schema.provider}
        return {kind: conn.execute(sa.select(table.c.id)).scalar_one() for kind, table in tables.items()}

    async def seeded() -> dict[str, str]:
        ids = await store.run(seed)
        own, foreign = NUMBERS[kind]
        if not has_grown:
            await crowd.fill(store, NEIGHBOUR, foreign)
        await crowd.fill(store, ORG, own)
        if has_grown:
            known = await store.read(lambda conn: conn.exec_driver_sql("SELECT * FROM sqlite_stat1").all())
            await crowd.fill(store, NEIGHBOUR, foreign)
            await store.run(_put_statistics, known)
        return ids

    ids = portal.call(seeded)
    if has_grown:
        # Connections read the statistics when they open.
        portal.call(store.close)
        store = Store.open(home)
    ids |= {kind: crowd.object_id(ORG, kind, 1) for kind in ("partition", "vpc", "instance", "allocation")}
    ids |= {"tenant": crowd.object_id(ORG, "tenant", 0), "machine": f"{ORG}-1"}
    backend = _Watched(store._backend)
    deps = ApiDeps(
        store=Store(backend),
        clock=lambda: NOW,
        ids=lambda: crowd.object_id("site", "any", next(numbers)),
        wake=lambda _domains, _org: None,
        verifier=issuer.verifier(lambda: NOW),
    )
    client = TestClient(create_app(deps))
    client.portal = portal
    yield _Lists(client, backend, issuer.mint(ORG, [Role.TENANT_ADMIN], NOW, 3600.0)), ids
    client.close()
    portal.call(store.close)


@pytest.mark.slow
def test_no_list_looks_at_rows_of_another_tenant(lists: tuple[_Lists, dict[str, str]]) -> None:
    api, ids = lists
    too_expensive: list[str] = []
    asked = 0
    for template, parameters in api.declared():
        path = template
        filters: list[dict[str, Any]] = [{}]
        for parameter in parameters:
            name = parameter["name"]
            if parameter["in"] == "path":
                value = ORG if name == "org" else ids[KINDS.get(name, "machine")]
                path = path.replace(f"{{{name}}}", value)
            elif name not in ("pageNumber", "pageSize", "orderBy", "includeRelation"):
                filters += [{name: value} for value in _values(name, parameter["schema"], ids)]
        filters += [{"pageNumber": 5}, {"pageNumber": 10}, {"pageSize": 100}]
        orders = [{"orderBy": order} for order in api.orders(path)] or [{}]
        requests = [order | wanted for order in orders for wanted in filters]
        for query in requests:
            if query.keys() & OF_THE_SITE.get(path.rpartition("/nico/")[2], frozenset()):
                continue
            asked += 1
            if (plans := api.too_expensive(path, **query)) is not None:
                too_expensive.append(plans)
    assert asked > 500
    assert not too_expensive, f"{len(too_expensive)} of {asked}\n" + "\n\n".join(too_expensive)
