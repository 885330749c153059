"""The REST service beside a bare peer (`bare_site.py`): the same requests, the same answers, in the same run.

Both serve copies of one database, each in a process of its own, over HTTP/1.1 on sockets that stay open. The
answers are compared field by field before anything is timed. Then rounds of both sides take turns; the median
of the rounds' ratios is what counts, in requests per second and in CPU time of the server. A tenant of 20, of
1,000 and of 10,000 rows shows whether a page costs more where there is more behind it.

Where the time of a request goes is measured apart (`site_request`): no clock is read in a timed round.
"""

import json
import shutil
import sqlite3
import statistics
import sys
import time
import uuid
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from site_figures import load
from site_passes import fill
from site_plant import Plant, call, plant
from site_process import Answer, Request, Server, Spent, serving
from site_request import parts_of

from rackloom.carve.inventory.enrolment import DEMO_ORG
from rackloom.carve.store.database import DATABASE

AT_ONCE = 16
"""Connections, each with one request under way."""
SIZES = (20, 1_000, 10_000)
"""Logical partitions of the tenants whose pages are asked for."""
PAGE = 20
PROFILED_REQUESTS = 100
EXTRA = (
    "limits of connections, heads, bodies and of each organisation's rate",
    "roles and parameters as declared for each operation",
    "turns of organisations at the store, on a thread of its own",
    "statuses of outdated readings",
    "quotas of every kind",
)
"""What the service does for a request and the peer does not."""


class Workload(msgspec.Struct, frozen=True):
    """Requests of one kind."""

    name: str
    org: str
    requests: Iterator[Request]


class Seeded(msgspec.Struct, frozen=True):
    """A site at rest as files, and how to ask for what is in it."""

    home: Path
    tokens: dict[str, str]
    site_id: str
    partition: str
    vpc: str
    instance: str


async def measured(rounds: int, milliseconds: int, folder: Path) -> list[dict[str, Any]]:
    """A row for each workload."""
    with TemporaryDirectory(dir=folder) as beside:
        seeded = await _seed(Path(beside))
        peer_home, untouched = Path(beside) / "peer", Path(beside) / "untouched"
        for copy in (peer_home, untouched):
            shutil.copytree(seeded.home, copy)
        async with (
            serving("site_server.py", seeded.home) as ours,
            serving("bare_site.py", peer_home) as peer,
        ):
            rows = []
            for workload in _workloads(seeded):
                await _compare(ours, peer, seeded, workload)
                rows.append(await _row(ours, peer, seeded, workload, rounds, milliseconds / 1e3))
        number = PROFILED_REQUESTS if rounds > 1 else AT_ONCE
        for row, workload in zip(rows, _workloads(seeded), strict=True):
            token = seeded.tokens[workload.org]
            row |= await parts_of(untouched, token, workload.org, workload.requests, number)
    _print_table(rows)
    return rows


# The site.


async def _seed(folder: Path) -> Seeded:
    """Two racks in use, and tenants with rows."""
    home = folder / "site"
    async with plant(2, folder) as site:
        async with site.reconciling(acts=False):
            pass
        await fill(site, 2)
        orgs = [_org(size) for size in SIZES]
        for org in orgs:
            # The first request makes the tenant.
            await call(site.app, "GET", f"/v2/org/{org}/nico/site", site.token_of(org))
        instance = (await site.ask("GET", "instance?pageSize=1"))[0]
        partition = (await site.ask("GET", "nvlink-logical-partition?pageSize=1"))[0]
        site_id = (await site.ask("GET", "site"))[0]["id"]
        tokens = {org: site.token_of(org) for org in (*orgs, DEMO_ORG)}
        ids = (site_id, partition["id"], instance["vpcId"], instance["id"])
        _copy(site, home)
    for size in SIZES:
        _insert_partitions(home, _org(size), size, site_id)
    return Seeded(home, tokens, *ids)


def _org(size: int) -> str:
    return f"tenant-of-{size}"


def _copy(site: Plant, home: Path) -> None:
    """The database and the key of the tokens, as they are now."""
    home.mkdir()
    shutil.copytree(site.home / "keys", home / "keys")
    with sqlite3.connect(site.home / DATABASE) as source:
        source.execute("VACUUM INTO ?", (str(home / DATABASE),))
    source.close()


def _insert_partitions(home: Path, org: str, size: int, site_id: str) -> None:
    """As many logical partitions as are wanted, with histories, past the quota of a tenant."""
    database = sqlite3.connect(home / DATABASE)
    ((tenant_id,),) = database.execute("SELECT id FROM tenant WHERE org = ?", (org,)).fetchall()
    now, ids = time.time(), [str(uuid.uuid5(uuid.NAMESPACE_OID, f"{org}-{n}")) for n in range(size)]
    database.executemany(
        "INSERT INTO logical_partition (id, tenant_id, site_id, name, status, created, updated)"
        " VALUES (?, ?, ?, ?, 'Ready', ?, ?)",
        [(new, tenant_id, site_id, f"partition-{n}", now + n / 1e3, now) for n, new in enumerate(ids)],
    )
    database.executemany(
        "INSERT INTO status_history (object_id, status, message, created, updated) VALUES (?, ?, ?, ?, ?)",
        [
            (new, status, "NVLink Logical Partition", now, now)
            for new in ids
            for status in ("Pending", "Ready")
        ],
    )
    database.execute(
        "INSERT INTO tenant_quota (tenant_id, kind, value, updated)"
        " VALUES (?, 'nvLinkLogicalPartitions', 1000000, ?)",
        (tenant_id, now),
    )
    database.commit()
    database.close()


