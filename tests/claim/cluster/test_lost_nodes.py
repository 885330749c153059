"""A node that is lost under a ComputeDomain: when it counts no more, what is taken back, and what is not."""

import pytest
from tests.claim.cluster.one_domain import UID, settle, started, status_of

from rackloom.claim.kube.api import Conflict
from rackloom.core.domains import names
from rackloom.core.domains.clique import ObjectRef, Readiness, clique_json, join_clique, read_clique
from rackloom.core.domains.observe import take_domain_snapshot
from rackloom.core.domains.reconcile import DomainDecision, reconcile_domain
from rackloom.core.kubernetes.objects import COMPUTE_DOMAIN_CLIQUE, NODE, POD, RESOURCE_CLAIM, PatchObject

LONG_AGO = "2025-12-31T23:54:00Z"
"""360 s before the tests' now; a node is lost after 300 s."""
JUST_NOW = "2025-12-31T23:59:30Z"


def used(world, make, *nodes):
    """A pod holds a channel on each of the nodes."""
    for name in nodes:
        claim = make.claim(UID, name=f"on-{name}", pods=(f"pod-{name}",), device=(name, "channel-0"))
        world.put(RESOURCE_CLAIM, claim)


def meshed(world, make, node):
    world.put(POD, make.pod(node, UID, mesh='{"complete": true, "peers": 1}'))


def lose(world, make, node, since=LONG_AGO):
    """Its kubelet is silent: the node controller writes that to the node and its pods."""
    world.put(NODE, make.node(node, UID, not_ready_since=since))
    world.put(POD, make.pod(node, UID, ready=False))


def move_away(world, node):
    """The pod that was there is deleted by force, and its claim with it."""
    world.objects.pop((RESOURCE_CLAIM, "team", f"on-{node}"))


