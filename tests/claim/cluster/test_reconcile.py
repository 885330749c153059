"""Decisions about one ComputeDomain in a cluster: its objects, readiness, collisions and conditions."""

import contextlib

import msgspec
import pytest
from tests.claim.cluster.one_domain import UID, settle, started, status_of

from rackloom.claim.kube.api import Conflict
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ObjectRef, Readiness, clique_json, read_clique
from rackloom.core.cluster.names import ImexMode
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DAEMON_SET,
    NODE,
    POD,
    RESOURCE_CLAIM_TEMPLATE,
)
from rackloom.core.domains import membership, snapshot
from rackloom.core.domains.clique import join_clique
from rackloom.core.domains.observe import take_domain_snapshot
from rackloom.core.domains.reconcile import reconcile_domain


def test_a_new_one_gets_its_objects_and_is_not_ready_without_nodes(make, settings):
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain())
    settle(world, settings, make)
    meta = world.at(COMPUTE_DOMAIN, "team", "job")["metadata"]
    assert meta["finalizers"] == [names.FINALIZER]
    assert meta["labels"] == {names.COMPUTE_DOMAIN_LABEL: UID}, "node plugins find it by its label"
    template = world.at(RESOURCE_CLAIM_TEMPLATE, "team", "imex-channel-0")
    assert template["metadata"]["labels"] == {
        names.COMPUTE_DOMAIN_LABEL: UID,
        names.TARGET_LABEL: "Workload",
    }
    assert template["metadata"]["finalizers"] == [names.FINALIZER]
    request = template["spec"]["spec"]["devices"]["requests"][0]
    assert (request["name"], request["exactly"]["deviceClassName"]) == (
        "channel",
        "compute-domain-default-channel.nvidia.com",
    )
    daemons = world.at(DAEMON_SET, "rackloom-imex", "computedomain-daemon-cd-1")
    assert daemons["spec"]["template"]["spec"]["nodeSelector"] == {names.COMPUTE_DOMAIN_LABEL: UID}
    assert world.at(RESOURCE_CLAIM_TEMPLATE, "rackloom-imex", "computedomain-daemon-cd-1")
    status = status_of(world)
    assert status.status is Readiness.NOT_READY
    assert status.condition("Ready").reason == "NoNodes"
    assert status.condition("Degraded").status == "False"
    # finalizer, four objects, one status
    assert world.writes == 6


def test_ready_once_every_labelled_node_is(make, settings):
    world = make.world()
    started(world, make, settings)
    status = status_of(world)
    assert status.status is Readiness.READY
    assert [(node.name, node.index, node.status) for node in status.nodes] == [
        ("n0", 0, Readiness.READY),
        ("n1", 1, Readiness.READY),
    ]
    world.put(NODE, make.node("n2", UID))
    settle(world, settings, make)
    assert status_of(world).condition("Ready").reason == "DaemonsMissing"
    assert "n2" in status_of(world).condition("Ready").message
    assert status_of(world).condition("Progressing").status == "True"


def test_the_mesh_is_what_the_daemons_say(make, settings):
    world = make.world()
    started(world, make, settings)
    assert status_of(world).condition("Meshed").status == "Unknown"
    world.put(POD, make.pod("n0", UID, mesh='{"complete": true, "peers": 1, "missing": []}'))
    settle(world, settings, make)
    assert "n1" in status_of(world).condition("Meshed").message
    world.put(POD, make.pod("n1", UID, mesh='{"complete": false, "peers": 1, "missing": ["n0"]}'))
    settle(world, settings, make)
    meshed = status_of(world).condition("Meshed")
    assert (meshed.status, meshed.reason) == ("False", "PeersMissing")
    world.put(POD, make.pod("n1", UID, mesh='{"complete": true, "peers": 1}'))
    settle(world, settings, make)
    assert status_of(world).condition("Meshed").status == "True"
    world.put(POD, make.pod("n1", UID, mesh="not json"))
    settle(world, settings, make)
    assert status_of(world).condition("Meshed").status == "Unknown"


def test_why_nvidia_imex_does_not_run_is_in_the_status_and_in_one_event(make, settings):
    world = make.world()
    started(world, make, settings)
    why = "exit status 255: Validation of network configuration failed"
    for name in ("n0", "n1"):
        world.put(POD, make.pod(name, UID, ready=False, error=why))
    notices = settle(world, settings, make)
    degraded = status_of(world).condition("Degraded")
    message = f"nvidia-imex does not run on n0, n1: {why}"
    assert (degraded.status, degraded.reason, degraded.message) == ("True", "ImexStartFailed", message)
    assert (True, "ImexStartFailed", message) in [
        (notice.warning, notice.reason, notice.message) for notice in notices
    ]

    world.put(POD, make.pod("n1", UID, ready=False, error="killed by SIGSEGV"))
    assert settle(world, settings, make) == [], "what is wrong goes on; only what is known of it has changed"
    assert "n0: exit status 255" in status_of(world).condition("Degraded").message
    assert "n1: killed by SIGSEGV" in status_of(world).condition("Degraded").message
    for name in ("n0", "n1"):
        world.put(POD, make.pod(name, UID))
    settle(world, settings, make)
    assert status_of(world).condition("Degraded").status == "False"


