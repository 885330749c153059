"""A running site with a database that takes no writes while its switch controllers are dead.

Each scenario first brings up a rack and an instance that is Ready. Then the database takes no more writes,
and the controllers end. Readers learn since when the domain is unknown, and writers learn the remedy.
"""

import asyncio
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path

import grpc
import grpc.aio
import httpx2
import pytest
import sqlalchemy as sa
import structlog
from tests.app.test_serve import Operator, furnish, metrics
from tests.carve.conftest import postgres_server, postgres_template, postgres_url  # noqa: F401
from tests.carve.store.test_store_postgres import END_OTHERS
from tests.waiting import PATIENCE, until, until_seen

from rackloom.app.config import load_config
from rackloom.app.site.service import site_service
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.store.database import DATABASE
from rackloom.core.partitions import status_rules
from rackloom.errors import Refused
from rackloom.web import live

pytestmark = pytest.mark.slow
READ_SECONDS = 0.5
"""In place of the bound on one reading: with an interval of a second, a reading is outdated after 3.5 s."""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(status_rules, "READ_SECONDS", READ_SECONDS)
    monkeypatch.setattr(live, "RECORD_SECONDS", READ_SECONDS)


def configured(ground, **changes):
    path = ground.config(**changes)
    path.write_text(path.read_text().replace("'30s'", "'1s'"))
    return path


class ServedRack:
    """A rack of a site that is served, with an instance that is Ready."""

    def __init__(self, ground, rest_port, metrics_port):
        self.ground = ground
        self.rest_port = rest_port
        self.metrics_port = metrics_port
        self.admin_port = 0

    def rest(self, role="TENANT_ADMIN"):
        org = "tenant" if role == "TENANT_ADMIN" else "acme"
        return self.ground.rest(self.rest_port, org=org, role=role)

    async def occupy(self, switch, admin_port):
        """Enrol the rack, and make an instance on it that becomes Ready."""
        self.admin_port = admin_port
        async with Operator(self.ground, admin_port) as admin, self.rest("PROVIDER_ADMIN") as provider:
            await admin.register(switch)
            kind = await furnish(provider, await until(admin.machines, "the machines are found"))
        async with self.rest() as http:
            place = (await http.get("site")).json()[0]["id"]
            made = await http.post("nvlink-logical-partition", json={"name": "job", "siteId": place})
            body = {"name": "net", "siteId": place, "nvLinkLogicalPartitionId": made.json()["id"]}
            vpc = (await http.post("vpc", json=body)).json()["id"]
            wanted = {"name": "job", "vpcId": vpc, "instanceTypeId": kind}
            answer = await http.post("instance", json=wanted)
            assert answer.status_code == 201, answer.text
        await until(self.is_ready, "the instance is ready")

    async def instance(self):
        async with self.rest() as http:
            answer = await http.get("instance")
            assert answer.status_code == 200, answer.text
            return answer.json()[0]

    async def is_ready(self):
        return (await self.instance())["status"] == "Ready"

    async def is_unknown(self):
        return (await self.instance())["unknownSince"]

    async def is_unknown_everywhere(self):
        """REST, /readyz, metrics and the instance's history say since when."""
        since = await until(self.is_unknown, "the instance is unknown")
        shown = await self.instance()
        assert shown["status"] == "Configuring"
        assert {interface["status"] for interface in shown["nvLinkInterfaces"]} == {"Pending"}
        async with self.rest() as http:
            (domain,) = (await http.get("nvlink-domain")).json()
        assert (domain["status"], domain["unknownSince"]) == ("Unknown", since)

        async def is_listed():
            page = await metrics(self.metrics_port, "readyz")
            return re.search(r"^domain \S+: unknown since \S+: .* not been read since$", page, re.MULTILINE)

        await until(is_listed, "the domain is listed at /readyz")
        page = await metrics(self.metrics_port)
        assert 'nico_nvlink_endpoints{state="unknown"} 1.0' in page
        assert "nico_nvlink_partition_monitor_nmxc_gpu_count{" not in page
        return since

    async def refuses_writes(self, problem):
        """503 with the remedy, within seconds, without addresses, paths or codes. Operators, too."""
        async with self.rest() as http:
            place = (await http.get("site")).json()[0]["id"]
            answer = await http.post("nvlink-logical-partition", json={"name": "more", "siteId": place})
        assert answer.status_code == 503, answer.text
        message = answer.json()["message"]
        assert problem in message
        assert "the operator of the site must" in message
        assert "Errno" not in message
        assert "127.0.0.1" not in message
        assert int(answer.headers["Retry-After"]) > 0
        nine = pb.NvlinkNmxcEndpoint(chassis_serial="CHASSIS9", endpoint="https://nine.example:9370")
        async with Operator(self.ground, self.admin_port) as admin:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await admin.forge.CreateNvlinkNmxcEndpoint(nine)
        assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.UNAVAILABLE, message)

    async def takes_writes(self):
        async with self.rest() as http:
            place = (await http.get("site")).json()[0]["id"]
            answer = await http.post("nvlink-logical-partition", json={"name": "again", "siteId": place})
            return answer.status_code == 201