def daemon_set_follows(world):
    """The label is gone: the daemon's pod is deleted, and no kubelet ends it."""
    labelled = {node["metadata"]["name"] for node in world.by(NODE, "domain", UID)}
    for pod in world.of(POD):
        if pod["spec"]["nodeName"] not in labelled:
            meta = {**pod["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["kubelet"]}
            world.put(POD, {**pod, "metadata": meta})


def members(world):
    return [
        daemon.node_name for found in world.of(COMPUTE_DOMAIN_CLIQUE) for daemon in read_clique(found).daemons
    ]


@pytest.fixture
def world(make, settings):
    world = make.world()
    started(world, make, settings)
    for name in ("n0", "n1"):
        meshed(world, make, name)
    used(world, make, "n0", "n1")
    settle(world, settings, make)
    assert status_of(world).status is Readiness.READY
    return world


def test_it_counts_as_long_as_a_pod_holds_a_channel_there(world, make, settings):
    lose(world, make, "n1")
    settle(world, settings, make)
    assert status_of(world).condition("Ready").reason == "NodesNotReady"
    assert names.COMPUTE_DOMAIN_LABEL in world.at(NODE, None, "n1")["metadata"]["labels"]
    assert members(world) == ["n0", "n1"]


def test_it_counts_until_it_is_lost_and_time_alone_may_change_that(world, make, settings):
    lose(world, make, "n1", JUST_NOW)
    move_away(world, "n1")
    settle(world, settings, make)
    assert status_of(world).status is Readiness.NOT_READY
    decision = reconcile_domain(take_domain_snapshot(world, UID, settings, make.now))
    assert decision.recheck_after == 270.0


def test_without_pods_it_is_given_up_and_the_others_are_ready_again(world, make, settings):
    lose(world, make, "n1")
    settle(world, settings, make)
    move_away(world, "n1")
    decision = reconcile_domain(take_domain_snapshot(world, UID, settings, make.now))
    assert [notice.reason for notice in decision.done] == ["NodeLeft"]
    settle(world, settings, make)
    status = status_of(world)
    assert status.status is Readiness.READY
    assert [node.name for node in status.nodes] == ["n0"]
    assert status.condition("Meshed").message.startswith("1 daemons")
    assert names.COMPUTE_DOMAIN_LABEL not in world.at(NODE, None, "n1")["metadata"]["labels"]
    assert members(world) == ["n0", "n1"], "a daemon that still runs would only come back"
    daemon_set_follows(world)
    settle(world, settings, make)
    assert members(world) == ["n0"], "the peers are told"
    assert status_of(world).status is Readiness.READY


def test_its_label_is_taken_only_off_the_node_that_was_seen(world, make, settings):
    """It may have come back meanwhile, and prepare a channel under the label that it has."""
    lose(world, make, "n1")
    move_away(world, "n1")
    decision = reconcile_domain(take_domain_snapshot(world, UID, settings, make.now))
    world.put(NODE, make.node("n1", UID))
    with pytest.raises(Conflict):
        world.carry_out(decision, UID)
    assert names.COMPUTE_DOMAIN_LABEL in world.at(NODE, None, "n1")["metadata"]["labels"]


def test_a_claim_of_another_namespace_holds_no_node(world, make, settings):
    """The plugin never prepares such a claim, and anybody could make one."""
    lose(world, make, "n1")
    move_away(world, "n1")
    foreign = make.claim(UID, name="foreign", pods=("x",), device=("n1", "channel-0"))
    foreign["metadata"]["namespace"] = "elsewhere"
    world.put(RESOURCE_CLAIM, foreign)
    settle(world, settings, make)
    assert status_of(world).status is Readiness.READY


def test_a_node_that_is_gone_counts_no_more_and_its_entry_goes_with_its_pod(world, make, settings):
    move_away(world, "n1")
    world.delete(NODE, world.at(NODE, None, "n1"))
    settle(world, settings, make)
    assert status_of(world).status is Readiness.READY
    assert members(world) == ["n0", "n1"]
    world.delete(POD, world.at(POD, "rackloom-imex", f"daemon-{UID}-n1"))
    settle(world, settings, make)
    assert members(world) == ["n0"]


def test_the_last_node_lost_leaves_none(world, make, settings):
    for name in ("n0", "n1"):
        lose(world, make, name)
        move_away(world, name)
    settle(world, settings, make)
    assert status_of(world).condition("Ready").reason == "NoNodes"


def test_a_node_whose_pods_ended_leaves_without_a_word_of_trouble(world, make, settings):
    """Its plugin removed the label: no pod waits for a daemon that ends there."""
    move_away(world, "n1")
    world.put(NODE, make.node("n1"))
    world.put(POD, make.pod("n1", UID, ready=False))
    assert settle(world, settings, make) == []
    assert status_of(world).status is Readiness.READY
    assert members(world) == ["n0", "n1"], "it takes leave itself"


def test_back_again_it_is_a_node_like_any_other(world, make, settings):
    lose(world, make, "n1")
    move_away(world, "n1")
    settle(world, settings, make)
    daemon_set_follows(world)
    settle(world, settings, make)
    world.objects.pop((POD, "rackloom-imex", f"daemon-{UID}-n1"))
    world.put(NODE, make.node("n1", UID))
    used(world, make, "n1")
    settle(world, settings, make)
    assert status_of(world).condition("Ready").reason == "DaemonsMissing"
    pod = world.put(POD, make.pod("n1", UID))
    enter(world, make, settings, "n1", pod)
    settle(world, settings, make)
    assert status_of(world).condition("Ready").reason == "NodesNotReady"


def enter(world, make, settings, node, pod, clique_id=None):
    """A daemon joins the clique object, as it is now."""
    name = names.clique_object_name(UID, clique_id or make.clique)
    read = world.at(COMPUTE_DOMAIN_CLIQUE, settings.daemon_namespace, name)
    ref = ObjectRef(pod["metadata"]["name"], pod["metadata"]["uid"])
    value = join_clique(
        read_clique(read), node=node, ip_address=pod["status"]["podIP"], pod=ref, max_nodes=18
    )
    world.put(COMPUTE_DOMAIN_CLIQUE, clique_json(value, settings.daemon_namespace, read))


class TestAJoiningDaemon:
    """What is taken out of a clique object, or the object, goes only as it was seen."""

    def decided(self, world, make, settings, *gone):
        for name in gone:
            world.delete(POD, world.at(POD, "rackloom-imex", f"daemon-{UID}-{name}"))
        decision = reconcile_domain(take_domain_snapshot(world, UID, settings, make.now))
        (action,) = [write for write in decision.actions if write.kind == COMPUTE_DOMAIN_CLIQUE]
        return action

    @pytest.mark.parametrize("gone", [("n1",), ("n0", "n1")], ids=["an entry", "the object"])
    def test_is_not_erased_with_what_is_stale(self, world, make, settings, gone):
        action = self.decided(world, make, settings, *gone)
        assert isinstance(action, PatchObject) == (gone == ("n1",))
        world.put(NODE, make.node("n2", UID))
        enter(world, make, settings, "n2", world.put(POD, make.pod("n2", UID)))
        with pytest.raises(Conflict):
            world.carry_out(DomainDecision(actions=(action,)))
        assert "n2" in members(world)
        settle(world, settings, make)
        assert members(world) == [name for name in ("n0", "n1", "n2") if name not in gone]


def test_an_entry_in_the_clique_that_a_daemon_was_in_before_is_stale(world, make, settings):
    """The fabric was partitioned anew: the next daemon of the node is in another clique."""
    other = make.clique[:-1] + "2"
    world.put(POD, make.pod("n1", UID, clique=other))
    settle(world, settings, make)
    assert members(world) == ["n0"]
