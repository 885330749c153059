"""Gangs beside workloads of Kueue: planned trays are taken, and spares need the quota of a ComputeDomain."""

import msgspec
from structlog.testing import capture_logs
from tests.claim.cluster.gangs.gang_site import GPUS, TEAM, run
from tests.claim.cluster.gangs.gang_stories import NIC, at_work, bound_job, claiming_site, opened, over

from rackloom.core.cluster.gang_objects import GROUP_LABEL
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, POD, WORKLOAD
from rackloom.core.cluster.pods import GANG_LABEL, KUEUE_WORKLOAD_LABEL, SIZE_ANNOTATION
from rackloom.core.domains.quota import (
    DOMAINS_RESOURCE,
    QUEUE_LABEL,
    SPARES_RESOURCE,
    workload_name,
)
from rackloom.core.domains.settings import QuotaMode
from rackloom.core.gangs.snapshot import BesideKueue
from rackloom.core.kueue.plans import PLAN_ANNOTATION, PlannedPodSet
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.objects import TypeSchema


async def put(site, name, status, spec=None, **meta):
    site.kube.serve(WORKLOAD, TypeSchema(status=True, generation=True))
    obj = {"metadata": {"name": name, "namespace": TEAM, **meta}, "spec": spec or {"podSets": []}}
    made = await site.user.create(WORKLOAD, obj)
    await site.user.patch(WORKLOAD, name, TEAM, {"status": status}, subresource="status")
    return made["metadata"]["uid"]


def planned_on(*trays):
    """The status of a workload that was admitted with a plan for these trays."""
    planned = PlannedPodSet(gpus=GPUS, trays=dict.fromkeys(trays, 1))
    update = {"name": "main", "annotations": {PLAN_ANNOTATION: msgspec.json.encode(planned).decode()}}
    check = {"name": "placement", "state": "Ready", "podSetUpdates": [update]}
    return {"admissionChecks": [check], "conditions": [{"type": "QuotaReserved", "status": "True"}]}


def test_a_gang_leaves_the_trays_of_a_plan_whose_pods_are_still_to_come():
    async def story():
        site = await at_work(racks=2, trays=4, kueue=BesideKueue(has_plans=True))
        await put(site, "train", planned_on("r0-t0"))
        first = await bound_job(site, "first", {"worker": 4})
        assert set(await site.taints()) == {f"r1-t{tray}" for tray in range(4)}
        second = site.job("second", {"worker": 4})
        await site.until(lambda: site.says("second", "Placed", "DoesNotFit"))
        await site.user.patch(
            WORKLOAD,
            "train",
            TEAM,
            {"status": {"conditions": [{"type": "Finished", "status": "True"}]}},
            subresource="status",
        )
        await site.until(lambda: site.is_bound("second", 4))
        await over(site, first, second)

    run(story)


def test_a_gang_that_came_by_kueue_may_take_what_was_planned_for_it():
    async def story():
        site = await at_work(racks=1, trays=2, kueue=BesideKueue(has_plans=True))
        uid = await put(site, "train", planned_on("r0-t0", "r0-t1"))
        for number in range(2):
            labels = {GANG_LABEL: "train", GROUP_LABEL: "worker", KUEUE_WORKLOAD_LABEL: uid}
            meta = {
                "name": f"train-{number}",
                "namespace": TEAM,
                "labels": labels | {"job": "train"},
                "annotations": {SIZE_ANNOTATION: "worker=2"},
            }
            container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": str(GPUS)}}}
            await site.user.create(POD, {"metadata": meta, "spec": {"containers": [container]}})
        await site.until(lambda: site.is_bound("train", 2))
        await site.end()

    run(story)


def test_without_kueue_gangs_are_placed_all_the_same():
    async def story():
        site = await at_work(racks=1, trays=3, kueue=BesideKueue(has_plans=True, quota=QuotaMode.LABELLED))
        await over(site, await bound_job(site, "big", {"worker": 2}, spares=1))

    run(story)


async def add_domain(site, spares, template="channel"):
    """A ComputeDomain that has quota for `spares` spare nodes."""
    spec = {"channel": {"resourceClaimTemplate": {"name": template}}}
    meta = {"name": "domain", "namespace": TEAM, "labels": {QUEUE_LABEL: "q"}}
    uid = (await site.user.create(COMPUTE_DOMAIN, {"metadata": meta, "spec": spec}))["metadata"]["uid"]
    requests = {DOMAINS_RESOURCE: "1", SPARES_RESOURCE: str(spares)}
    container = {"name": "quota", "resources": {"requests": requests}}
    pod_set = {"name": "main", "count": 1, "template": {"spec": {"containers": [container]}}}
    true = [{"type": type_, "status": "True"} for type_ in ("QuotaReserved", "Admitted")]
    owner = {
        "apiVersion": COMPUTE_DOMAIN.api_version,
        "kind": "ComputeDomain",
        "name": "domain",
        "uid": uid,
        "controller": True,
    }
    await put(
        site,
        workload_name(uid),
        {"conditions": true},
        {"podSets": [pod_set], "queueName": "q"},
        ownerReferences=[owner],
    )


def test_gangs_keep_no_more_spares_than_their_compute_domain_has_quota_for():
    async def story():
        # A template of NICs serves as well as one of channels here: what counts is its name.
        site = await claiming_site(1, 12, kueue=BesideKueue(quota=QuotaMode.LABELLED))
        await site.make_template("channel", 2, NIC)
        await site.make_template("nics", 1, NIC)
        await add_domain(site, spares=2)
        site.start()
        how = {"templates": ["channel", "nics"]}
        first = await bound_job(site, "first", {"worker": 2}, spares=1, **how)
        second = site.job("second", {"worker": 2}, spares=2, **how)
        await site.until(lambda: site.says("second", "Placed", "DoesNotFit"))
        message = (await site.record("second")).status.condition("Placed").message
        assert "its ComputeDomains, by their quota, may keep 1 more" in message
        assert "set annotation rackloom.dev/gang-spares to 1" in message
        await second.end()
        # The shared claim here is no channel.
        other = await bound_job(site, "other", {"worker": 2}, spares=2, templates=["nics"])
        third = await bound_job(site, "third", {"worker": 2}, spares=1, **how)
        await over(site, first, other, third)

    run(story)


def test_where_all_need_quota_a_gang_without_a_compute_domain_keeps_no_spares():
    async def story():
        site = await at_work(racks=1, trays=4, kueue=BesideKueue(quota=QuotaMode.ALL))
        big = site.job("big", {"worker": 2}, spares=1)
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        assert "gang-spares to 0" in (await site.record("big")).status.condition("Placed").message
        await over(site, big, await bound_job(site, "plain", {"worker": 2}))

    run(story)


def test_workloads_that_may_not_be_read_are_logged_and_hold_up_no_gang():
    async def story():
        site = await opened(racks=1, trays=2, kueue=BesideKueue(has_plans=True))
        site.kube.serve(WORKLOAD, TypeSchema(status=True, generation=True))
        site.kube.faults.add(RequestFault(resource="workloads", verb="list", code=403, reason="Forbidden"))
        with capture_logs() as logs:
            site.start()
            job = await bound_job(site, "first", {"worker": 2})
        assert "gangs.workloads_not_read" in {entry["event"] for entry in logs}
        await over(site, job)

    run(story)
