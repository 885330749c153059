"""The controller against an API server under virtual time: many ComputeDomains, faults, deaths."""

import asyncio
import random
from contextlib import suppress

import msgspec
import pytest

from rackloom.claim.cluster.controller import Controller
from rackloom.claim.domain import names
from rackloom.claim.domain.isolation import Isolation
from rackloom.claim.domain.membership import join, with_status
from rackloom.claim.domain.objects import Clique, Readiness, Ref, clique, clique_json, read_status
from rackloom.claim.kube.api import Conflict, NotFound
from rackloom.claim.kube.events import Recorder
from rackloom.claim.kube.kinds import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DAEMON_SET,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    SECRET,
)
from rackloom.twin import simloop
from rackloom.twin.kube import DirectApi, FakeKube, Fault
from rackloom.twin.kube.times import loop_time

NAMESPACE = "rackloom-system"


class DaemonSide:
    """What DaemonSet controller, kubelet and IMEX daemon do, looked at twice a second of virtual time."""

    def __init__(self, kube, clique_id):
        self.api = DirectApi(kube, "nodes")
        self.clique_id = clique_id

    async def run(self):
        while True:
            with suppress(Conflict, NotFound):
                await self.look()
            await asyncio.sleep(0.5)

    async def look(self):
        nodes = (await self.api.list(NODE)).items
        pods = {
            (one["metadata"]["labels"][names.COMPUTE_DOMAIN_LABEL], one["spec"]["nodeName"]): one
            for one in (await self.api.list(POD, NAMESPACE)).items
        }
        wanted = set()
        for daemons in (await self.api.list(DAEMON_SET, NAMESPACE)).items:
            if "deletionTimestamp" not in daemons["metadata"]:
                wanted |= {(uid_of(daemons), node) for node in self.chosen(daemons, nodes)}
        for key in sorted(wanted - set(pods)):
            await self.start(*key)
        for key in sorted(set(pods) - wanted):
            await self.api.delete(POD, pods[key]["metadata"]["name"], NAMESPACE, grace_seconds=0)

    def chosen(self, daemons, nodes):
        spec = daemons["spec"]["template"]["spec"]
        selector = spec["nodeSelector"].items()
        for node in nodes:
            labels = node["metadata"].get("labels") or {}
            free = "affinity" not in spec or names.COMPUTE_DOMAIN_LABEL not in labels
            if selector <= labels.items() and free:
                yield node["metadata"]["name"]

    async def start(self, uid, node):
        address = f"10.0.{len(uid)}.{node.removeprefix('n')}"
        pod = await self.api.create(
            POD,
            {
                "metadata": {
                    "name": f"daemon-{uid}-{node}",
                    "namespace": NAMESPACE,
                    "labels": {names.COMPUTE_DOMAIN_LABEL: uid, names.CLIQUE_ID_LABEL: self.clique_id},
                },
                "spec": {"nodeName": node, "containers": [{"name": "daemon", "image": "daemon"}]},
            },
        )
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "podIP": address, "conditions": conditions}
        await self.api.patch(
            POD, pod["metadata"]["name"], NAMESPACE, {"status": status}, subresource="status"
        )
        await self.enter(uid, node, address, Ref(pod["metadata"]["name"], pod["metadata"]["uid"]))

    async def enter(self, uid, node, address, pod):
        value = Clique(compute_domain=uid, clique_id=self.clique_id)
        for _ in range(20):
            try:
                read = await self.api.get(COMPUTE_DOMAIN_CLIQUE, value.name, NAMESPACE)
            except NotFound:
                read = None
            members = clique(read) if read else value
            members = join(members, node=node, ip_address=address, pod=pod, max_nodes=18)
            members = with_status(members, node=node, status=Readiness.READY)
            obj = clique_json(members, NAMESPACE, read)
            with suppress(Conflict):
                await (
                    self.api.create(COMPUTE_DOMAIN_CLIQUE, obj)
                    if read is None
                    else self.api.replace(COMPUTE_DOMAIN_CLIQUE, obj)
                )
                return


def uid_of(obj):
    return obj["metadata"]["labels"][names.COMPUTE_DOMAIN_LABEL]


