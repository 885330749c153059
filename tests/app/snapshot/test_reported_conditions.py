"""The doctor finds each warning of a controller or a node, in the words of its event."""

import asyncio

import pytest
from tests.claim.cluster.admission.gate_site import site as gate_site
from tests.claim.cluster.gangs.gang_site import run
from tests.claim.cluster.gangs.gang_stories import at_work, bound_job, over
from tests.claim.node.nic.test_status_and_plan import REF, nic, status_of_lease

from rackloom.app.snapshot.assemble import site_snapshot
from rackloom.app.snapshot.cache import ReadCache
from rackloom.claim.node.nic.status import claim_status
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import EVENT, GANG_PLAN, POD, RESOURCE_CLAIM
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import CheckState
from rackloom.core.diagnosis.snapshot import Layer
from rackloom.core.nics.attachment import AttachedLink
from rackloom.core.nics.lease import LeaseState
from rackloom.lab.kube import refusals
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop


async def findings(api, *checks, known=None):
    snapshot = await site_snapshot(1.0, cluster=api, known=known or ReadCache())
    return [finding for finding in examine(snapshot) if finding.check in checks]


async def warnings(api, kind):
    """The messages of warnings about objects of a kind."""
    events = (await api.list(EVENT)).items
    return {
        event["message"]
        for event in events
        if (event["type"], event["involvedObject"]["kind"]) == ("Warning", kind.kind)
    }


async def create_claim(api, status):
    meta = {"namespace": REF.namespace, "name": REF.name}
    await api.create(RESOURCE_CLAIM, {"metadata": meta, "spec": {}})
    await api.patch(RESOURCE_CLAIM, REF.name, REF.namespace, {"status": status}, subresource="status")


def test_a_gang_that_finds_no_room_or_loses_a_tray_is_found_until_it_is_well():
    async def story():
        site, known = await at_work(racks=1, trays=5), ReadCache()
        job = await bound_job(site, "big", {"worker": 4})
        assert not await findings(site.user, Check.GANG, known=known)
        huge = site.job("huge", {"worker": 9})
        await site.until(lambda: site.says("huge", "Placed", "DoesNotFit"))
        (found,) = await findings(site.user, Check.GANG, known=known)
        assert found.subject == "GangPlan team/huge"
        (warned,) = await warnings(site.user, GANG_PLAN)
        assert found.message == f"DoesNotFit: {warned}"
        assert found.since == (await site.record("huge")).status.condition("Placed").since
        assert found.fix.startswith("kubectl -n team describe gangplans huge")
        # A tray is lost, and there is one to which its member moves.
        await huge.end()
        lost = (await site.places("big"))["big-worker-0"]
        await site.say_ready(lost, "Unknown")
        await site.until(lambda: site.says("big", "Bound", "TrayLost"))
        (found,) = await findings(site.user, Check.GANG, known=known)
        assert found.subject == "GangPlan team/big"
        await site.say_ready(lost, "True")
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        assert not await findings(site.user, Check.GANG, known=known)
        await over(site, job)

    run(story)


def test_a_pod_that_never_gets_its_channel_is_found():
    async def story():
        async with gate_site(2) as found:
            await found.create_pods("early")
            await found.create_template(await found.create_domain({names.ISOLATION_LABEL: "channel"}))
            while not (reported := await findings(found.user, Check.CLAIMS)):
                await asyncio.sleep(0.1)
            (warned,) = await warnings(found.user, POD)
            assert reported[0].subject == "Pod team/early"
            assert reported[0].message == f"CreatedBeforeComputeDomain: {warned}"

    event_loop.run_simulation(3, story)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (LeaseState.HELD, None),
        (LeaseState.SILENT, CheckState.UNKNOWN),
        (LeaseState.EXPIRED, CheckState.FAILS),
        (LeaseState.REFUSED, CheckState.FAILS),
    ],
)
def test_a_claimed_nic_is_found_with_the_state_of_its_lease(state, expected):
    async def story():
        admin, lease = DirectApi(FakeKube(seed=1), "admin"), status_of_lease(state)
        held = nic("rail-0")
        outcomes = {held.device: (held, AttachedLink(name="net1", mac=None, addresses=()))}
        status = claim_status(REF, "n", outcomes, {held.device: lease}, 0.0)["status"]
        status["reservedFor"] = [{"resource": "pods", "name": "job-0", "uid": "u-0"}]
        await create_claim(admin, status)
        found = await findings(admin, Check.PREPARED)
        assert [finding.state for finding in found] == ([expected] if expected else [])
        for finding in found:
            assert finding.subject == "ResourceClaim default/c"
            assert finding.message == f"rail-0: {lease.reason}: {lease.message}"
            assert "pod default/job-0" in finding.where

    event_loop.run_simulation(1, story)


def test_a_driver_that_reports_odd_conditions_stops_nothing():
    async def story():
        admin = DirectApi(FakeKube(seed=1), "admin")
        odd = [{"type": 3}, "no condition", {"type": "Ready", "status": "False", "reason": "Broken"}]
        devices = [{"device": "d", "conditions": odd}, {"device": "e", "conditions": None}]
        await create_claim(admin, {"devices": devices})
        (found,) = await findings(admin, Check.PREPARED)
        assert found.message == "d: Broken"

    event_loop.run_simulation(1, story)


def test_a_user_who_may_not_list_gangs_sees_the_rest_and_that_they_are_missing():
    class Narrow(DirectApi):
        async def list(self, kind, namespace=None, **how):
            if kind == GANG_PLAN:
                raise refusals.forbidden(kind, "", "not yours to see")
            return await super().list(kind, namespace, **how)

    async def story():
        snapshot = await site_snapshot(1.0, cluster=Narrow(FakeKube(seed=1), "map"), known=ReadCache())
        assert "GangPlans may not be listed" in snapshot.layer(Layer.CLUSTER).problem

    event_loop.run_simulation(1, story)
