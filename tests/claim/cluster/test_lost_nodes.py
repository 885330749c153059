"""A node that is lost under a ComputeDomain: when it stops counting, and which objects are taken back.

Also other members: stale entries, and nodes without a fabric.
"""

import pytest
from tests.claim.cluster.one_domain import UID, settle, started, status_of

from rackloom.claim.kube.api import Conflict
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import (
    ComputeDomainNode,
    ObjectRef,
    Readiness,
    clique_json,
    read_clique,
)
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    PatchObject,
)
from rackloom.core.domains import membership
from rackloom.core.domains.clique import join_clique
from rackloom.core.domains.observe import take_domain_snapshot
from rackloom.core.domains.reconcile import DomainDecision, reconcile_domain

LONG_AGO = "2025-12-31T23:54:00Z"
"""360 s before the tests' now. A node is lost after 300 s."""
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
    """It may have come back, and may prepare a channel under the label that it has."""
    lose(world, make, "n1")
    move_away(world, "n1")
    decision = reconcile_domain(take_domain_snapshot(world, UID, settings, make.now))
    world.put(NODE, make.node("n1", UID))
    with pytest.raises(Conflict):
        world.carry_out(decision, UID)
    assert names.COMPUTE_DOMAIN_LABEL in world.at(NODE, None, "n1")["metadata"]["labels"]


def test_a_claim_of_another_namespace_holds_no_node(world, make, settings):
    """The plugin never prepares such a claim, and anyone could make one."""
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
    """An entry is removed from a clique object, or the object is deleted, only in the state that was seen."""

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
    """The fabric was repartitioned: the next daemon of the node is in another clique."""
    other = make.clique[:-1] + "2"
    world.put(POD, make.pod("n1", UID, clique=other))
    settle(world, settings, make)
    assert members(world) == ["n0"]


# Decided from one snapshot.


JUST_LOST = "2025-12-31T23:55:00Z"
"""300 s before the tests' now, as long as a node may be silent."""
ALMOST_LOST = "2025-12-31T23:55:01Z"


@pytest.fixture
def idle(make, settings):
    """No pod holds a channel."""
    idle = make.world()
    started(idle, make, settings)
    return idle


@pytest.fixture
def look(settings, make):
    return lambda world: take_domain_snapshot(world, UID, settings, make.now)


def test_a_node_is_lost_from_the_end_of_its_time_on(idle, make, look):
    idle.put(NODE, make.node("n1", UID, not_ready_since=ALMOST_LOST))
    assert membership.abandoned_nodes(look(idle)) == frozenset()
    assert membership.seconds_to_next_loss(look(idle)) == 1.0
    idle.put(NODE, make.node("n1", UID, not_ready_since=JUST_LOST))
    assert membership.abandoned_nodes(look(idle)) == {"n1"}
    assert membership.seconds_to_next_loss(look(idle)) is None


def test_in_channel_mode_no_node_is_given_up(idle, make, look, settings):
    """The controller cannot see on which nodes a job runs."""
    warm = make.domain(labels={names.WARM_CLIQUE_LABEL: make.clique})
    warm["metadata"]["namespace"] = settings.daemon_namespace
    idle.objects.pop((COMPUTE_DOMAIN, "team", "job"))
    idle.put(COMPUTE_DOMAIN, warm)
    idle.put(NODE, make.node("n1", UID, not_ready_since=JUST_LOST))
    snapshot = look(idle)
    assert snapshot.unready
    assert membership.abandoned_nodes(snapshot) == frozenset()


def test_what_seems_stale_or_lost_is_to_be_confirmed(idle, make, look):
    assert not membership.needs_confirmation(look(idle))
    idle.put(NODE, make.node("n1", UID, not_ready_since=JUST_LOST))
    assert membership.needs_confirmation(look(idle)), "a lost node"
    idle.put(NODE, make.node("n1", UID))
    idle.delete(POD, idle.at(POD, "rackloom-imex", f"daemon-{UID}-n1"))
    assert membership.needs_confirmation(look(idle)), "an entry without a pod"


def test_each_node_is_listed_with_its_own_place(idle, look, make):
    assert membership.node_entries(look(idle)) == tuple(
        ComputeDomainNode(
            name=f"n{index}",
            ip_address=f"10.0.0.{index}",
            clique_id=make.clique,
            index=index,
            status=Readiness.READY,
        )
        for index in (0, 1)
    )


@pytest.mark.parametrize(("ready", "status"), [(True, Readiness.READY), (False, Readiness.NOT_READY)])
def test_a_node_without_a_fabric_is_as_ready_as_its_pod(idle, make, look, ready, status):
    idle.put(NODE, make.node("n2", UID, clique=None))
    idle.put(POD, make.pod("n2", UID, clique="", ready=ready))
    entries = membership.node_entries(look(idle))
    assert [entry.name for entry in entries] == ["n0", "n1", "n2"]
    assert entries[2] == ComputeDomainNode(name="n2", ip_address="10.0.0.2", clique_id="", status=status)


def clique_of(world):
    (found,) = world.of(COMPUTE_DOMAIN_CLIQUE)
    return found


def test_stale_entries_of_all_cliques_are_removed_in_one_go(idle, make, look):
    """One clique keeps a daemon, the other has none left, and is deleted."""
    kept = clique_of(idle)
    other = make.clique[:-1] + "2"
    name = names.clique_object_name(UID, other)
    labels = {**kept["metadata"]["labels"], names.CLIQUE_ID_LABEL: other}
    meta = {"namespace": kept["metadata"]["namespace"], "name": name, "labels": labels}
    for empty in (meta, {**meta, "deletionTimestamp": make.now, "finalizers": ["other"]}):
        idle.put(COMPUTE_DOMAIN_CLIQUE, {**kept, "metadata": empty, "daemons": []})
        idle.objects.pop((POD, "rackloom-imex", f"daemon-{UID}-n1"), None)
        changed, *deleted = membership.remove_stale_entries(look(idle))
        assert isinstance(changed, PatchObject)
        assert [daemon["nodeName"] for daemon in changed.patch["daemons"]] == ["n0"]
        assert [write.name for write in deleted] == ([] if "finalizers" in empty else [name])


def test_an_object_without_entries_stays_while_it_has_a_living_owner(idle, look):
    """Its daemon has entered as an owner, and its entry comes next. Or it left, and its pod is ending."""
    idle.put(COMPUTE_DOMAIN_CLIQUE, {**clique_of(idle), "daemons": []})
    assert membership.remove_stale_entries(look(idle)) == ()


def test_two_living_pods_of_a_node_both_stay_owners(idle, make, look):
    """A pod that ends, and its successor."""
    successor = make.pod("n1", UID)
    successor["metadata"] |= {"name": "successor", "uid": "successor"}
    idle.put(POD, successor)
    read = clique_of(idle)
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "successor", "uid": "successor"}
    owners = [*read["metadata"]["ownerReferences"], owner]
    idle.put(COMPUTE_DOMAIN_CLIQUE, {**read, "metadata": {**read["metadata"], "ownerReferences": owners}})
    assert membership.remove_stale_entries(look(idle)) == ()
    assert len(read_clique(clique_of(idle)).owners) == 3