def other_program(path):
    """A connection of another program to the site's database."""
    database = load_config(path).database.sqlite / DATABASE
    return sqlite3.connect(database, isolation_level=None, check_same_thread=False)


@asynccontextmanager
async def served_rack(ground, path):
    """The site in this process, with an instance that is Ready, and its switch controllers to be closed."""
    async with AsyncExitStack() as switches, site_service(load_config(path)) as site:
        (switch,) = await switches.enter_async_context(ground.racks())
        rack = ServedRack(ground, site.rest_port, site.metrics_port)
        await rack.occupy(switch, site.admin_port)
        yield rack, switches


def test_a_locked_database_is_unknown_since_the_last_reading(ground):
    path = configured(ground)

    async def scenario():
        async with served_rack(ground, path) as (rack, switches):
            with closing(other_program(path)) as other:
                await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")
                await switches.aclose()
                since = await rack.is_unknown_everywhere()
                await rack.refuses_writes("another program has locked the site's database")
                assert await rack.is_unknown() == since
                other.execute("ROLLBACK")
                await until(rack.takes_writes, "the database takes writes")

    with structlog.testing.capture_logs() as logs:
        asyncio.run(scenario())
    assert not [entry for entry in logs if entry.get("exc_info")]


@pytest.fixture
def read_only(postgres_server, postgres_url):  # noqa: F811
    """Makes the database read-only ("on") or not ("off"), and ends the connections to it."""
    name = sa.make_url(postgres_url).database

    def work(state):
        postgres_server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = {state}")
        postgres_server.execute(END_OTHERS.format(name))

    async def switch(state):
        # `execute` runs its own loop, which a running one does not allow in its thread.
        await asyncio.to_thread(work, state)

    return switch


def test_a_read_only_server_is_unknown_since_the_last_reading(ground, read_only, postgres_url):  # noqa: F811
    path = configured(ground)
    home = f'sqlite = "{ground.directory / "home"}"'
    path.write_text(path.read_text().replace(home, f'postgresql = "{postgres_url}"'))

    async def scenario():
        async with served_rack(ground, path) as (rack, switches):
            await read_only("on")
            await switches.aclose()
            await rack.is_unknown_everywhere()
            await rack.refuses_writes("the site's database is read-only")
            with pytest.raises(Refused, match="cannot start: the site's database is read-only"):
                async with site_service(load_config(path)):
                    pass
            await read_only("off")
            await until(rack.takes_writes, "the database takes writes")

    with structlog.testing.capture_logs() as logs:
        asyncio.run(scenario())
    assert not [entry for entry in logs if entry.get("exc_info")]


class Gate:
    """Connections to a server, which end when it is shut, and are refused until it is opened again."""

    def __init__(self, socket_path):
        self._socket = socket_path
        self._server = None
        self._open = set()
        self.port = 0

    async def open(self):
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def shut(self):
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _pass(self, reader, writer):
        inner_reader, inner_writer = await asyncio.open_unix_connection(self._socket)
        both = {writer, inner_writer}
        self._open |= both
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(reader, inner_writer))
                tasks.create_task(self._copy(inner_reader, writer))
        finally:
            self._open -= both

    async def _copy(self, reader, writer):
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


def test_a_server_that_is_gone_is_answered_503_until_it_is_back(ground, postgres_url):  # noqa: F811
    """No read can be answered then either, and no answer names the server's address."""
    path = configured(ground)
    home = f'sqlite = "{ground.directory / "home"}"'
    url = sa.make_url(postgres_url)
    gate = Gate(f"{url.query['host']}/.s.PGSQL.5432")

    async def probe(port):
        async with httpx2.AsyncClient(timeout=PATIENCE) as client:
            return await client.get(f"http://127.0.0.1:{port}/readyz")

    async def scenario():
        await gate.open()
        through = f"postgresql://{url.username}@127.0.0.1:{gate.port}/{url.database}"
        path.write_text(path.read_text().replace(home, f'postgresql = "{through}"'))
        async with served_rack(ground, path) as (rack, _):
            await gate.shut()
            async with rack.rest() as http:
                answer = await http.get("instance")
            assert answer.status_code == 503, answer.text
            assert "the site's database cannot be reached" in answer.json()["message"]
            assert "127.0.0.1" not in answer.text
            not_ready = await probe(rack.metrics_port)
            assert (not_ready.status_code, "127.0.0.1" in not_ready.text) == (503, False)
            await gate.open()

            async def again():
                async with rack.rest() as http:
                    return (await http.get("instance")).status_code == 200 and await rack.is_ready()

            await until(again, "the database is back")
            await until(rack.takes_writes, "it takes writes")
        await gate.shut()

    with structlog.testing.capture_logs() as logs:
        asyncio.run(scenario())
    assert not [entry for entry in logs if entry.get("exc_info")]


