"""The bare peer of the site's REST service: FastAPI, sqlite3 and PyJWT, and nothing around them.

    python bare_site.py HOME

It works on a copy of a site's database and answers the same requests with the same bodies. A request costs
here what nobody can leave out: its token is verified, its body or query is validated by the same models, a
write is one durable transaction (WAL, `synchronous=FULL`) that checks the name and inserts the object, its
status history, its events and an audit row. There is one connection, which the event loop uses itself: no
thread is changed. What the service does besides, `EXTRA` of `site_peer` names.

Prints its port, and serves until its standard input ends.
"""

# ruff: noqa: S608 (the names of tables and columns are constants)

import asyncio
import sqlite3
import sys
import time
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID, uuid4

import jwt
import msgspec
import uvicorn
import uvloop
from fastapi import Depends, FastAPI, Header, HTTPException, Query
from fastapi.responses import JSONResponse
from site_process import announce, wait_for_end_of_input

from rackloom.carve.api.auth import LOCAL_AUDIENCE, LOCAL_ISSUER, LOCAL_KEY_FILE
from rackloom.carve.api.instance_wire import KEPT_DEFAULTS
from rackloom.carve.api.instances import InstanceQuery
from rackloom.carve.api.logical_partitions import (
    LogicalPartitionCreate,
    LogicalPartitionUpdate,
    PartitionQuery,
)
from rackloom.carve.api.vpcs import VpcCreate
from rackloom.carve.observation.latest import rfc3339
from rackloom.carve.store.database import DATABASE
from rackloom.carve.tenancy.entitlements import DEFAULT_LIMITS, QuotaKind
from rackloom.serving.acceptor import bound_socket

BASE = "/v2/org/{org}/nico"
AUDIT = "CREATE TABLE peer_audit (id INTEGER PRIMARY KEY, tenant_id TEXT, subject TEXT, what TEXT, at REAL)"
Row = sqlite3.Row
Json = dict[str, Any]


class Peer:
    """The database, and the key that tokens are signed with."""

    def __init__(self, home: Path) -> None:
        self.db = sqlite3.connect(home / DATABASE, isolation_level=None, cached_statements=256)
        self.db.row_factory = sqlite3.Row
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            self.db.execute(f"PRAGMA {pragma}")
        self.db.execute(AUDIT)
        pem = (home / "keys" / LOCAL_KEY_FILE).read_bytes()
        key: Any = jwt.algorithms.OKPAlgorithm().prepare_key(pem)
        self.key = key.public_key()

    def claims(self, authorization: str) -> Json:
        """The claims of a verified token."""
        _, _, token = authorization.partition(" ")
        required = ["exp", "iss", "aud", "sub"]
        try:
            found: Json = jwt.decode(
                token,
                self.key,
                algorithms=["EdDSA"],
                issuer=LOCAL_ISSUER,
                audience=LOCAL_AUDIENCE,
                options={"require": required},
            )
        except jwt.InvalidTokenError as error:
            raise HTTPException(401, "Invalid authorization token in request") from error
        return found

    def first(self, statement: str, *values: object) -> Any:
        """The first row, or None."""
        return self.db.execute(statement, values).fetchone()

    def all(self, statement: str, values: list[str]) -> list[Row]:
        """All rows; `?*` is replaced by as many parameters as there are values."""
        return self.db.execute(statement.replace("?*", ",".join("?" * len(values))), values).fetchall()


peer: Peer
app = FastAPI(docs_url=None, redoc_url=None)


# Who asks.


async def tenant_of(org: str, authorization: Annotated[str, Header()]) -> Row:
    """The tenant, of which the token must name the caller an administrator."""
    roles = peer.claims(authorization).get("orgs", {}).get(org.lower(), [])
    if "TENANT_ADMIN" not in roles:
        raise HTTPException(403, "User does not have Tenant Admin role with org")
    tenant: Row | None = peer.first("SELECT id, org FROM tenant WHERE org = ?", org.lower())
    if tenant is None:
        raise HTTPException(400, "Org does not have a Tenant associated")
    return tenant


Tenant = Annotated[Row, Depends(tenant_of)]


# Answers.


def times(row: Row) -> Json:
    """When it was made and changed."""
    return {"created": rfc3339(row["created"]), "updated": rfc3339(row["updated"])}


