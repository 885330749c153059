"""Gangs with node rules and anti-affinity: placed accordingly, or refused with the obstacle."""

import asyncio

import pytest
from tests.claim.cluster.gangs.gang_site import TEAM, planned, rack_of, run
from tests.claim.cluster.gangs.gang_stories import has_left, opened, over

from rackloom.core.cluster import names
from rackloom.core.cluster.objects import NODE, POD
from rackloom.core.cluster.pods import CHANNEL_LABEL, GANG_LABEL

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
HOST = "kubernetes.io/hostname"


def in_terms(*terms):
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(terms)}}}


def on(*trays):
    return {"matchExpressions": [{"key": "tray", "operator": "In", "values": list(trays)}]}


def asking(job, **spec):
    """From now on its pods carry this: all of them, or those of a group (`worker={…}`)."""
    honest = job.pod

    def pod(group, number):
        made = honest(group, number)
        made["spec"] |= spec.get(group, {}) if set(spec) <= set(job.sizes) else spec
        return made

    job.pod = pod
    return job


async def labelled(racks, trays, **how):
    site = await opened(racks, trays, **how)
    await site.label_trays()
    site.start()
    return site


def choosy(site, name, sizes, how=None, **spec):
    return asking(site.job(name, sizes, **(how or {})), **spec)


@pytest.mark.parametrize(
    "spec",
    [
        {"nodeSelector": {"tray": "r1-t2"}},
        {"affinity": in_terms(on("r1-t2"))},
        {"affinity": in_terms(on("r7-t7"), on("r1-t2"))},
        {
            "affinity": in_terms(
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["r1-t2"]}]}
            )
        },
    ],
)
def test_a_gang_goes_where_its_pods_may(spec):
    async def story():
        site = await labelled(racks=2, trays=3)
        job = choosy(site, "big", {"worker": 1}, **spec)
        await site.until(lambda: site.is_bound("big", 1))
        assert set((await site.places("big")).values()) == {"r1-t2"}
        assert set(await site.taints()) == {"r1-t2"}
        await over(site, job)

    run(story)


def test_what_the_pods_ask_is_told_where_no_clique_has_it():
    async def story():
        site = await labelled(racks=2, trays=3)
        job = choosy(site, "big", {"worker": 2}, nodeSelector={"tray": "r1-t2"})
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        assert "not tray=r1-t2" in (await site.record("big")).status.condition("Placed").message
        await asyncio.sleep(30)
        assert not await site.taints()
        await over(site, job)

    run(story)


def test_groups_go_each_where_they_may():
    async def story():
        site = await labelled(racks=2, trays=4)
        where = {"prefill": {"affinity": in_terms(on("r0-t3", "r1-t1", "r1-t3"))}}
        where["decode"] = {"nodeSelector": {"tray": "r1-t0"}}
        job = choosy(site, "big", {"prefill": 2, "decode": 1}, **where)
        await site.until(lambda: site.is_bound("big", 3))
        assert sorted((await site.places("big")).values()) == ["r1-t0", "r1-t1", "r1-t3"]
        await over(site, job)

    run(story)


@pytest.mark.parametrize(
    ("trays", "where"), [(("r1-t1", "r1-t2"), "r1"), (("r0-t1", "r0-t2"), "r0"), (("r0-t1", "r1-t0"), "r0")]
)
def test_a_launcher_sits_where_it_may_too(trays, where):
    async def story():
        site = await labelled(racks=2, trays=3)
        launcher = {"affinity": in_terms(on(*trays))}
        job = choosy(site, "big", {"launcher": 1, "worker": 2}, launcher=launcher)
        await site.until(lambda: site.is_bound("big", 3))
        places = await site.places("big")
        assert places["big-launcher-0"] in {places["big-worker-0"], places["big-worker-1"]} & set(trays)
        assert {rack_of(node) for node in places.values()} == {where}
        await over(site, job)

    run(story)


