"""The controller against an API server under virtual time: many ComputeDomains, faults, deaths."""

import asyncio
import random

import msgspec
import pytest
from tests.claim.cluster.fake_site import has_condition, is_empty

from rackloom.core.cluster import names
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, DAEMON_SET, RESOURCE_CLAIM_TEMPLATE, SECRET
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.virtual import event_loop


def test_a_domain_lives_and_ends(site):
    async def story():
        place = site()
        await place.begin()
        domain = await place.domain("job")
        await place.until(lambda: has_condition(place, "job", "NoNodes"))
        for node in place.nodes:
            await place.prepare(domain, node)
        await place.until(lambda: has_condition(place, "job", "AllNodesReady"))
        assert [node.index for node in (await place.status("job")).nodes] == [0, 1, 2, 3]
        writes = place.kube.writes("controller")
        await asyncio.sleep(100)
        assert place.kube.writes("controller") == writes, "a settled cluster costs nothing"
        assert writes <= 12, place.kube.calls
        await place.user.delete(COMPUTE_DOMAIN, "job", "team")
        await place.until(lambda: is_empty(place))
        await place.end()

    event_loop.run_simulation(1, story)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_domains_under_faults_and_deaths(site, seed):
    """Controllers die, calls fail and lose their answers. Afterwards all is right, and all goes."""

    async def story():
        place = site(nodes=24, seed=seed)
        await place.begin()
        rng = random.Random(seed)
        place.kube.faults.add(RequestFault(rate=0.05, user="controller", code=503))
        place.kube.faults.add(RequestFault(rate=0.05, user="controller", lost="reply"))
        place.kube.faults.add(RequestFault(rate=0.05, user="controller", code=409, reason="Conflict"))
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

    event_loop.run_simulation(seed, story)


def test_a_lost_node_is_let_go_when_the_pods_that_it_had_are_elsewhere(site):
    """The only evidence is that a claim is gone."""

    async def story():
        place = site()
        await place.begin()
        domain = await place.domain("job")
        for node in place.nodes[:3]:
            await place.use(domain, node)
            await place.prepare(domain, node)
        await place.until(lambda: has_condition(place, "job", "AllNodesReady"))
        await place.fall_silent("n2")
        await place.until(lambda: has_condition(place, "job", "NodesNotReady"))
        await asyncio.sleep(400)
        assert await has_condition(place, "job", "NodesNotReady"), "its containers may still run"
        await place.release("n2")
        await place.until(lambda: has_condition(place, "job", "AllNodesReady"), 10)
        assert [node.name for node in (await place.status("job")).nodes] == ["n0", "n1"]
        assert len(await place.events("NodeLeft")) == 1
        await place.use(domain, "n3")
        await place.prepare(domain, "n3")
        await place.until(lambda: is_member(place, "n3", 2), 10)
        writes = place.kube.writes("controller")
        await asyncio.sleep(700)
        assert place.kube.writes("controller") == writes
        await place.end()

    event_loop.run_simulation(1, story)


def test_a_node_that_falls_silent_after_its_pods_ended_is_let_go_when_it_is_lost(site):
    """No event reports that: the controller reads again unprompted."""

    async def story():
        place = site()
        await place.begin()
        domain = await place.domain("job")
        for node in place.nodes[:2]:
            await place.prepare(domain, node)
        await place.use(domain, "n0")
        await place.until(lambda: has_condition(place, "job", "AllNodesReady"))
        await place.fall_silent("n1")
        await asyncio.sleep(290)
        assert await has_condition(place, "job", "NodesNotReady")
        await place.until(lambda: has_condition(place, "job", "AllNodesReady"), 20)
        await place.end()

    event_loop.run_simulation(1, story)


async def is_member(place, node, index):
    return any((known.name, known.index) == (node, index) for known in (await place.status("job")).nodes)


def test_what_was_left_while_no_controller_ran_is_swept(site):
    async def story():
        place = site()
        await place.begin()
        domain = await place.domain("job")
        await place.prepare(domain, "n0")
        await place.until(lambda: has_condition(place, "job", "AllNodesReady"))
        await place.kill()
        # A user removes the finalizer: the domain is gone, its objects are not.
        await place.user.patch(COMPUTE_DOMAIN, "job", "team", {"metadata": {"finalizers": None}})
        await place.user.delete(COMPUTE_DOMAIN, "job", "team")
        assert await place.count(DAEMON_SET) == 1
        place.start()
        await place.until(lambda: is_empty(place))
        await place.end()

    event_loop.run_simulation(3, story)


@pytest.mark.slow
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
        # A finalizer, four objects and two Secrets. Then a status and an event per change worth reporting.
        assert writes <= 16 * domains, calls
        assert lists <= len(place.controller.caches.informers), "one list per kind, none per pod"
        await place.end()

    event_loop.run_simulation(1, story)