def histories(ids: list[str]) -> dict[str, list[Json]]:
    """The status histories of objects, newest first."""
    found: dict[str, list[Json]] = {object_id: [] for object_id in ids}
    rows = peer.all("SELECT * FROM status_history WHERE object_id IN (?*) ORDER BY id DESC", ids)
    for row in rows:
        entry = {"status": row["status"], "message": row["message"], **times(row)}
        found[row["object_id"]].append(entry)
    return found


def partitions(rows: list[Row]) -> list[Json]:
    """Logical partitions as they are sent."""
    past = histories([row["id"] for row in rows])
    return [
        {
            "id": row["id"],
            "name": row["name"],
            "description": row["description"],
            "siteId": row["site_id"],
            "tenantId": row["tenant_id"],
            "nvLinkLogicalPartitionStats": None,
            "status": row["status"],
            "statusHistory": past[row["id"]],
            **times(row),
        }
        for row in rows
    ]


def vpcs(rows: list[Row], org: str) -> list[Json]:
    """VPCs as they are sent."""
    past = histories([row["id"] for row in rows])
    defaults = [row["logical_partition_id"] for row in rows if row["logical_partition_id"]]
    summaries = {
        row["id"]: {
            "id": row["id"],
            "name": row["name"],
            "siteId": row["site_id"],
            "status": row["status"],
        }
        for row in peer.all("SELECT * FROM logical_partition WHERE id IN (?*)", defaults)
    }
    return [
        {
            **msgspec.json.decode(row["extra"]),
            "id": row["id"],
            "name": row["name"],
            "description": row["description"],
            "org": org,
            "siteId": row["site_id"],
            "tenantId": row["tenant_id"],
            "controllerVpcId": row["id"],
            "nvLinkLogicalPartitionId": row["logical_partition_id"],
            "nvLinkLogicalPartitionSummary": summaries.get(row["logical_partition_id"]),
            "status": row["status"],
            "statusHistory": past[row["id"]],
            **times(row),
        }
        for row in rows
    ]


INTERFACES = """SELECT i.*, m.domain, g.guid, n.site_id FROM nvlink_interface i
    JOIN instance n ON n.id = i.instance_id JOIN machine m ON m.id = n.machine_id
    LEFT JOIN machine_gpu g ON g.machine_id = n.machine_id AND g.module_id = i.device_instance + 1
    WHERE i.instance_id IN (?*) ORDER BY i.device_instance, i.created"""


def interface(row: Row) -> Json:
    """An NVLink interface as it is sent."""
    return {
        "id": row["id"],
        "instanceId": row["instance_id"],
        "nvLinkLogicalPartitionId": row["logical_partition_id"],
        "nvLinklogicalPartitionId": row["logical_partition_id"],
        "deviceInstance": row["device_instance"],
        "status": row["status"],
        "siteId": row["site_id"],
        "nvLinkDomainId": row["domain"],
        "gpuGuid": row["guid"],
        "statusMessage": row["reason"],
        **times(row),
    }


def instances(rows: list[Row]) -> list[Json]:
    """Instances as they are sent."""
    ids = [row["id"] for row in rows]
    past = histories(ids)
    attached: dict[str, list[Json]] = {instance_id: [] for instance_id in ids}
    for found in peer.all(INTERFACES, ids):
        attached[found["instance_id"]].append(interface(found))
    return [
        {
            **KEPT_DEFAULTS,
            **msgspec.json.decode(row["extra"]),
            "id": row["id"],
            "name": row["name"],
            "description": row["description"],
            "tenantId": row["tenant_id"],
            "infrastructureProviderId": row["provider_id"],
            "siteId": row["site_id"],
            "instanceTypeId": row["instance_type_id"],
            "vpcId": row["vpc_id"],
            "machineId": row["machine_id"],
            "controllerInstanceId": row["id"],
            "nvLinkInterfaces": attached[row["id"]],
            "isUpdatePending": row["status"] not in ("Ready", "Unknown"),
            "placementReason": row["placement"],
            "status": "Configuring" if row["status"] == "Unknown" else row["status"],
            "unknownSince": past[row["id"]][0]["created"] if row["status"] == "Unknown" else None,
            "statusHistory": past[row["id"]],
            **times(row),
        }
        for row in rows
    ]


def page(values: list[Json], total: int, query: Any) -> JSONResponse:
    """A page, described by its header."""
    about = {"pageNumber": query.page_number, "pageSize": query.page_size, "total": total, "orderBy": None}
    return JSONResponse(values, headers={"X-Pagination": msgspec.json.encode(about).decode()})