def test_a_launcher_that_may_go_to_no_tray_is_told():
    async def story():
        site = await labelled(racks=1, trays=3)
        job = choosy(site, "big", {"launcher": 1, "worker": 2}, launcher={"nodeSelector": {"cpu": "yes"}})
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        message = (await site.record("big")).status.condition("Placed").message
        assert "launcher may go to none" in message
        assert "not cpu=yes" in message
        assert not await site.taints()
        await over(site, job)

    run(story)


TAINT = {"key": "dedicated", "value": "x", "effect": "NoSchedule"}
TOLERATED = {"tolerations": [{"key": "dedicated", "operator": "Exists"}]}


def test_a_taint_keeps_away_who_does_not_tolerate_it():
    async def story():
        site = await labelled(racks=2, trays=2)
        for tray in ("r0-t0", "r1-t0", "r1-t1"):
            await site.user.patch(NODE, tray, None, {"spec": {"taints": [TAINT]}})
        plain = choosy(site, "plain", {"worker": 2})
        await site.until(lambda: site.says("plain", "Placed", "DoesNotFit"))
        assert "taint dedicated=x" in (await site.record("plain")).status.condition("Placed").message
        job = choosy(site, "big", {"worker": 2}, **TOLERATED)
        await site.until(lambda: site.is_bound("big", 2))
        await over(site, job, plain)

    run(story)


def apart_from(**labels):
    term = {"topologyKey": HOST, "labelSelector": {"matchLabels": labels}}
    return {"affinity": {"podAntiAffinity": {REQUIRED: [term]}}}


def spread(key=HOST, skew=1, when="DoNotSchedule"):
    selector = {"matchLabels": {"job": "big"}}
    constraint = {"topologyKey": key, "maxSkew": skew, "whenUnsatisfiable": when, "labelSelector": selector}
    return {"topologySpreadConstraints": [constraint]}


def on_host(port):
    limits = {"nvidia.com/gpu": "2"}
    ports = [{"containerPort": port, "hostPort": port}]
    return {
        "containers": [{"name": "main", "image": "none", "resources": {"limits": limits}, "ports": ports}]
    }


@pytest.mark.parametrize("spec", [apart_from(job="big"), spread(), on_host(22)])
def test_members_that_keep_apart_have_a_tray_each(spec):
    async def story():
        site = await labelled(racks=1, trays=4)
        job = choosy(site, "big", {"worker": 3}, {"gpus": 2}, **spec)
        await site.until(lambda: site.is_bound("big", 3))
        assert len(set((await site.places("big")).values())) == 3
        await over(site, job)

    run(story)


def test_a_gang_keeps_off_trays_whose_pods_it_keeps_apart_from():
    async def story():
        site = await labelled(racks=1, trays=3)
        meta = {"name": "log", "namespace": TEAM, "labels": {"app": "noisy"}}
        spec = {"containers": [{"name": "main", "image": "none"}], "nodeName": "r0-t0"}
        await site.user.create(POD, {"metadata": meta, "spec": spec})
        job = choosy(site, "big", {"worker": 2}, **apart_from(app="noisy"))
        await site.until(lambda: site.is_bound("big", 2))
        assert set((await site.places("big")).values()) == {"r0-t1", "r0-t2"}
        await over(site, job)

    run(story)


def near(key, among=None, **labels):
    """Pods with labels, in namespaces that a selector selects: an empty one selects all."""
    term = {"topologyKey": key, "labelSelector": {"matchLabels": labels}, "namespaceSelector": among}
    return {"affinity": {"podAffinity": {REQUIRED: [term]}}}


