"""The writes of a daemon to the API server, their number, and its conduct when no answer comes."""

import asyncio
import dataclasses
import random

import pytest
from tests.simulation.compute_domains.tray import SimulatedImexProgram
from tests.waiting import until

from rackloom.claim.imex.daemon import ImexDaemon
from rackloom.claim.imex.member import LABEL_SECONDS, CliqueMember, DaemonIdentity
from rackloom.claim.kube.api import NotFound
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ObjectRef, Readiness, read_clique
from rackloom.core.cluster.objects import COMPUTE_DOMAIN_CLIQUE, POD
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop

DRIVER = "rackloom-imex"
DOMAIN, CLIQUE = "0a1b2c3d-0000-4000-8000-000000000001", "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1"
OBJECT = names.clique_object_name(DOMAIN, CLIQUE)


class Rack:
    def __init__(self):
        self.kube = FakeKube()
        self.kube.faults.delay(0.005)
        self.api = DirectApi(self.kube, "user")
        self.tasks = []

    async def place(self, number):
        meta = {"name": f"daemon-{number}", "namespace": DRIVER}
        pod = await self.api.create(POD, {"metadata": meta, "spec": {"containers": [{"name": "main"}]}})
        return DaemonIdentity(
            compute_domain=DOMAIN,
            clique_id=CLIQUE,
            namespace=DRIVER,
            node=f"node-{number}",
            address=f"10.0.0.{number + 1}",
            pod=ObjectRef(meta["name"], pod["metadata"]["uid"]),
            max_nodes=18,
        )

    async def start(self, number, ready_after=0.5):
        imex = SimulatedImexProgram(ready_after, lambda: None)
        place, rng = await self.place(number), random.Random(number)
        api = DirectApi(self.kube, "daemon")
        self.tasks.append(asyncio.create_task(ImexDaemon(api, place, imex, imex, rng).run()))

    async def ready(self):
        try:
            found = read_clique(await self.api.get(COMPUTE_DOMAIN_CLIQUE, OBJECT, DRIVER))
        except NotFound:
            return 0
        return sum(daemon.status is Readiness.READY for daemon in found.daemons)

    async def pod(self, number):
        return (await self.api.get(POD, f"daemon-{number}", DRIVER))["metadata"]

    async def end(self):
        for task in self.tasks:
            assert not task.done(), task
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def calls(kube, verb, resource):
    wanted = ("daemon", verb, resource)
    return sum(n for call, n in kube.calls.items() if (call.user, call.verb, call.resource) == wanted)


def test_a_rack_of_daemons_says_each_thing_once_and_collides_only_while_it_joins():
    async def story():
        rack = Rack()
        await asyncio.gather(*(rack.start(number) for number in range(18)))

        async def all_ready():
            return await rack.ready() == 18

        await until(all_ready, "all are ready")
        await asyncio.sleep(30)
        # One write for being READY, even if others write too. One for the clique and the mesh.
        assert calls(rack.kube, "patch", "computedomaincliques") == 18
        assert calls(rack.kube, "patch", "pods") == 18
        pods = [await rack.pod(number) for number in range(18)]
        assert {pod["labels"][names.CLIQUE_ID_LABEL] for pod in pods} == {CLIQUE}
        assert all('"complete":true' in pod["annotations"][names.MESH_ANNOTATION] for pod in pods)
        await rack.end()

    event_loop.run_simulation(1, story)


def test_a_daemon_goes_on_while_the_api_server_is_away():
    """It would take the shared memory of running jobs with it."""

    async def story():
        rack = Rack()
        await rack.start(0)

        async def is_ready():
            return await rack.ready() == 1

        await until(is_ready, "it is ready")
        rack.kube.faults.add(RequestFault(user="daemon"))
        rack.kube.store.hang_up()
        await asyncio.sleep(60)
        assert not rack.tasks[0].done()
        rack.kube.faults.clear()
        await asyncio.sleep(60)
        assert names.MESH_ANNOTATION in (await rack.pod(0))["annotations"]
        await rack.end()

    event_loop.run_simulation(1, story)