class Site:
    """A fake cluster, its nodes, and a controller that can be killed."""

    def __init__(self, settings, clique_id, nodes, seed=1):
        self.kube = FakeKube(namespaces=("default", "team", NAMESPACE), seed=seed)
        self.kube.faults.delay(0.005)
        self.user = DirectApi(self.kube, "user")
        self.settings = settings
        self.clique_id = clique_id
        self.nodes = [f"n{number}" for number in range(nodes)]
        self.rng = random.Random(seed)
        self.controller = None
        self.tasks = []

    async def begin(self):
        for name in self.nodes:
            labels = {names.GPU_CLIQUE_LABEL: self.clique_id}
            await self.user.create(NODE, {"metadata": {"name": name, "labels": labels}})
        self.tasks.append(asyncio.create_task(DaemonSide(self.kube, self.clique_id).run()))
        self.start()

    def start(self):
        api = DirectApi(self.kube, "controller")
        recorder = Recorder(api, "rackloom-controller", "test", loop_time)
        self.controller = Controller(api, self.settings, recorder, loop_time, self.rng)
        self.tasks.append(asyncio.create_task(self.controller.run()))

    async def kill(self):
        task = self.tasks.pop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def end(self):
        for task in self.tasks:
            assert not task.done(), task
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def domain(self, name):
        spec = {"channel": {"resourceClaimTemplate": {"name": f"channel-{name}"}}}
        return await self.user.create(
            COMPUTE_DOMAIN, {"metadata": {"name": name, "namespace": "team"}, "spec": spec}
        )

    async def prepare(self, domain, node):
        """As the node plugin does when a channel claim arrives."""
        labels = {names.COMPUTE_DOMAIN_LABEL: domain["metadata"]["uid"]}
        await self.user.patch(NODE, node, None, {"metadata": {"labels": labels}})

    async def status(self, name):
        return read_status(await self.user.get(COMPUTE_DOMAIN, name, "team"))

    async def until(self, holds, seconds=120):
        for _ in range(seconds * 2):
            if await holds():
                return
            await asyncio.sleep(0.5)
        raise AssertionError("did not come true")

    async def count(self, kind):
        return len((await self.user.list(kind)).items)


@pytest.fixture
def site(settings, make):
    def build(nodes=4, seed=1, **changes):
        return Site(msgspec.structs.replace(settings, **changes), make.clique, nodes, seed)

    return build


def test_a_domain_lives_and_ends(site):
    async def story():
        place = site()
        await place.begin()
        domain = await place.domain("job")
        await place.until(lambda: has_condition(place, "job", "NoNodes"))
        for node in place.nodes:
            await place.prepare(domain, node)
        await place.until(lambda: has_condition(place, "job", "AllNodesReady"))
        assert [one.index for one in (await place.status("job")).nodes] == [0, 1, 2, 3]
        writes = place.kube.writes("controller")
        await asyncio.sleep(100)
        assert place.kube.writes("controller") == writes, "a settled cluster costs nothing"
        assert writes <= 12, place.kube.calls
        await place.user.delete(COMPUTE_DOMAIN, "job", "team")
        await place.until(lambda: is_empty(place))
        await place.end()

    simloop.run(1, story)


async def has_condition(place, name, reason):
    return any(one.reason == reason for one in (await place.status(name)).conditions)


async def is_empty(place):
    kinds = (COMPUTE_DOMAIN, RESOURCE_CLAIM_TEMPLATE, DAEMON_SET, SECRET, COMPUTE_DOMAIN_CLIQUE)
    left = [await place.count(kind) for kind in kinds]
    nodes = (await place.user.list(NODE, labels=names.COMPUTE_DOMAIN_LABEL)).items
    return not any(left) and not nodes


@pytest.mark.parametrize("seed", range(4))
def test_many_domains_under_faults_and_deaths(site, seed):
    """Controllers die, calls fail and lose their answers; then all is right, and all goes."""

    async def story():
        place = site(nodes=24, seed=seed)
        await place.begin()
        rng = random.Random(seed)
        place.kube.faults.add(Fault(rate=0.05, user="controller", code=503))
        place.kube.faults.add(Fault(rate=0.05, user="controller", lost="reply"))
        place.kube.faults.add(Fault(rate=0.05, user="controller", code=409, reason="Conflict"))
        jobs = {}
        for number in range(12):
            jobs[f"job-{number}"] = await place.domain(f"job-{number}")
            for node in place.nodes[2 * number : 2 * number + 2]:
                await place.prepare(jobs[f"job-{number}"], node)
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            if rng.random() < 0.4:
                await place.kill()
                place.start()
        for name in jobs:
            await place.until(lambda name=name: has_condition(place, name, "AllNodesReady"), 600)
        for name in jobs:
            await place.user.delete(COMPUTE_DOMAIN, name, "team")
            if rng.random() < 0.3:
                await place.kill()
                place.start()
        await place.until(lambda: is_empty(place), 1200)
        await place.end()

    simloop.run(seed, story)


def test_what_was_left_while_no_controller_ran_is_swept(site):
    async def story():
        place = site()
        await place.begin()
        domain = await place.domain("job")
        await place.prepare(domain, "n0")
        await place.until(lambda: has_condition(place, "job", "AllNodesReady"))
        await place.kill()
        # As when somebody takes the finalizer off: the domain is gone, its things are not.
        await place.user.patch(COMPUTE_DOMAIN, "job", "team", {"metadata": {"finalizers": None}})
        await place.user.delete(COMPUTE_DOMAIN, "job", "team")
        assert await place.count(DAEMON_SET) == 1
        place.start()
        await place.until(lambda: is_empty(place))
        await place.end()

    simloop.run(3, story)