def apart_by(key):
    term = {"topologyKey": key, "labelSelector": {"matchLabels": {"job": "big"}}}
    return {"affinity": {"podAntiAffinity": {REQUIRED: [term]}}}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (near("zone", job="big"), "podAffinity by zone"),
        (near(names.GPU_CLIQUE_LABEL, app="other"), "not of the gang alone"),
        (near(names.GPU_CLIQUE_LABEL, among={}, **{GANG_LABEL: "big"}), "not of the gang alone"),
        (apart_by("zone"), "podAntiAffinity by zone"),
        (spread(key="zone"), "topologySpreadConstraints by zone"),
        (spread(skew=2), "maxSkew 2"),
    ],
)
def test_what_a_gang_is_not_placed_by_is_refused_by_name(spec, reason):
    async def story():
        site = await labelled(racks=1, trays=3)
        job = choosy(site, "big", {"worker": 2}, **spec)
        await site.until(lambda: site.says("big", "Placed", "InvalidGang"))
        message = (await site.record("big")).status.condition("Placed").message
        assert reason in message
        assert "big-worker-0" in message
        assert not await site.taints()
        await over(site, job)

    run(story)


@pytest.mark.parametrize(
    "spec",
    [
        near(names.GPU_CLIQUE_LABEL, **{GANG_LABEL: "big"}),
        near(names.GPU_CLIQUE_LABEL, **{CHANNEL_LABEL: "domain"}),
        spread(key="zone", when="ScheduleAnyway"),
        {"affinity": in_terms({"matchExpressions": [{"key": names.GPU_CLIQUE_LABEL, "operator": "Exists"}]})},
    ],
)
def test_what_a_gang_is_anyway_is_no_obstacle(spec):
    """Also the rule by which admission keeps the workers of a ComputeDomain in one clique."""

    async def story():
        site = await labelled(racks=2, trays=3)
        job = site.job("big", {"worker": 3})
        honest = job.pod

        def pod(group, number):
            made = honest(group, number)
            made["metadata"]["labels"][CHANNEL_LABEL] = "domain"
            made["spec"] |= spec
            return made

        job.pod = pod
        await site.until(lambda: site.is_bound("big", 3))
        assert len({rack_of(node) for node in (await site.places("big")).values()}) == 1
        await over(site, job)

    run(story)


def test_nodes_of_no_clique_are_near_nobody():
    async def story():
        site = await opened(racks=2, trays=1)
        await site.user.patch(NODE, "r0-t0", None, {"metadata": {"labels": {names.GPU_CLIQUE_LABEL: None}}})
        site.start()
        how = near(names.GPU_CLIQUE_LABEL, **{GANG_LABEL: "big"})
        job = choosy(site, "big", {"worker": 1}, **how)
        await site.until(lambda: site.is_bound("big", 1))
        assert set((await site.places("big")).values()) == {"r1-t0"}
        await over(site, job)

    run(story)


def test_members_of_a_group_that_may_not_go_to_the_same_nodes_are_told():
    async def story():
        site = await labelled(racks=1, trays=3)
        job = site.job("big", {"worker": 2})
        honest = job.pod
        job.pod = lambda group, number: with_spec(
            honest(group, number), nodeSelector={"tray": f"r0-t{number}"}
        )
        await site.until(lambda: site.says("big", "Placed", "InvalidGang"))
        message = (await site.record("big")).status.condition("Placed").message
        assert "big-worker-0 and big-worker-1" in message
        assert "gang-group" in message
        await over(site, job)

    run(story)


def with_spec(pod, **spec):
    return pod | {"spec": pod["spec"] | spec}


async def uids(site):
    return {pod["metadata"]["uid"] for pod in await site.pods("big")}


async def relabelled(site, tray, label):
    await site.user.patch(NODE, tray, None, {"metadata": {"labels": {"tray": label}}})


def test_a_tray_that_is_not_as_asked_any_more_is_given_up_before_a_pod_is_let_go():
    async def story():
        site = await labelled(racks=1, trays=3)
        job = choosy(site, "big", {"worker": 1}, affinity=in_terms(on("r0-t0", "r0-t1")))
        plan = await planned(site, "big")
        await relabelled(site, plan.trays[0], "other")
        await site.until(lambda: site.is_bound("big", 1))
        (place,) = (await site.places("big")).values()
        assert place in {"r0-t0", "r0-t1"} - {plan.trays[0]}
        await over(site, job)

    run(story)