@pytest.mark.parametrize("away", [0.0, 60.0])
def test_a_daemon_that_does_not_become_ready_says_its_clique_all_the_same(away):
    async def story():
        rack = Rack()
        await rack.start(0, ready_after=10_000)
        await asyncio.sleep(LABEL_SECONDS / 2)
        assert names.CLIQUE_ID_LABEL not in (await rack.pod(0)).get("labels", {})
        if away:
            rack.kube.faults.add(RequestFault(user="daemon", verb="patch"))
            await asyncio.sleep(away)
            rack.kube.faults.clear()
        await asyncio.sleep(2 * LABEL_SECONDS)
        assert (await rack.pod(0))["labels"] == {names.CLIQUE_ID_LABEL: CLIQUE}
        await rack.end()

    event_loop.run_simulation(1, story)


async def two_members(rack):
    members = [await member(rack, number) for number in range(2)]
    for joining in members:
        await joining.join()
    return members


async def member(rack, number):
    return CliqueMember(DirectApi(rack.kube, "daemon"), await rack.place(number), random.Random(1))


def test_an_entry_that_has_moved_is_found_again():
    async def story():
        rack = Rack()
        first, second = await two_members(rack)
        await first.leave()
        await second.set_ready(True)
        found = read_clique(await rack.api.get(COMPUTE_DOMAIN_CLIQUE, OBJECT, DRIVER))
        assert [(daemon.node_name, daemon.status) for daemon in found.daemons] == [
            ("node-1", Readiness.READY)
        ]

    event_loop.run_simulation(1, story)


async def ready_after_the_list_moved(rack):
    """The READY nodes if the second of three becomes ready after the first left and the entries moved up."""
    first, second, third = [await member(rack, number) for number in range(3)]
    for joining in (first, second, third):
        await joining.join()
    second.observed(third._latest)
    await first.leave()
    await second.set_ready(True)
    found = read_clique(await rack.api.get(COMPUTE_DOMAIN_CLIQUE, OBJECT, DRIVER))
    return [daemon.node_name for daemon in found.daemons if daemon.status is Readiness.READY]


async def ready_at_an_address_that_is_not_its_own(rack):
    """The READY addresses if a daemon becomes ready after its node got another one, at a new address."""
    old = await member(rack, 0)
    await old.join()
    moved = dataclasses.replace(old._identity, address="10.0.9.9")
    await CliqueMember(DirectApi(rack.kube, "daemon"), moved, random.Random(1)).join()
    await old.set_ready(True)
    found = read_clique(await rack.api.get(COMPUTE_DOMAIN_CLIQUE, OBJECT, DRIVER))
    return [daemon.ip_address for daemon in found.daemons if daemon.status is Readiness.READY]


def without_tests(monkeypatch):
    """The planted bug: READY is written by the position of the entry, without a test of its owner."""
    patch = DirectApi.patch

    async def by_position(self, kind, name, namespace, change, **more):
        if isinstance(change, tuple):
            change = tuple(operation for operation in change if operation["op"] != "test")
        return await patch(self, kind, name, namespace, change, **more)

    monkeypatch.setattr(DirectApi, "patch", by_position)


@pytest.mark.parametrize("planted", [False, True])
def test_ready_is_written_to_the_own_entry_wherever_it_is(planted, monkeypatch):
    if planted:
        without_tests(monkeypatch)
    ready = event_loop.run_simulation(1, lambda: ready_after_the_list_moved(Rack()))
    assert ready == (["node-2"] if planted else ["node-1"])


@pytest.mark.parametrize("planted", [False, True])
def test_ready_is_written_of_the_daemon_at_the_own_address_only(planted, monkeypatch):
    if planted:
        without_tests(monkeypatch)
    ready = event_loop.run_simulation(1, lambda: ready_at_an_address_that_is_not_its_own(Rack()))
    assert ready == (["10.0.9.9"] if planted else [])


def test_another_daemon_at_the_place_of_an_entry_is_not_touched():
    async def story():
        rack = Rack()
        await two_members(rack)
        stale = await member(rack, 7)
        stale.observed(await stale.join())
        await stale.leave()
        await stale.set_ready(True)
        found = read_clique(await rack.api.get(COMPUTE_DOMAIN_CLIQUE, OBJECT, DRIVER))
        assert {daemon.status for daemon in found.daemons} == {Readiness.NOT_READY}

    event_loop.run_simulation(1, story)