# What is asked.


def _workloads(seeded: Seeded) -> list[Workload]:
    small, middle, large = map(_org, SIZES)
    one_partition = f"nvlink-logical-partition/{seeded.partition}"
    found = [
        Workload("read one logical partition", DEMO_ORG, _reads(one_partition)),
        Workload("read one VPC", DEMO_ORG, _reads(f"vpc/{seeded.vpc}")),
        Workload("read one instance, 4 interfaces", DEMO_ORG, _reads(f"instance/{seeded.instance}")),
        Workload("page of 20 instances", DEMO_ORG, _reads(f"instance?pageSize={PAGE}")),
    ]
    pages = f"nvlink-logical-partition?pageSize={PAGE}"
    for org, size in zip((small, middle, large), SIZES, strict=True):
        found.append(Workload(f"first page of {size} rows", org, _reads(pages)))
        if size > PAGE:
            half, last = size // PAGE // 2, size // PAGE
            found.append(Workload(f"middle page of {size} rows", org, _reads(f"{pages}&pageNumber={half}")))
            found.append(Workload(f"last page of {size} rows", org, _reads(f"{pages}&pageNumber={last}")))
    for org, size in ((small, "20"), (large, "10,000")):
        found.append(
            Workload(f"create logical partition beside {size}", org, _partitions(seeded.site_id, "new"))
        )
    found.append(Workload("create VPC", small, _vpcs(seeded.site_id)))
    found.append(Workload("update logical partition", DEMO_ORG, _updates(one_partition)))
    return found


def _reads(path: str) -> Iterator[Request]:
    return repeat(("GET", path, None))


def _partitions(site_id: str, prefix: str) -> Iterator[Request]:
    for number in range(10**9):
        yield "POST", "nvlink-logical-partition", {"siteId": site_id, "name": f"{prefix}-{number}"}


def _vpcs(site_id: str) -> Iterator[Request]:
    for number in range(10**9):
        yield "POST", "vpc", {"siteId": site_id, "name": f"vpc-{number}", "labels": {"team": "a"}}


def _updates(path: str) -> Iterator[Request]:
    for number in range(10**9):
        yield "PATCH", path, {"description": f"description {number}"}


# The same answer.


async def _compare(ours: Server, peer: Server, seeded: Seeded, workload: Workload) -> None:
    """Refuse to time answers that differ."""
    request, token = next(workload.requests), seeded.tokens[workload.org]
    mine, theirs = [await server.ask(token, workload.org, request) for server in (ours, peer)]
    is_new = request[0] != "GET"
    if mine.status != theirs.status or _comparable(mine, is_new) != _comparable(theirs, is_new):
        raise RuntimeError(
            f"{workload.name}: {_comparable(mine, is_new)} is not {_comparable(theirs, is_new)}"
        )


def _comparable(answer: Answer, is_new: bool) -> Any:
    body = answer.json()
    if is_new:
        body = _without_chance(body)
    return answer.status, body, json.loads(answer.head.get("x-pagination", "null"))


def _without_chance(value: Any) -> Any:
    """What two servers choose for themselves: times, and the ids of new objects."""
    if isinstance(value, list):
        return [_without_chance(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    chosen = ("id", "created", "updated", "controllerVpcId")
    return {key: "chosen" if key in chosen else _without_chance(inner) for key, inner in value.items()}


# Rounds.


async def _row(
    ours: Server, peer: Server, seeded: Seeded, workload: Workload, rounds: int, seconds: float
) -> dict[str, Any]:
    token = seeded.tokens[workload.org]
    mine: list[Spent] = []
    theirs: list[Spent] = []
    for turn in range(rounds):
        sides = [(ours, mine), (peer, theirs)]
        for server, spent in sides if turn % 2 else reversed(sides):
            spent.append(await server.busy(token, workload.org, workload.requests, AT_ONCE, seconds))
    ratios = [a.per_s / b.per_s for a, b in zip(mine, theirs, strict=True)]
    return {
        "measure": "peer",
        "of": workload.name,
        "against": "bare FastAPI, sqlite3, PyJWT",
        "ratio": round(statistics.median(ratios), 2),
        "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 2),
        "cpu_ratio": round(
            statistics.median(b.cpu_us / a.cpu_us for a, b in zip(mine, theirs, strict=True)), 2
        ),
        "rounds": rounds,
        "per_s": round(statistics.median(spent.per_s for spent in mine)),
        "against_per_s": round(statistics.median(spent.per_s for spent in theirs)),
        "cpu_us": round(statistics.median(spent.cpu_us for spent in mine)),
        "against_cpu_us": round(statistics.median(spent.cpu_us for spent in theirs)),
        **load(),
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    """The same to read, beside the rows."""
    parts = ("token", "routing", "parameters", "sql", "records", "encoding", "rest")
    print(
        f"{'requests per second and CPU against the peer':45} ratio (rounds)     CPU  us of",
        *parts,
        file=sys.stderr,
    )
    for row in rows:
        spread = f"{row['ratio_min']:.2f}-{row['ratio_max']:.2f}"
        shares = " ".join(f"{row[f'{part}_us']:>{len(part)}}" for part in parts)
        ratios = f"{row['ratio']:5.2f} ({spread}) {row['cpu_ratio']:5.2f}"
        print(f"{row['of']:45} {ratios}  {row['request_us']:5} {shares}", file=sys.stderr)
    print("besides the same answer the service does:", *EXTRA, sep="\n  ", file=sys.stderr)
