"""Channel mode on a fake cluster: jobs come and go, controllers die, and no two jobs share a channel."""

import asyncio
import random
from contextlib import suppress

import pytest
from tests.claim.cluster.fake_site import has_condition, is_empty

from rackloom.claim.kube.api import Conflict, NotFound
from rackloom.core.cluster import names
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, NODE, RESOURCE_CLAIM, RESOURCE_SLICE
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.virtual import event_loop


class Scheduler:
    """Gives each shared claim a free channel of an offered pool, as kube-scheduler does, and checks S8."""

    def __init__(self, kube):
        self.api = DirectApi(kube, "scheduler")
        self.given = 0
        self.ended = set()
        """Claims whose pods have ended, which get no more requests."""

    async def run(self):
        while True:
            with suppress(Conflict, NotFound):
                await self.look()
            await asyncio.sleep(0.2)

    async def look(self):
        claims = (await self.api.list(RESOURCE_CLAIM)).items
        taken = [device_of(claim) for claim in claims if device_of(claim)]
        assert len(taken) == len(set(taken)), "two jobs share a channel"
        offered = (await self.api.list(NODE, labels=names.CHANNELS_READY_LABEL)).items
        for published in (await self.api.list(RESOURCE_SLICE)).items if offered else ():
            pool = published["spec"]["pool"]["name"]
            free = ((pool, device["name"]) for device in published["spec"]["devices"])
            left = iter([device for device in free if device not in set(taken)])
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_isolated_jobs_come_and_go_under_faults_and_deaths(site, seed):
    async def story():
        place = site(nodes=6, seed=seed, isolation=ImexIsolation.CHANNEL)
        await place.begin()
        scheduler = Scheduler(place.kube)
        # Before the controller's, which is the last and the one that is killed.
        place.tasks.insert(0, asyncio.create_task(scheduler.run()))
        place.kube.faults.add(RequestFault(rate=0.05, user="controller", code=503))
        place.kube.faults.add(RequestFault(rate=0.05, user="controller", lost="reply"))
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

    event_loop.run_simulation(seed, story)


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
