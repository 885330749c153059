"""An MPIJob that is over: its trays are released, also if its status is late and the controller dies."""

import asyncio
from contextlib import suppress

import pytest
from tests.claim.cluster.gangs.gang_site import TEAM, GangSite, Job, run
from tests.claim.cluster.gangs.gang_stories import holds, over, until_dead_and_again

from rackloom.claim.kube.api import Conflict
from rackloom.core.cluster.gang_objects import GROUP_LABEL
from rackloom.core.cluster.gang_owners import MPI_JOB
from rackloom.core.cluster.objects import JOB, POD
from rackloom.core.cluster.pods import GANG_LABEL
from rackloom.lab.kube.objects import TypeSchema

SIZES = {"launcher": 1, "worker": 3}
WORKERS = [f"big-worker-{number}" for number in range(3)]


class MpiJob(Job):
    """Launcher and workers as the operator makes them, with new workers until the job is over."""

    launcher = None

    async def run(self):
        def role(group):
            labels = {GANG_LABEL: self.name, GROUP_LABEL: group}
            return {"replicas": self.sizes[group], "template": {"metadata": {"labels": labels}}}

        roles = {"Launcher": role("launcher"), "Worker": role("worker")}
        meta = {"name": self.name, "namespace": TEAM}
        made = await self.site.user.create(MPI_JOB, {"metadata": meta, "spec": {"mpiReplicaSpecs": roles}})
        self.uid = made["metadata"]["uid"]
        meta |= {"name": f"{self.name}-launcher", "ownerReferences": [self.owner]}
        self.launcher = (await self.site.user.create(JOB, {"metadata": meta, "spec": {"completions": 1}}))[
            "metadata"
        ]["uid"]
        await self.site.user.create(POD, self.pod("launcher", 0))
        while self.is_wanted:
            for number in range(self.sizes["worker"]):
                with suppress(Conflict):
                    await self.site.user.create(POD, self.pod("worker", number))
            await asyncio.sleep(1.0)

    @property
    def owner(self):
        kind = {"apiVersion": MPI_JOB.api_version, "kind": MPI_JOB.kind}
        return kind | {"name": self.name, "uid": self.uid, "controller": True}

    def pod(self, group, number):
        made = super().pod(group, number)
        job = {"apiVersion": "batch/v1", "kind": "Job", "name": f"{self.name}-launcher", "uid": self.launcher}
        made["metadata"]["ownerReferences"] = [
            self.owner if group == "worker" else job | {"controller": True}
        ]
        made["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": str(self.gpus)}
        return made

    async def is_over(self):
        """The status that the operator writes, some time after the launcher has ended."""
        self.is_wanted = False
        done = {"type": "Succeeded", "status": "True"}
        status = {"conditions": [done], "completionTime": "2026-01-01T00:00:00Z"}
        await self.site.user.patch(MPI_JOB, self.name, TEAM, {"status": status}, subresource="status")


async def running(last=None):
    """All of the job runs, each pod on a separate tray."""
    site = GangSite(racks=1, trays=4, seed=last or 1)
    site.kube.serve(MPI_JOB, TypeSchema(status=True))
    await site.begin()
    site.start()
    job = MpiJob(site, "big", SIZES)
    site.tasks.append(asyncio.create_task(job.run()))
    await site.until(lambda: site.says("big", "Bound", "AllBound"))
    return site, job, await site.places("big")


async def delete(site, pod):
    await site.user.delete(POD, pod, TEAM, grace_seconds=0)


def test_a_job_that_says_late_that_it_is_over_is_heard():
    async def story():
        site, job, places = await running()
        await job.succeed("big-launcher-0")
        await asyncio.sleep(30)
        assert set(await site.taints()) == set(places.values()), "it may still try its launcher again"
        await job.is_over()
        await site.until(holds(site, {places[worker] for worker in WORKERS}))
        await over(site, job)

    run(story)


def test_workers_that_the_job_deletes_one_by_one_leave_their_trays_one_by_one():
    async def story():
        site, job, places = await running()
        await job.succeed("big-launcher-0")
        await job.is_over()
        for number, worker in enumerate(WORKERS[:-1]):
            await delete(site, worker)
            await site.until(holds(site, {places[worker] for worker in WORKERS[number + 1 :]}))
        await over(site, job)

    run(story)


def test_a_worker_that_is_made_anew_finds_its_tray_while_another_gang_waits_for_one():
    async def story():
        site, job, places = await running()
        other = site.job("other", {"worker": 1})
        await site.until(lambda: site.says("other", "Placed", "DoesNotFit"))
        await delete(site, WORKERS[1])
        await site.until(lambda: site.is_bound("big", 4))
        assert await site.places("big") == places
        assert await site.places("other") == {"other-worker-0": None}
        await job.succeed("big-launcher-0")
        await job.is_over()
        await site.until(lambda: site.is_bound("other", 1))
        assert await site.places("other") == {"other-worker-0": places["big-launcher-0"]}
        await over(site, job, other)

    run(story)


@pytest.mark.slow
@pytest.mark.parametrize("last", range(1, 7))
def test_death_after_a_write_while_the_trays_of_a_job_that_is_over_are_given_back(last):
    async def story():
        site, job, places = await running(last)
        await site.kill()
        await job.succeed("big-launcher-0")
        await job.is_over()
        await delete(site, WORKERS[0])
        await until_dead_and_again(site, last)
        await site.until(holds(site, {places[worker] for worker in WORKERS[1:]}))
        found = await site.places("big")
        assert [found[worker] for worker in WORKERS[1:]] == [places[worker] for worker in WORKERS[1:]]
        await over(site, job)

    run(story, last)
