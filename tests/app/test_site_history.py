"""Two processes of `rackloom serve` on one PostgreSQL die, stop and go on while 16 clients write.

Some order of all requests must explain every answer to a client (`client_history`), and no GPU may ever be in
two partitions. RACKLOOM_HISTORY_SECONDS makes the run longer.
"""

import asyncio
import os
import random
import shutil
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from itertools import chain

import asyncpg
import httpx2
import pytest
from tests.app.client_history import ClientAction, count_outcomes, find_violations
from tests.app.served_history import Disturber, RecordingClient, ServedProcess
from tests.app.test_serve import Operator, furnish
from tests.carve.conftest import postgres_server, postgres_template, postgres_url  # noqa: F401
from tests.waiting import until

CLIENTS = 16
SECONDS = float(os.environ.get("RACKLOOM_HISTORY_SECONDS", "30"))


@pytest.fixture
def configs(ground, postgres_url):  # noqa: F811
    """One configuration for each process. They are identical."""
    file = ground.config()
    sqlite = f'sqlite = "{ground.directory / "home"}"'
    file.write_text(file.read_text().replace(sqlite, f'postgresql = "{postgres_url}"'))
    copies = [ground.directory / f"{name}.toml" for name in ("first", "second")]
    for copy in copies:
        shutil.copyfile(file, copy)
    return copies


class FabricWatch:
    """Notes each GPU that is in two partitions at once."""

    def __init__(self, switch):
        self.changes = 0
        self.shared = []
        switch.fabric.on_change(self._look)

    def _look(self, snapshot):
        self.changes += 1
        members = list(chain.from_iterable(partition.guids for partition in snapshot.partitions))
        if len(members) != len(set(members)):
            self.shared.append(snapshot)


async def bring_up(ground, process, switch):
    """Enrol the rack. Returns the instance type of its machines."""
    async with Operator(ground, process.admin_port) as admin:
        await admin.register(switch)
        machines = await until(admin.machines, "the machines are found")
    provider = ground.rest(process.http.base_url.port, role="PROVIDER_ADMIN")
    async with provider:
        return await furnish(provider, machines)


async def repeat(processes, method, path, body=None):
    """Send the request to one process after another until one answers. It may be made twice."""

    async def ask():
        for http in [process.http for process in processes if process.http is not None]:
            try:
                answer = await http.request(method, path, json=body)
            except (httpx2.HTTPError, RuntimeError):
                answer = None
            if answer is not None and answer.status_code < 500:
                return answer
        return None

    return await until(ask, f"{method} {path} is answered")


class Mover:
    """One tenant's instance that changes its logical partition while the processes are disturbed."""

    def __init__(self, processes, site, kind):
        self.moves = 0
        self._processes = processes
        self._site = site
        self._kind = kind

    async def set_up(self):
        partitions = []
        for name in ("left", "right"):
            body = {"name": name, "siteId": self._site}
            answer = await repeat(self._processes, "POST", "nvlink-logical-partition", body)
            partitions.append(answer.json()["id"])
        self.partitions = partitions
        vpc = await repeat(self._processes, "POST", "vpc", {"name": "net", "siteId": self._site})
        wanted = {"name": "job", "vpcId": vpc.json()["id"], "instanceTypeId": self._kind}
        answer = await repeat(self._processes, "POST", "instance", wanted)
        assert answer.status_code == 201, answer.text
        self.instance = answer.json()["id"]

    async def move(self, ended):
        while not ended.is_set():
            await asyncio.sleep(0.5)
            wanted = self.partitions[self.moves % 2]
            devices = [{"nvLinkLogicalPartitionId": wanted, "deviceInstance": number} for number in range(4)]
            path = f"instance/{self.instance}"
            answer = await repeat(self._processes, "PATCH", path, {"nvLinkInterfaces": devices})
            assert answer.status_code == 200, answer.text
            self.moves += 1

    async def is_ready(self):
        answer = await repeat(self._processes, "GET", f"instance/{self.instance}")
        return answer.json()["status"] == "Ready"


OPERATIONS = {
    ClientAction.CREATE: "create-vpc",
    ClientAction.WRITE: "update-vpc",
    ClientAction.DELETE: "delete-vpc",
}


async def entered_changes(url):
    """Operation and object -> how many changes the audit log has."""
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch("SELECT operation, object_name FROM audit_entry WHERE status < 300")
    finally:
        await connection.close()
    return Counter((row["operation"], row["object_name"]) for row in rows)


def assert_entered_once(history, entered):
    """Each acknowledged change has its entry. Apart from these, only unanswered changes may have one."""
    acknowledged, unknown = Counter(), Counter()
    for event in history:
        if event.action in OPERATIONS and not event.refused:
            counted = acknowledged if event.returned_at is not None else unknown
            counted[OPERATIONS[event.action], event.object] += 1
    for changed in acknowledged | unknown:
        least = acknowledged[changed]
        assert least <= entered[changed] <= least + unknown[changed], changed


@pytest.mark.slow
def test_every_answer_is_explained_by_an_order_of_the_requests(ground, configs, postgres_url):  # noqa: F811
    history = []
    processes = [ServedProcess(ground, config, config.stem) for config in configs]
    disturber = Disturber(processes, random.Random(1))

    async def disturbed(mover, site, ended):
        since = time.monotonic()
        clients = [
            RecordingClient(f"c{number}", processes, site, history, number) for number in range(CLIENTS)
        ]
        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                tasks.create_task(client.live(since, ended))
            tasks.create_task(mover.move(ended))
            await disturber.strike_until(since + SECONDS)
            ended.set()

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
            mover = Mover(processes, site, kind)
            await mover.set_up()
            await until(mover.is_ready, "the instance is ready")
            await disturbed(mover, site, asyncio.Event())
            await until(mover.is_ready, "the instance is ready again")
            await read_everything(site)
            entered = await entered_changes(postgres_url)
            for process in processes:
                assert await process.end() == 0
            return watch, mover, entered

    async def read_everything(site):
        """One list of each generation from each process, after all else."""
        reader = RecordingClient("reader", processes, site, history, CLIENTS)
        for prefix in sorted({event.object.split("-")[0] + "-" for event in history}):
            for process in processes:
                await reader.request(process.http, ClientAction.LIST, prefix)
        assert all(event.returned_at is not None for event in history if event.client == "reader")

    watch, mover, entered = asyncio.run(scenario())
    assert not watch.shared
    assert_entered_once(history, entered)
    assert not find_violations(history), "\n".join(map(str, find_violations(history)))
    outcomes = count_outcomes(history)
    met = f"{dict(outcomes)}, struck: {disturber.struck}, moves: {mover.moves}, changes: {watch.changes}"
    sys.stdout.write(met)
    # A run is only as good as the events that it met.
    assert all(outcomes[f"{action} acknowledged"] > 5 for action in ClientAction), met
    assert any(
        outcomes[f"{action} unknown"]
        for action in (ClientAction.CREATE, ClientAction.WRITE, ClientAction.DELETE)
    ), met
    assert all(disturber.struck.values()), met
    assert mover.moves > 2, met
    assert watch.changes > 2, met
