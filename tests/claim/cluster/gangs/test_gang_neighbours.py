"""The chosen trays meet the rules of running pods about their neighbours, as kube-scheduler enforces them."""

import pytest
from tests.claim.cluster.gangs.gang_site import TEAM, run
from tests.claim.cluster.gangs.gang_stories import at_work, bound_job, opened, over

from rackloom.core.cluster import names
from rackloom.core.cluster.gang_objects import constraints_of_bound, read_member
from rackloom.core.cluster.nodes import read_node
from rackloom.core.cluster.objects import NODE, POD
from rackloom.core.cluster.pods import read_pod
from rackloom.core.gangs.trays import trays_barred_by
from rackloom.core.place.slurm_topology import SLURM_TAINT, topology_of_nodes

HOST, CLIQUE, ZONE = "kubernetes.io/hostname", names.GPU_CLIQUE_LABEL, "topology.kubernetes.io/zone"
SITE = {
    "r0-t0": {CLIQUE: "u.r0", ZONE: "east"},
    "r0-t1": {CLIQUE: "u.r0", ZONE: "east"},
    "r1-t0": {CLIQUE: "u.r1", ZONE: "east"},
    "r2-t0": {CLIQUE: "u.r2"},
    "cpu": {ZONE: "east"},
}
"""Labels of nodes. `cpu` is no tray."""


def pod(name, labels, namespace=TEAM, node=None, *, apart=()):
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": list(apart)}}
    spec = {"containers": [{"name": "main", "image": "none"}], "affinity": affinity}
    meta = {"name": name, "namespace": namespace, "uid": name, "labels": labels}
    return {"metadata": meta, "spec": spec | ({"nodeName": node} if node else {})}


def without(key, app="gang", **more):
    return {"topologyKey": key, "labelSelector": {"matchLabels": {"app": app}}} | more


def closed_by(foe):
    nodes = [read_node({"metadata": {"name": name, "labels": has}}) for name, has in SITE.items()]
    members = [read_member(pod("big-0", {"app": "gang"}))]
    theirs = [read_pod(foe)]
    barred = trays_barred_by(members, lambda all_pods: constraints_of_bound(theirs, all_pods=all_pods), nodes)
    return [name for name in SITE if name != "cpu" and name in barred]


@pytest.mark.parametrize(
    ("node", "term", "closed"),
    [
        ("r0-t0", without(HOST), ["r0-t0"]),
        ("r0-t0", without(HOST, matchLabelKeys=["app"]), ["r0-t0"]),
        ("r0-t0", without(HOST, mismatchLabelKeys=["team"]), ["r0-t0"]),
        ("r0-t0", without(CLIQUE), ["r0-t0", "r0-t1"]),
        ("r0-t0", without(CLIQUE, app="other"), []),
        ("cpu", without(ZONE), ["r0-t0", "r0-t1", "r1-t0"]),
        ("r2-t0", without(ZONE), []),
    ],
)
def test_trays_are_closed_as_far_around_a_pod_as_it_keeps_others_off(node, term, closed):
    assert closed_by(pod("foe", {}, node=node, apart=[term])) == closed


@pytest.mark.parametrize(
    ("more", "closed"),
    [
        ({}, []),
        ({"namespaces": [TEAM]}, ["r0-t0"]),
        ({"namespaceSelector": {}}, ["r0-t0"]),
        ({"namespaceSelector": {"matchLabels": {"stage": "test"}}}, ["r0-t0"]),
    ],
)
def test_namespaces_that_are_found_by_labels_may_be_that_of_the_gang(more, closed):
    assert closed_by(pod("foe", {}, "elsewhere", "r0-t0", apart=[without(HOST, **more)])) == closed


def test_a_gang_is_placed_outside_a_clique_that_a_pod_wants_without_it():
    async def story():
        site = await opened(racks=2, trays=2)
        term = {"topologyKey": CLIQUE, "labelSelector": {"matchLabels": {"job": "big"}}}
        await site.user.create(POD, pod("foe", {}, node="r0-t0", apart=[term]))
        site.start()
        job = await bound_job(site, "big", {"worker": 1})
        assert set((await site.places("big")).values()) <= {"r1-t0", "r1-t1"}
        await over(site, job)

    run(story)


def test_no_gang_is_placed_on_a_tray_of_slurm():
    """The taint that puts a tray into Slurm's topology closes it here: one switch for both."""

    async def story():
        site = await at_work(racks=1, trays=4)
        taint = {"key": SLURM_TAINT, "effect": "NoExecute"}
        await site.user.patch(NODE, "r0-t1", None, {"spec": {"taints": [taint]}})
        job = await bound_job(site, "train", {"worker": 3})
        assert set((await site.places("train")).values()) == {"r0-t0", "r0-t2", "r0-t3"}
        nodes = (await site.user.list(NODE)).items
        assert list(topology_of_nodes(nodes, taint=SLURM_TAINT).block_of) == ["r0-t1"]
        await over(site, job)

    run(story)
