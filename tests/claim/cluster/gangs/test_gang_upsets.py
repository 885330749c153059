"""People and machines disturb a gang on its way: no tray is given to two, and nothing is left behind."""

import asyncio

import pytest
from tests.claim.cluster.gangs.gang_site import TEAM, planned, rack_of, run
from tests.claim.cluster.gangs.gang_stories import at_work, bound_job, opened, over

from rackloom.claim.kube.api import Rejected
from rackloom.core.cluster.gang_objects import GANG_GATE, GANG_TAINT
from rackloom.core.cluster.objects import EVENT, GANG_PLAN, NODE, POD, metav1_time
from rackloom.lab.virtual.event_loop import loop_wall_time


def gpu_pod(name, node, **labels):
    resources = {"limits": {"nvidia.com/gpu": "4"}}
    spec = {"containers": [{"name": "main", "resources": resources}], "nodeName": node}
    return {"metadata": {"name": name, "namespace": TEAM, "labels": labels}, "spec": spec}


@pytest.mark.parametrize("labels", [{}, {GANG_TAINT: "big"}], ids=["plain", "labelled without a size"])
def test_a_pod_that_is_only_named_like_a_gang_keeps_its_tray(labels):
    async def story():
        site = await opened(racks=1, trays=4)
        await site.user.create(POD, gpu_pod("big", "r0-t1", **labels))
        site.start()
        site.job("big", {"worker": 4})
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        assert not await site.taints()
        await site.user.delete(POD, "big", TEAM, grace_seconds=0)
        await site.until(lambda: site.is_bound("big", 4))
        await site.end()

    run(story)


def test_a_namespace_that_is_deleted_under_a_gang_leaves_no_taint():
    async def story():
        site = await at_work(racks=1, trays=4)
        job = await bound_job(site, "big", {"worker": 4})

        async def terminating(review):
            """Refuse new objects, also events, as the API server does in a namespace that ends."""
            if review.operation == "CREATE" and review.kind in (POD, GANG_PLAN, EVENT):
                raise Rejected(403, "Forbidden", "namespace team is being terminated")

        site.kube.admission.append(terminating)
        job.is_wanted = False
        await asyncio.sleep(2)
        await site.user.delete(GANG_PLAN, "big", TEAM)
        for pod in await site.pods("big"):
            assert len(await site.taints()) == 4, "while a pod is left, the trays are the gang's"
            await site.user.delete(POD, pod["metadata"]["name"], TEAM, grace_seconds=0)
            await asyncio.sleep(3)
        await over(site)

    run(story)


@pytest.mark.parametrize("moment", ["planned", "reserved"])
def test_a_tray_that_is_cordoned_on_the_way_is_not_waited_for(moment):
    async def story():
        site = await at_work(racks=2, trays=4)
        job = site.job("big", {"worker": 4})
        plan = await planned(site, "big")
        if moment == "reserved":
            await site.until(lambda: site.says("big", "Reserved", "Reserved"))
        await site.cordon(plan.trays[0])
        await site.until(lambda: site.is_bound("big", 4))
        nodes = set((await site.places("big")).values())
        assert {rack_of(node) for node in nodes} == {"r0", "r1"} - {rack_of(plan.trays[0])}
        assert set(await site.taints()) == nodes
        await over(site, job)

    run(story)


def test_a_pod_that_is_made_anew_while_its_node_is_gone_keeps_its_gate():
    """If it were let go, it could only be deleted again, to go elsewhere."""

    async def story():
        site = await at_work(racks=1, trays=4)
        job = await bound_job(site, "big", {"worker": 4})
        lost = (await site.places("big"))["big-worker-1"]
        await site.user.delete(NODE, lost)
        await site.user.delete(POD, "big-worker-1", TEAM, grace_seconds=0)
        await asyncio.sleep(30)
        assert len(await site.ungated("big")) == 3
        assert await site.says("big", "Bound", "TrayLost")
        await site.power_on(lost)
        await site.until(lambda: site.is_bound("big", 4))
        assert (await site.places("big"))["big-worker-1"] == lost
        await over(site, job)

    run(story)


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_a_leader_whose_clock_is_an_hour_off_does_not_hold_up_the_gang(ahead):
    """The leader before it recorded by its clock when the trays were reserved."""

    async def story():
        site = await at_work(racks=1, trays=4)
        job = site.job("big", {"worker": 4})
        await site.until(lambda: site.says("big", "Reserved", "Reserved"))
        await site.kill()
        assert not await site.ungated("big")
        found = (await site.user.get(GANG_PLAN, "big", TEAM))["status"]
        for condition in found["conditions"]:
            condition["lastTransitionTime"] = metav1_time(max(loop_wall_time() + ahead, 0))
        await site.user.patch(GANG_PLAN, "big", TEAM, {"status": found}, subresource="status")
        site.start()
        await site.until(lambda: site.is_bound("big", 4), seconds=60)
        await over(site, job)

    run(story)


def test_a_job_that_grew_while_it_waited_is_placed_at_the_size_it_says_and_the_rest_is_told():
    async def story():
        site = await opened(racks=1, trays=6)
        await site.user.create(POD, gpu_pod("other", "r0-t0"))
        await site.user.create(POD, gpu_pod("another", "r0-t1"))
        await site.user.create(POD, gpu_pod("third", "r0-t2"))
        site.start()
        job = site.job("big", {"worker": 4})
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        await site.user.create(POD, job.pod("worker", 4))
        await site.user.delete(POD, "third", TEAM, grace_seconds=0)
        await site.until(lambda: site.has_ungated("big", 4))

        async def reports_bound():
            bound = (await site.record("big")).status.condition("Bound")
            return bound.status == "True" and "big-worker-4" in bound.message

        await site.until(reports_bound)
        await over(site, job)

    run(story)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("change", [{"gang": None}, {"plan": {"seats": []}}, {"plan": {"price": [{}]}}])
def test_a_record_out_of_which_somebody_took_a_part_moves_no_pod_that_runs(change, lost):
    async def story():
        site = await at_work(racks=2, trays=4)
        job = await bound_job(site, "big", {"worker": 4})
        before = await site.places("big")
        await site.user.patch(GANG_PLAN, "big", TEAM, {"spec": change})
        if lost:
            await site.user.delete(NODE, before["big-worker-0"])
        await asyncio.sleep(120)
        assert not [pod for pod in await site.pods("big") if "deletionTimestamp" in pod["metadata"]]
        after = await site.places("big")
        assert [after[f"big-worker-{number}"] for number in (1, 2, 3)] == [
            before[f"big-worker-{number}"] for number in (1, 2, 3)
        ]
        assert await site.says("big", "Placed", "NotHeld")
        await over(site, job)

    run(story)


def test_two_gangs_of_one_name_in_two_namespaces_share_nothing():
    async def story():
        site = await at_work(racks=2, trays=4)
        mine = await bound_job(site, "big", {"worker": 4})
        theirs = [mine.pod("worker", number) for number in range(4)]
        for pod in theirs:
            pod["metadata"] |= {"namespace": "kube-system", "ownerReferences": []}
            await site.user.create(
                POD, pod | {"spec": {**pod["spec"], "schedulingGates": [{"name": GANG_GATE}]}}
            )

        async def bound():
            pods = (await site.user.list(POD, "kube-system")).items
            return all(pod["spec"].get("nodeName") for pod in pods)

        await site.until(bound)
        held = await site.taints()
        assert len(held) == 8
        assert len(set(held.values())) == 2
        await mine.end()

        async def one_is_left():
            return len(await site.taints()) == 4

        await site.until(one_is_left)
        assert await bound()
        await site.end()

    run(story)