def rows_of(table: str, columns: str, tenant_id: str, query: Any) -> tuple[list[Row], int]:
    """The rows of a page, oldest first, and how many the tenant has."""
    total = peer.first(f"SELECT count(*) FROM {table} t WHERE t.tenant_id = ?", tenant_id)[0]
    joined = " JOIN site s ON s.id = t.site_id" if "s." in columns else ""
    rows = peer.db.execute(
        f"SELECT {columns} FROM {table} t{joined} WHERE t.tenant_id = ?"
        " ORDER BY t.created, t.id LIMIT ? OFFSET ?",
        (tenant_id, query.page_size, (query.page_number - 1) * query.page_size),
    )
    return rows.fetchall(), total


def own(table: str, columns: str, tenant_id: str, object_id: UUID) -> Row:
    """The tenant's object."""
    joined = " JOIN site s ON s.id = t.site_id" if "s." in columns else ""
    row: Row | None = peer.first(f"SELECT {columns} FROM {table} t{joined} WHERE t.id = ?", str(object_id))
    if row is None:
        raise HTTPException(404, "not found")
    if row["tenant_id"] != tenant_id:
        raise HTTPException(403, "not owned by Tenant")
    return row


# Reads.


@app.get(f"{BASE}/nvlink-logical-partition")
async def list_partitions(tenant: Tenant, query: Annotated[PartitionQuery, Query()]) -> JSONResponse:
    rows, total = rows_of("logical_partition", "t.*", tenant["id"], query)
    return page(partitions(rows), total, query)


@app.get(f"{BASE}/nvlink-logical-partition/{{object_id}}")
async def get_partition(tenant: Tenant, object_id: UUID) -> JSONResponse:
    return JSONResponse(partitions([own("logical_partition", "t.*", tenant["id"], object_id)])[0])


@app.get(f"{BASE}/vpc/{{object_id}}")
async def get_vpc(tenant: Tenant, object_id: UUID) -> JSONResponse:
    return JSONResponse(vpcs([own("vpc", "t.*", tenant["id"], object_id)], tenant["org"])[0])


@app.get(f"{BASE}/instance")
async def list_instances(tenant: Tenant, query: Annotated[InstanceQuery, Query()]) -> JSONResponse:
    rows, total = rows_of("instance", "t.*, s.provider_id", tenant["id"], query)
    return page(instances(rows), total, query)


@app.get(f"{BASE}/instance/{{object_id}}")
async def get_instance(tenant: Tenant, object_id: UUID) -> JSONResponse:
    return JSONResponse(instances([own("instance", "t.*, s.provider_id", tenant["id"], object_id)])[0])


# Writes.


class Write:
    """A durable transaction; rolled back when it raises."""

    def __enter__(self) -> None:
        peer.db.execute("BEGIN IMMEDIATE")

    def __exit__(self, failed: object, *_rest: object) -> None:
        peer.db.execute("ROLLBACK" if failed else "COMMIT")


def check_new(table: str, kind: QuotaKind, tenant_id: str, site_id: UUID, name: str) -> None:
    """The rules of a new object: the site takes part and is the tenant's, the name is free, there is room."""
    site = peer.first("SELECT status, capabilities FROM site WHERE id = ?", str(site_id))
    if site is None or site["status"] != "Registered":
        raise HTTPException(404, "Could not find Site with specified ID")
    given = "SELECT 1 FROM allocation WHERE tenant_id = ? AND site_id = ? LIMIT 1"
    if peer.first(given, tenant_id, str(site_id)) is None:
        raise HTTPException(403, "Tenant does not have access to Site")
    if peer.first(f"SELECT id FROM {table} WHERE tenant_id = ? AND name = ?", tenant_id, name) is not None:
        raise HTTPException(409, "the name is taken")
    limit = peer.first("SELECT value FROM tenant_quota WHERE tenant_id = ? AND kind = ?", tenant_id, kind)
    count = peer.first(f"SELECT count(*) FROM {table} WHERE tenant_id = ?", tenant_id)[0]
    if count >= (DEFAULT_LIMITS[kind] if limit is None else limit["value"]):
        raise HTTPException(403, "Tenant has reached the maximum")


def journal(tenant_id: str, kind: str, object_id: str, entries: list[tuple[str, str]], now: float) -> None:
    """The events of a change, and its audit row."""
    count = "UPDATE event_counter SET newest = newest + ? WHERE tenant_id = ? RETURNING newest"
    ((newest,),) = peer.db.execute(count, (len(entries), tenant_id)).fetchall()
    first = newest - len(entries) + 1
    peer.db.executemany(
        "INSERT INTO tenant_event (tenant_id, number, kind, object_id, status, message, created)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(tenant_id, first + n, kind, object_id, *entry, now) for n, entry in enumerate(entries)],
    )
    peer.db.execute(
        "INSERT INTO peer_audit (tenant_id, subject, what, at) VALUES (?, ?, ?, ?)",
        (tenant_id, object_id, entries[-1][1], now),
    )


