"""The number of a gang's pods still to come, according to their Jobs, and when the Jobs are read."""

import asyncio
from contextlib import suppress

import pytest
from msgspec.structs import replace
from tests.claim.cluster.gangs.gang_site import TEAM, GangSite, Job, run
from tests.claim.cluster.gangs.gang_stories import bound_job, over, until_dead_and_again, watch_bindings

from rackloom.claim.kube.api import NotFound
from rackloom.core.cluster.gang_objects import GANG_GATE, GROUP_LABEL, GangKey, read_member
from rackloom.core.cluster.gang_owners import FinishedMPIJob, OwnerJob
from rackloom.core.cluster.objects import JOB, POD, Condition
from rackloom.core.cluster.pods import GANG_LABEL, SIZE_ANNOTATION
from rackloom.core.gangs.reconcile import reconcile_gang
from rackloom.core.gangs.slots import remaining_spec
from rackloom.core.gangs.snapshot import GangRecord, GangSettings, GangSnapshot, GangStatus, OwnerCheck

KEY = GangKey("team", "big")
T0, T1, T2 = (f"2001-01-01T00:00:0{second}Z" for second in range(3))


def pod(name, job, group, phase="Pending"):
    """It waits at its gate, or has ended."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": job, "controller": True}
    notes = {SIZE_ANNOTATION: "a=2,b=3"}
    meta = {"name": name, "uid": name, "namespace": "team", "annotations": notes, "ownerReferences": [owner]}
    meta |= {"labels": {GANG_LABEL: "big", GROUP_LABEL: group}}
    spec = {"schedulingGates": [{"name": GANG_GATE}]} if phase == "Pending" else {"nodeName": "t"}
    return read_member({"metadata": meta, "spec": spec, "status": {"phase": phase}})


def job(completions, **how):
    return OwnerJob(completions=completions, parallelism=completions, is_indexed=False, created=T0, **how)


def view_of(members, owners=None, **how):
    record = GangRecord(key=KEY, uid="u", resource_version="1", created=0.0, finalizers=())
    return GangSnapshot(key=KEY, now=1000.0, record=record, members=tuple(members), owners=owners, **how)


def sizes(members, **owners):
    return dict(remaining_spec(view_of(members, owners)).sizes)


WAITING = (pod("a", "one", "a"), pod("b", "two", "b"))


def test_of_several_jobs_each_says_how_many_it_still_makes():
    assert sizes(WAITING, one=job(2, succeeded=1), two=job(3, succeeded=2)) == {"a": 1, "b": 1}
    assert sizes(WAITING, one=job(2), two=job(3, succeeded=1)) == {"a": 2, "b": 2}
    done = pod("done", "one", "a", "Succeeded")
    assert sizes((*WAITING, done), one=job(2), two=job(3)) == {"a": 1, "b": 3}


def test_one_group_of_two_jobs_is_counted_together():
    pods = (*WAITING, pod("c", "three", "b"))
    assert sizes(pods, one=job(2), two=job(2, succeeded=1), three=job(1)) == {"a": 2, "b": 2}


def test_a_group_of_which_nobody_makes_all_pods_is_waited_for_whole():
    assert sizes(WAITING, one=job(1, succeeded=1), two=job(3, succeeded=2)) == {"a": 2, "b": 1}
    assert sizes(WAITING[1:], two=job(3, succeeded=2)) == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    "other", [None, FinishedMPIJob(uid="one"), job(2, is_ending=True), job(2, is_ending=True, succeeded=2)]
)
def test_the_whole_gang_is_waited_for_where_one_of_its_owners_does_not_say(other):
    owners = {"two": job(3, succeeded=2)} | ({} if other is None else {"one": other})
    assert sizes(WAITING, **owners) == {"a": 2, "b": 3}


def test_a_job_that_is_over_makes_none_unless_it_was_over_when_the_others_were_made():
    """It is then of an earlier run, and another one of its kind is still to come."""
    pods = (pod("done", "one", "a", "Succeeded"), WAITING[1])
    over, later = job(2, succeeded=2, is_ending=True, over_since=T1), job(3, succeeded=2)
    assert sizes(pods, one=over, two=later) == {"b": 1}
    for moment in (T1, T2):
        assert sizes(pods, one=over, two=replace(later, created=moment)) == {"a": 2, "b": 1}


def test_a_job_that_was_suspended_is_waited_for():
    paused = job(2, succeeded=1, is_suspended=True)
    assert sizes((*WAITING, pod("x", "one", "a", "Failed")), one=paused, two=job(3)) == {"a": 1, "b": 3}


def waited(seconds, members=WAITING, **how):
    """The decision about pods that have waited for others for `seconds`."""
    snapshot = view_of(members, **how)
    begun = Condition(
        type="Placed", status="False", reason="WaitingForMembers", message="", last_transition_time=T0
    )
    record = replace(snapshot.record, status=GangStatus(conditions=(begun,)))
    at = 978307200.0 + seconds
    return reconcile_gang(replace(snapshot, record=record, now=at), GangSettings(again=15.0))


def test_owners_are_asked_when_a_gang_has_waited_for_a_while_and_then_ever_less_often():
    assert not waited(14).needs_fresh_read
    assert waited(14).recheck_after == pytest.approx(1.1)
    assert waited(15).needs_fresh_read
    use, began = view_of(WAITING).tray_use, 978307200.0
    for asked, due in ((15, 30), (30, 45), (45, 75), (75, 135)):
        looked = OwnerCheck(use, began + 15, began + asked, are_fewer=False)
        assert not waited(due - 1, owner_check=looked).needs_fresh_read, asked
        assert waited(due, owner_check=looked).needs_fresh_read, asked
        assert "do not say that fewer" in waited(due - 1, owner_check=looked).status.conditions[0].message


def test_owners_that_said_that_fewer_come_are_asked_each_time():
    """The decision then depends on the status of the owners."""
    looked = OwnerCheck(view_of(()).tray_use, 978307200.0, 978307200.0, are_fewer=True)
    assert waited(1, owner_check=looked).needs_fresh_read


def test_a_job_whose_ended_pods_are_gone_goes_on_with_the_members_that_are_left():
    async def story():
        site = GangSite(racks=1, trays=4)
        await site.begin()
        site.start()
        job = await bound_job(site, "big", {"worker": 4}, completions=4)
        job.is_wanted = False
        for number in range(3):
            await job.succeed(f"big-worker-{number}")
        await job.fail("big-worker-3")
        await site.user.patch(JOB, "big", TEAM, {"status": {"succeeded": 3}}, subresource="status")
        await site.user.patch(JOB, "big", TEAM, {"spec": {"suspend": True}})
        await site.until(site.is_clean)
        await site.kill()
        for number in range(4):
            await site.user.delete(POD, f"big-worker-{number}", TEAM, grace_seconds=0)
        await site.user.patch(JOB, "big", TEAM, {"spec": {"suspend": False}})
        await job.again("big-worker-3")
        site.start()
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        assert len(await site.taints()) == 1
        await over(site, job)

    run(story)


def test_pods_that_nobody_else_joins_are_told_why_they_wait():
    async def story():
        site = GangSite(racks=1, trays=4)
        await site.begin()
        site.start()
        job = await bound_job(site, "big", {"worker": 4})
        job.is_wanted = False
        for number in range(4):
            await job.succeed(f"big-worker-{number}")
        await site.until(site.is_clean)
        await job.again("big-worker-3")

        async def reports_waiting():
            with suppress(NotFound):  # the plan of the first four is gone, the next may not be there yet
                placed = (await site.record("big")).status.condition("Placed")
                return placed and placed.message.endswith("their owners do not say that fewer are to come")

        await site.until(reports_waiting)
        assert not await site.taints()
        await over(site, job)

    run(story)


class Part(Job):
    """One Job of a gang of two: `a` makes the first pods, `b` the others."""

    def __init__(self, site, group, members):
        super().__init__(site, group, {group: members}, completions=members)
        site.tasks.append(asyncio.create_task(self.run()))

    def pod(self, group, number):
        made = super().pod(group, number)
        made["metadata"]["labels"][GANG_LABEL] = "big"
        made["metadata"]["annotations"] = {SIZE_ANNOTATION: "a=2,b=2"}
        return made

    async def goes_on(self, is_so):
        await self.site.user.patch(JOB, self.name, TEAM, {"spec": {"suspend": not is_so}})


async def two_jobs_but_one_pod_of_each(seed=1):
    """They were suspended when one pod of each had succeeded, and go on."""
    site = GangSite(racks=1, trays=4, seed=seed)
    await site.begin()
    site.start()
    parts = [Part(site, group, 2) for group in ("a", "b")]
    await site.until(lambda: site.says("big", "Bound", "AllBound"))
    for part in parts:
        part.is_wanted = False
        await part.succeed(f"{part.name}-{part.name}-0")
        await part.goes_on(False)
        await part.fail(f"{part.name}-{part.name}-1")
    await site.until(site.is_clean)
    await site.kill()
    for part in parts:
        await part.goes_on(True)
        await part.again(f"{part.name}-{part.name}-1")
    return site, parts


def test_two_jobs_go_on_with_one_pod_each_and_wait_for_no_more():
    async def story():
        site, parts = await two_jobs_but_one_pod_of_each()
        site.start()
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        assert len(await site.taints()) == 2
        for part in parts:
            await part.succeed(f"{part.name}-{part.name}-1-again")
        await site.until(site.is_clean)
        await over(site, *parts)

    run(story)


def test_what_two_jobs_still_need_waits_for_room_like_any_gang():
    async def story():
        site, parts = await two_jobs_but_one_pod_of_each()
        site.start()
        other = site.job("other", {"worker": 3})
        await site.until(lambda: site.is_bound("other", 3))
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        await asyncio.sleep(60)
        assert await site.says("big", "Placed", "DoesNotFit")
        await other.end()
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        await over(site, *parts, other)

    run(story)


@pytest.mark.slow
@pytest.mark.parametrize("last", range(1, 10))
def test_death_after_a_write_while_the_rest_of_two_jobs_is_placed(last):
    async def story():
        site, parts = await two_jobs_but_one_pod_of_each(last)
        bound = watch_bindings(site)
        await until_dead_and_again(site, last)
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        assert sorted(map(len, bound.values())) == [1, 1]
        assert {node for nodes in bound.values() for node in nodes} == set(await site.taints())
        await over(site, *parts)

    run(story, last)


def test_a_pod_that_failed_and_is_still_there_is_named_to_whom_waits():
    """The MPI operator creates it again only after it was deleted."""
    failed = pod("f", "one", "a", "Failed")
    decided = reconcile_gang(view_of((*WAITING, failed), {}), GangSettings())
    assert decided.status.conditions[0].message == (
        "pods that are there: a 1 of 2, b 1 of 3; their owners do not say that fewer are to come; "
        "f ended, and may be made anew"
    )