# A separate process, on a separate disk.


SERVE = f"""
import sys, pathlib
from rackloom.core.partitions import status_rules
from rackloom.web import live
status_rules.READ_SECONDS = live.RECORD_SECONDS = {READ_SECONDS}
sys.argv = ["rackloom", "serve", "--config", sys.argv[1]]
from rackloom.cli.main import main
main()
"""


class SmallDisk:
    """A process in a new mount namespace, in which the site's home is a small disk."""

    def __init__(self, path):
        self.path = path
        self.home = load_config(path).database.sqlite
        self.home.mkdir(exist_ok=True)
        self.kept = path.parent / "kept"
        self.output = path.parent / "output.txt"
        self.process = None

    def start(self, *, full=False):
        """Mount the disk with its kept files, fill it if `full`, and serve the site."""
        fill = "cat /dev/zero > $0/fill 2>/dev/null; " if full else ""
        script = (
            f'mount -t tmpfs -o size=4m none $0 && cp -r $1/. $0/ 2>/dev/null; {fill}exec "$2" -c "$3" "$4"'
        )
        self.kept.mkdir(exist_ok=True)
        command = ["unshare", "-m", "sh", "-c", script, self.home, self.kept]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*command, sys.executable, SERVE, self.path], stdout=output, stderr=subprocess.STDOUT
            )

    def disk(self):
        """The disk as the process has it."""
        return Path(f"/proc/{self.process.pid}/root{self.home}")

    def fill(self):
        with (self.disk() / "fill").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return

    def ports(self):
        """REST, admin and metrics, once the process has written where it listens."""
        words = until_seen(lambda: self.announcement() or self.has_ended(), "it listens").split()
        numbers = [int(word.strip(",")) for word in words if word.strip(",").isdecimal()]
        assert len(numbers) == 3, self.output.read_text()
        return numbers

    def announcement(self):
        lines = self.output.read_text().splitlines()
        return next((line for line in lines if line.startswith("rackloom: site lab: REST")), "")

    def has_ended(self):
        return "it has ended" if self.process.poll() is not None else ""

    def keep(self):
        shutil.copytree(self.disk(), self.kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("fill"))

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()


@pytest.fixture
def small_disk(ground):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("NOT TESTED ON A FULL DISK: mounting a small one needs root and unshare")
    disk = SmallDisk(configured(ground))
    yield disk
    disk.stop()


def test_a_full_disk_and_a_process_that_was_stopped(ground, small_disk):
    """It is stopped for longer than a reading is valid, and then started again on the full disk."""

    async def scenario():
        small_disk.start()
        rest, admin, page = await asyncio.to_thread(small_disk.ports)
        rack = ServedRack(ground, rest, page)
        async with ground.racks() as (switch,):
            await rack.occupy(switch, admin)
            small_disk.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(status_rules.valid_seconds(1.0) + 0.5)
            small_disk.fill()
        small_disk.process.send_signal(signal.SIGCONT)
        # The query comes at once: nothing was written or read before it.
        assert await rack.is_unknown()
        # Later the write-ahead log may start at the front of its file, and then it needs no room.
        small_disk.keep()
        await rack.is_unknown_everywhere()
        await rack.refuses_writes("the site's database has no room")

    asyncio.run(scenario())
    lines = small_disk.output.read_text()
    assert "Traceback" not in lines
    assert lines.count("store.unavailable") == 1
    small_disk.stop()
    small_disk.start(full=True)
    assert small_disk.process.wait(PATIENCE) == 1
    refusal = small_disk.output.read_text()
    assert refusal.startswith("rackloom: the store in ")
    assert "no room" in refusal or "No space left" in refusal
    assert "fix: make room" in refusal
    assert len(refusal.splitlines()) == 2
    # With room again, the old rows are older than a reading is valid: nothing is Ready after the restart.
    small_disk.start()
    rest, _, page = small_disk.ports()
    assert asyncio.run(ServedRack(ground, rest, page).is_unknown())