def test_what_daemons_say_of_nvidia_imex_does_not_make_a_status_too_large(make, settings):
    world = make.world()
    started(world, make, settings)
    for number in range(18):
        world.put(POD, make.pod(f"n{number}", UID, error=f"{number} " + "x" * 10_000))
    settle(world, settings, make)
    assert len(status_of(world).condition("Degraded").message) < 4096


def join_of(world, make, settings, name):
    """The write of a daemon that joins now."""
    read = world.of(COMPUTE_DOMAIN_CLIQUE)[0]
    pod = world.put(POD, make.pod(name, UID))
    ref = ObjectRef(pod["metadata"]["name"], pod["metadata"]["uid"])
    address = pod["status"]["podIP"]
    members = join_clique(read_clique(read), node=name, ip_address=address, pod=ref, max_nodes=18)
    world.put(COMPUTE_DOMAIN_CLIQUE, clique_json(members, settings.daemon_namespace, read))


def left_of_a_join_while_stale_entries_go(make, settings, stale):
    """The nodes in the clique object after an earlier decision to remove entries was carried out."""
    world = make.world()
    started(world, make, settings)
    for name in stale:
        world.delete(POD, world.at(POD, settings.daemon_namespace, f"daemon-{UID}-{name}"))
    decision = reconcile_domain(take_domain_snapshot(world, UID, settings, make.now))
    assert decision.actions
    join_of(world, make, settings, "n7")
    with contextlib.suppress(Conflict):
        world.carry_out(decision, UID)
    left = {
        daemon.node_name for found in world.of(COMPUTE_DOMAIN_CLIQUE) for daemon in read_clique(found).daemons
    }
    settle(world, settings, make)
    return left


STALE = [("n0",), ("n0", "n1")]


@pytest.mark.parametrize("stale", STALE)
def test_a_daemon_that_joins_while_stale_entries_are_removed_stays(make, settings, stale):
    assert "n7" in left_of_a_join_while_stale_entries_go(make, settings, stale)


@pytest.mark.parametrize("stale", STALE)
def test_it_would_not_if_they_were_removed_from_any_version(make, settings, stale, monkeypatch):
    """The planted bug: without the resourceVersion the test above must fail."""
    members = membership.clique_members_json
    monkeypatch.setattr(membership, "clique_members_json", lambda value, version: members(value, {}))
    monkeypatch.setattr(membership, "delete_object", lambda thing, unchanged: snapshot.delete_object(thing))
    assert "n7" not in left_of_a_join_while_stale_entries_go(make, settings, stale)


def test_losing_readiness_is_told(make, settings):
    world = make.world()
    started(world, make, settings)
    world.put(POD, make.pod("n1", UID, ready=False))
    notices = settle(world, settings, make)
    assert status_of(world).status is Readiness.NOT_READY
    assert [(notice.warning, notice.reason) for notice in notices] == [(True, "NodesNotReady")]


def test_an_entry_at_another_address_is_not_ready(make, settings):
    world = make.world()
    started(world, make, settings)
    world.put(POD, make.pod("n1", UID, ip="10.0.9.9"))
    settle(world, settings, make)
    assert [node.status for node in status_of(world).nodes] == [Readiness.READY, Readiness.NOT_READY]


def test_another_domains_daemon_is_no_proof_of_life(make, settings):
    world = make.world()
    started(world, make, settings)
    world.delete(POD, world.at(POD, "rackloom-imex", "daemon-cd-1-n1"))
    world.put(POD, make.pod("n1", "cd-2"))
    settle(world, settings, make)
    left = read_clique(world.of(COMPUTE_DOMAIN_CLIQUE)[0])
    assert [daemon.node_name for daemon in left.daemons] == ["n0"]
    assert [owner.uid for owner in left.owners] == ["pod-cd-1-n0"]


def test_a_clique_object_that_nobody_is_in_goes(make, settings):
    world = make.world()
    started(world, make, settings)
    for name in ("n0", "n1"):
        world.delete(POD, world.at(POD, "rackloom-imex", f"daemon-cd-1-{name}"))
    settle(world, settings, make)
    assert not world.of(COMPUTE_DOMAIN_CLIQUE)


def test_a_node_without_fabric_has_no_index(make, settings):
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain())
    world.put(NODE, make.node("n0", UID))
    world.put(POD, make.pod("n0", UID, clique=""))
    settle(world, settings, make)
    assert [(node.index, node.clique_id) for node in status_of(world).nodes] == [(-1, "")]
    assert status_of(world).status is Readiness.READY