@pytest.mark.parametrize("others", [["r0-t1"], []])
def test_a_pod_whose_tray_changed_goes_to_another_or_waits_and_says_why(others):
    """Nothing goes round in circles: the pod that waits is not deleted over and over."""

    async def story():
        site = await labelled(racks=1, trays=4)
        how = {"affinity": in_terms(on("r0-t0", "r0-t2", *others))}
        job = choosy(site, "big", {"worker": 2}, **how)
        await site.until(lambda: site.is_bound("big", 2))
        place = (await site.places("big"))["big-worker-0"]
        await relabelled(site, place, "other")
        await site.user.delete(POD, "big-worker-0", TEAM, grace_seconds=0)
        if others:
            await site.until(has_left(site, "big", 2, place))
            assert set((await site.places("big")).values()) <= {"r0-t0", "r0-t2", *others}
        else:
            await site.until(lambda: site.says("big", "Bound", "CannotBind"))
            assert (
                f"{place} (not tray In r0-t0/r0-t2)"
                in (await site.record("big")).status.condition("Bound").message
            )
            before = await uids(site)
            await asyncio.sleep(300)
            assert await uids(site) == before
            await relabelled(site, place, place)
            await site.until(lambda: site.is_bound("big", 2))
        await over(site, job)

    run(story)


def test_a_pod_that_is_made_anew_with_another_wish_is_told_and_not_made_anew_for_ever():
    async def story():
        site = await labelled(racks=1, trays=3)
        job = site.job("big", {"worker": 2})
        await site.until(lambda: site.is_bound("big", 2))
        asking(job, nodeSelector={"tray": "r7-t7"})
        await asyncio.sleep(0.1)  # A pod that was being created then is as those before.
        await site.user.delete(POD, "big-worker-0", TEAM, grace_seconds=0)
        await site.until(lambda: site.says("big", "Bound", "CannotBind"))
        message = (await site.record("big")).status.condition("Bound").message
        assert "big-worker-0 asks for another node" in message
        assert "not tray=r7-t7" in message
        before = await uids(site)
        await asyncio.sleep(300)
        assert await uids(site) == before
        await over(site, job)

    run(story)


def test_a_launcher_with_the_port_of_a_worker_is_told():
    async def story():
        site = await labelled(racks=1, trays=3)
        port = on_host(2222)
        launcher = {"containers": [port["containers"][0] | {"resources": {}}]}
        job = choosy(site, "big", {"launcher": 1, "worker": 2}, launcher=launcher, worker=port)
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        assert "keeps apart" in (await site.record("big")).status.condition("Placed").message
        await over(site, job)

    run(story)


def agent(node, cpu):
    """A pod without GPUs that requests CPUs of a tray."""
    container = {"name": "main", "image": "none", "resources": {"requests": {"cpu": cpu}}}
    meta = {"name": f"agent-{node}", "namespace": TEAM}
    return {"metadata": meta, "spec": {"nodeName": node, "containers": [container]}}


def test_a_gang_goes_where_its_pods_have_the_cpus():
    async def story():
        site = await opened(racks=2, trays=2)
        await site.user.create(POD, agent("r0-t0", "100"))
        site.start()
        job = site.job("big", {"worker": 2}, cpu="96")
        await site.until(lambda: site.is_bound("big", 2))
        assert set((await site.places("big")).values()) == {"r1-t0", "r1-t1"}
        await over(site, job)

    run(story)


def test_too_few_cpus_are_named_and_waited_for():
    async def story():
        site = await opened(racks=1, trays=2)
        await site.user.create(POD, agent("r0-t0", "100"))
        site.start()
        job = site.job("big", {"worker": 2}, cpu="96")
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        message = (await site.record("big")).status.condition("Placed").message
        assert "r0-t0 (has 44 of the 96 cpu of a member" in message
        over_now = {"status": {"phase": "Succeeded"}}
        await site.user.patch(POD, "agent-r0-t0", TEAM, over_now, subresource="status")
        await site.until(lambda: site.is_bound("big", 2))
        await over(site, job)

    run(story)