def test_a_secret_that_a_stopped_controller_made_too_late_goes(site):
    """It went on after its ComputeDomain was gone, and sent the request that it was about to send."""

    async def story():
        place = site()
        await place.begin()
        domain = await place.domain("job")
        await place.prepare(domain, place.nodes[0])
        await place.until(lambda: has_condition(place, "job", "AllNodesReady"))
        name = names.imex_authority_name(domain["metadata"]["uid"])
        late = place.kube.store.read(SECRET, (DEFAULT_DAEMON_NAMESPACE, name))
        await place.user.delete(COMPUTE_DOMAIN, "job", "team")
        await place.until(lambda: is_empty(place))
        kept = {key: late["metadata"][key] for key in ("name", "namespace", "labels", "finalizers")}
        await place.user.create(SECRET, {**late, "metadata": kept})
        assert not await is_empty(place)
        await place.until(lambda: is_empty(place), 1300)
        await place.end()

    event_loop.run_simulation(1, story)


@pytest.mark.parametrize("by_force", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_something_always_leads_to_the_certificates(site, seed, by_force):
    """No role lists Secrets: those of a ComputeDomain that went without a trace would stay for ever."""

    async def story():
        place = site(seed=seed)
        lonely = []

        async def watch():
            while True:
                domains = (await place.user.list(COMPUTE_DOMAIN)).items
                found = {
                    domain["metadata"]["uid"]
                    for domain in domains
                    if names.FINALIZER in domain["metadata"].get("finalizers", ())
                }
                for item in (await place.user.list(DAEMON_SET)).items:
                    found.add(item["metadata"]["labels"][names.COMPUTE_DOMAIN_LABEL])
                secrets = (await place.user.list(SECRET)).items
                lonely.extend(
                    secret["metadata"]["name"]
                    for secret in secrets
                    if secret["metadata"]["labels"][names.COMPUTE_DOMAIN_LABEL] not in found
                )
                await asyncio.sleep(0.001)

        await place.begin()
        place.tasks.insert(0, asyncio.create_task(watch()))
        rng = random.Random(seed)
        for number in range(4):
            await place.domain(f"job-{number}")
            await asyncio.sleep(rng.uniform(0.0, 0.1))
            await place.kill()
            if by_force:
                await place.user.patch(
                    COMPUTE_DOMAIN, f"job-{number}", "team", {"metadata": {"finalizers": None}}
                )
            await place.user.delete(COMPUTE_DOMAIN, f"job-{number}", "team")
            for _ in range(4):
                place.start()
                await asyncio.sleep(rng.uniform(0.02, 0.1))
                await place.kill()
            place.start()
        await place.until(lambda: is_empty(place))
        assert not lonely
        await place.end()

    event_loop.run_simulation(seed, story)


def test_daemons_of_an_earlier_namespace_stay_there_until_their_domain_is_deleted(site):
    """Also their certificates, which are renewed: a daemon sees the Secrets of its namespace only."""

    async def story():
        place = site(daemon_namespace="default")
        await place.begin()
        old = await place.domain("old")
        await place.until(lambda: has_condition(place, "old", "NoNodes"))
        await place.kill()
        place.settings = msgspec.structs.replace(
            place.settings, daemon_namespace="rackloom-imex", additional_namespaces=("default",)
        )
        secret = names.imex_secret_name(old["metadata"]["uid"])
        spoiled = {"data": {"tls.crt": "bm9uZQ=="}}
        await place.user.patch(SECRET, secret, "default", spoiled)
        place.start()
        await place.domain("new")
        await place.until(lambda: has_condition(place, "new", "NoNodes"))
        await asyncio.sleep(2)
        for kind, each in ((DAEMON_SET, 1), (SECRET, 2)):
            where = sorted(item["metadata"]["namespace"] for item in (await place.user.list(kind)).items)
            assert where == ["default"] * each + ["rackloom-imex"] * each
        templates = (await place.user.list(RESOURCE_CLAIM_TEMPLATE)).items
        where = {(template["metadata"]["namespace"], template["metadata"]["name"]) for template in templates}
        assert ("default", names.daemon_name(old["metadata"]["uid"])) in where
        assert ("rackloom-imex", names.daemon_name(old["metadata"]["uid"])) not in where
        assert (await place.user.get(SECRET, secret, "default"))["data"]["tls.crt"] != "bm9uZQ=="
        for name in ("old", "new"):
            await place.user.delete(COMPUTE_DOMAIN, name, "team")
        await place.until(lambda: is_empty(place))
        await place.end()

    event_loop.run_simulation(1, story)