def begin_history(object_id: str, entries: list[tuple[str, str]], now: float) -> None:
    """The status history of a new object."""
    peer.db.executemany(
        "INSERT INTO status_history (object_id, status, message, created, updated) VALUES (?, ?, ?, ?, ?)",
        [(object_id, *entry, now, now) for entry in entries],
    )


@app.post(f"{BASE}/nvlink-logical-partition", status_code=201)
async def create_partition(tenant: Tenant, body: LogicalPartitionCreate) -> JSONResponse:
    new, now = str(uuid4()), time.time()
    with Write():
        check_new("logical_partition", QuotaKind.LOGICAL_PARTITIONS, tenant["id"], body.site_id, body.name)
        peer.db.execute(
            "INSERT INTO logical_partition (id, tenant_id, site_id, name, description, status, created,"
            " updated) VALUES (?, ?, ?, ?, ?, 'Ready', ?, ?)",
            (new, tenant["id"], str(body.site_id), body.name, body.description, now, now),
        )
        entries = [
            ("Pending", "received NVLink Logical Partition creation request, pending"),
            ("Ready", "NVLink Logical Partition is ready for use"),
        ]
        begin_history(new, entries, now)
        journal(tenant["id"], "nvlink-logical-partition", new, entries, now)
        answer = partitions([own("logical_partition", "t.*", tenant["id"], UUID(new))])[0]
    return JSONResponse(answer, 201)


@app.patch(f"{BASE}/nvlink-logical-partition/{{object_id}}")
async def update_partition(tenant: Tenant, object_id: UUID, body: LogicalPartitionUpdate) -> JSONResponse:
    now = time.time()
    with Write():
        row = own("logical_partition", "t.*", tenant["id"], object_id)
        changes = {
            key: value
            for key, value in (("name", body.name), ("description", body.description))
            if value not in (None, row[key])
        }
        if "name" in changes:
            taken = "SELECT id FROM logical_partition WHERE tenant_id = ? AND name = ?"
            if peer.first(taken, tenant["id"], body.name) is not None:
                raise HTTPException(409, "the name is taken")
        if changes:
            columns = ", ".join(f"{key} = ?" for key in (*changes, "updated"))
            peer.db.execute(
                f"UPDATE logical_partition SET {columns} WHERE id = ?",
                (*changes.values(), now, str(object_id)),
            )
            note = (row["status"], f"{', '.join(changes)} changed")
            journal(tenant["id"], "nvlink-logical-partition", str(object_id), [note], now)
        answer = partitions([own("logical_partition", "t.*", tenant["id"], object_id)])[0]
    return JSONResponse(answer)


@app.post(f"{BASE}/vpc", status_code=201)
async def create_vpc(tenant: Tenant, body: VpcCreate) -> JSONResponse:
    new, now, default = str(body.id or uuid4()), time.time(), body.nvlink_logical_partition_id
    with Write():
        check_new("vpc", QuotaKind.VPCS, tenant["id"], body.site_id, body.name)
        if default is not None:
            own("logical_partition", "t.*", tenant["id"], default)
        kept = msgspec.json.encode(body.kept).decode()
        partition = None if default is None else str(default)
        peer.db.execute(
            "INSERT INTO vpc (id, tenant_id, site_id, name, description, logical_partition_id, extra, status,"
            " created, updated) VALUES (?, ?, ?, ?, ?, ?, ?, 'Ready', ?, ?)",
            (new, tenant["id"], str(body.site_id), body.name, body.description, partition, kept, now, now),
        )
        entries = [("Ready", "VPC is ready for use")]
        begin_history(new, entries, now)
        journal(tenant["id"], "vpc", new, entries, now)
        answer = vpcs([own("vpc", "t.*", tenant["id"], UUID(new))], tenant["org"])[0]
    return JSONResponse(answer, 201)


async def serve(home: Path) -> None:
    """Serve until the standard input ends."""
    global peer
    peer = Peer(home)
    listener = bound_socket("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    announce(listener.getsockname()[1])
    await wait_for_end_of_input()
    server.should_exit = True
    await serving


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