def test_num_nodes_is_a_lower_bound_for_ready(make, settings):
    world = make.world()
    obj = make.domain()
    obj["spec"]["numNodes"] = 3
    world.put(COMPUTE_DOMAIN, obj)
    for name in ("n0", "n1"):
        world.put(NODE, make.node(name, UID))
        world.put(POD, make.pod(name, UID, clique=""))
    settle(world, settings, make)
    assert status_of(world).condition("Ready").reason == "TooFewNodes"


@pytest.mark.parametrize("owner", [None, "cd-other"])
def test_a_taken_template_name_is_told_and_heals(make, settings, owner):
    world = make.world()
    labels = {} if owner is None else {names.COMPUTE_DOMAIN_LABEL: owner, names.TARGET_LABEL: "Workload"}
    taken = {"metadata": {"namespace": "team", "name": "imex-channel-0", "labels": labels}}
    foreign = world.put(RESOURCE_CLAIM_TEMPLATE, taken)
    world.put(COMPUTE_DOMAIN, make.domain())
    notices = settle(world, settings, make)
    degraded = status_of(world).condition("Degraded")
    assert (degraded.status, degraded.reason) == ("True", "TemplateNameTaken")
    assert "team/imex-channel-0" in degraded.message
    assert "resourceClaimTemplate.name" in degraded.message
    assert [(notice.warning, notice.reason) for notice in notices] == [(True, "TemplateNameTaken")]
    assert world.at(RESOURCE_CLAIM_TEMPLATE, "team", "imex-channel-0") == foreign

    world.delete(RESOURCE_CLAIM_TEMPLATE, foreign)
    settle(world, settings, make)
    assert status_of(world).condition("Degraded").status == "False"
    assert world.at(RESOURCE_CLAIM_TEMPLATE, "team", "imex-channel-0")["metadata"]["labels"]


def test_an_object_of_ours_that_was_deleted_comes_back(make, settings):
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain())
    settle(world, settings, make)
    before = world.at(DAEMON_SET, "rackloom-imex", "computedomain-daemon-cd-1")
    world.delete(DAEMON_SET, before)
    settle(world, settings, make)
    after = world.at(DAEMON_SET, "rackloom-imex", "computedomain-daemon-cd-1")
    assert after["metadata"]["uid"] != before["metadata"]["uid"]


def test_a_spec_that_cannot_be_read_is_a_condition(make, settings):
    world = make.world()
    obj = make.domain()
    del obj["spec"]
    world.put(COMPUTE_DOMAIN, obj)
    settle(world, settings, make)
    assert status_of(world).condition("Degraded").reason == "InvalidSpec"
    assert not world.of(RESOURCE_CLAIM_TEMPLATE)


def test_what_the_api_refused_is_a_condition(make, settings):
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain())
    seen = take_domain_snapshot(
        world, UID, settings, make.now, failures=("create DaemonSet: quota exceeded",)
    )
    degraded = reconcile_domain(seen).status.condition("Degraded")
    assert (degraded.reason, degraded.message) == ("ApiRefused", "create DaemonSet: quota exceeded")


def test_host_managed_makes_a_single_channel_template_and_claims_no_observation(make, settings):
    host = msgspec.structs.replace(settings, imex_mode=ImexMode.HOST_MANAGED)
    world = make.world()
    obj = make.domain()
    obj["spec"]["channel"]["allocationMode"] = "All"
    world.put(COMPUTE_DOMAIN, obj)
    settle(world, host, make)
    assert not world.of(DAEMON_SET)
    template = world.at(RESOURCE_CLAIM_TEMPLATE, "team", "imex-channel-0")
    parameters = template["spec"]["spec"]["devices"]["config"][0]["opaque"]["parameters"]
    assert parameters["allocationMode"] == "Single"
    status = status_of(world)
    assert status.status is Readiness.READY
    assert (status.condition("Ready").status, status.condition("Ready").reason) == ("Unknown", "HostManaged")


def test_host_managed_refuses_a_channel_of_ones_own_in_words(make, settings):
    host = msgspec.structs.replace(settings, imex_mode=ImexMode.HOST_MANAGED)
    world = make.world()
    obj = make.domain()
    obj["metadata"]["labels"] = {names.ISOLATION_LABEL: "channel"}
    world.put(COMPUTE_DOMAIN, obj)
    settle(world, host, make)
    template = world.at(RESOURCE_CLAIM_TEMPLATE, "team", "imex-channel-0")
    request = template["spec"]["spec"]["devices"]["requests"][0]["exactly"]
    assert request["deviceClassName"] == names.CHANNEL_CLASS
    degraded = status_of(world).condition("Degraded")
    assert (degraded.status, degraded.reason) == ("True", "ChannelModeUnavailable")
    assert "remove the label" in degraded.message