@pytest.mark.parametrize(("domains", "width"), [(4, 4), (4, 18), (8, 18)])
def test_writes_grow_with_domains_and_not_with_pods(site, domains, width, record_property):
    async def story():
        place = site(nodes=domains * width)
        await place.begin()
        jobs = [await place.domain(f"job-{number}") for number in range(domains)]
        for number, made in enumerate(jobs):
            for node in place.nodes[number * width : (number + 1) * width]:
                await place.prepare(made, node)
        for number in range(domains):
            await place.until(lambda number=number: has_condition(place, f"job-{number}", "AllNodesReady"))
        calls = place.kube.calls
        writes = place.kube.writes("controller")
        lists = sum(n for call, n in calls.items() if call.user == "controller" and call.verb == "list")
        record_property("writes", f"{domains} domains of {width} nodes: {writes} writes, {lists} lists")
        # A finalizer, three objects and two Secrets; then a status and an event per change worth telling.
        assert writes <= 16 * domains, calls
        assert lists <= len(place.controller.caches.informers), "one list per kind, none per pod"
        await place.end()

    simloop.run(1, story)


class Scheduler:
    """Gives each shared claim a free channel of an offered pool, as kube-scheduler does, and checks S8."""

    def __init__(self, kube):
        self.api = DirectApi(kube, "scheduler")
        self.given = 0
        self.ended = set()
        """Claims whose pods have ended: nobody asks for them any more."""

    async def run(self):
        while True:
            with suppress(Conflict, NotFound):
                await self.look()
            await asyncio.sleep(0.2)

    async def look(self):
        claims = (await self.api.list(RESOURCE_CLAIM)).items
        taken = [device_of(one) for one in claims if device_of(one)]
        assert len(taken) == len(set(taken)), "two jobs share a channel"
        offered = (await self.api.list(NODE, labels=names.CHANNELS_READY_LABEL)).items
        for published in (await self.api.list(RESOURCE_SLICE)).items if offered else ():
            pool = published["spec"]["pool"]["name"]
            free = ((pool, one["name"]) for one in published["spec"]["devices"])
            left = iter([one for one in free if one not in set(taken)])
            for claim in claims:
                if device_of(claim) is None and claim["metadata"]["name"] not in self.ended:
                    await self.allocate(claim, next(left))

    async def allocate(self, claim, device):
        pool, name = device
        result = {"driver": names.IMEX_DRIVER, "pool": pool, "device": name, "request": "channel"}
        status = {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": "worker", "uid": "worker"}],
        }
        meta = {"resourceVersion": claim["metadata"]["resourceVersion"]}
        patch = {"metadata": meta, "status": status}
        place = claim["metadata"]["name"], claim["metadata"]["namespace"]
        await self.api.patch(RESOURCE_CLAIM, *place, patch, subresource="status")
        self.given += 1


def device_of(claim):
    results = (claim.get("status") or {}).get("allocation", {}).get("devices", {}).get("results", ())
    return (results[0]["pool"], results[0]["device"]) if results else None


@pytest.mark.parametrize("seed", range(2))
def test_isolated_jobs_come_and_go_under_faults_and_deaths(site, seed):
    async def story():
        place = site(nodes=6, seed=seed, isolation=Isolation.CHANNEL)
        await place.begin()
        scheduler = Scheduler(place.kube)
        # Before the controller's, which is the last and the one that is killed.
        place.tasks.insert(0, asyncio.create_task(scheduler.run()))
        place.kube.faults.add(Fault(rate=0.05, user="controller", code=503))
        place.kube.faults.add(Fault(rate=0.05, user="controller", lost="reply"))
        rng = random.Random(seed)
        await asyncio.gather(*(isolated_job(place, scheduler, number, rng) for number in range(20)))
        assert scheduler.given >= 20
        assert not (await place.user.list(RESOURCE_CLAIM)).items
        for node in place.nodes:
            await place.user.patch(
                NODE, node, None, {"metadata": {"labels": {names.ISOLATION_LABEL: "domain"}}}
            )
        await place.until(lambda: is_empty(place), 1200)
        marks = (names.WARM_CLIQUE_LABEL, names.CHANNELS_READY_LABEL)
        assert not any([(await place.user.list(NODE, labels=label)).items for label in marks])
        await place.end()

    simloop.run(seed, story)


async def isolated_job(place, scheduler, number, rng):
    await asyncio.sleep(rng.uniform(0.0, 30.0))
    made = await place.domain(f"job-{number}")
    claim = names.shared_claim_name(made["metadata"]["uid"])
    await place.until(lambda: has_device(place, claim), 600)
    if rng.random() < 0.3:
        await place.kill()
        place.start()
    await place.until(lambda: has_condition(place, f"job-{number}", "AllNodesReady"), 600)
    await place.user.delete(COMPUTE_DOMAIN, f"job-{number}", "team")
    await asyncio.sleep(rng.uniform(0.0, 5.0))
    assert await has_device(place, claim), "a running job keeps its channel, though its domain is deleted"
    scheduler.ended.add(claim)
    await place.user.patch(RESOURCE_CLAIM, claim, "team", {"status": None}, subresource="status")
    await place.until(lambda: is_gone(place, f"job-{number}"), 600)


async def has_device(place, claim):
    try:
        return device_of(await place.user.get(RESOURCE_CLAIM, claim, "team")) is not None
    except NotFound:
        return False


async def is_gone(place, name):
    try:
        await place.user.get(COMPUTE_DOMAIN, name, "team")
    except NotFound:
        return True
    return False
