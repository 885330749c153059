"""A controller that dies after any action: the next one finishes, and nothing is left behind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import (
    ComputeDomainClique,
    ObjectRef,
    Readiness,
    clique_json,
    read_clique,
    read_compute_domain_status,
)
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DAEMON_SET,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
)
from rackloom.core.domains.clique import join_clique, with_daemon_status
from rackloom.core.domains.observe import take_domain_snapshot
from rackloom.core.domains.reconcile import DomainDecision, reconcile_domain

UID = "cd-1"
NODES = ("n0", "n1", "n2")
EVENTS = st.sampled_from(
    [
        "prepare n0",
        "prepare n1",
        "prepare n2",
        "daemon n0",
        "daemon n1",
        "end n0",
        "end n1",
        "use n0",
        "use n1",
        "unuse n0",
        "unuse n1",
        "lose n0",
        "lose n1",
        "back n0",
        "back n1",
        "remove n1",
        "collide",
        "uncollide",
        "delete",
        "steal daemons",
    ]
)
PASSES = st.integers(0, 4)
"""How many actions of the next decision are carried out before the controller dies."""


def happen(world, make, what):
    """Something that the cluster or a user does."""
    verb, _, name = what.partition(" ")
    HAPPENINGS[verb](world, make, name)


def prepare(world, make, name):
    domain = world.at(COMPUTE_DOMAIN, "team", "job")
    found = world.at(NODE, None, name)
    silent = found is not None and found["status"]["conditions"][0]["status"] != "True"
    if domain is not None and "deletionTimestamp" not in domain["metadata"] and not silent:
        world.put(NODE, make.node(name, UID))


def end(world, make, name):
    pod = world.at(POD, "rackloom-imex", f"daemon-{UID}-{name}")
    if pod is not None:
        world.delete(POD, pod)


def use(world, make, name):
    node = world.at(NODE, None, name)
    if world.of(COMPUTE_DOMAIN) and node and node["metadata"]["labels"].get(names.COMPUTE_DOMAIN_LABEL):
        world.put(RESOURCE_CLAIM, make.claim(UID, name=name, pods=("worker",), device=(name, "channel-0")))


def unuse(world, make, name):
    world.objects.pop((RESOURCE_CLAIM, "team", name), None)


def lose(world, make, name):
    """The kubelet has been silent for long enough. The node controller then reports its pods as not ready."""
    node = world.at(NODE, None, name)
    if node is not None:
        uid = node["metadata"]["labels"].get(names.COMPUTE_DOMAIN_LABEL)
        world.put(NODE, make.node(name, uid, not_ready_since="2025-12-31T23:00:00Z"))
        report_pod(world, make, name, ready=False)


def report_pod(world, make, name, *, ready):
    pod = world.at(POD, "rackloom-imex", f"daemon-{UID}-{name}")
    if pod is not None and "deletionTimestamp" not in pod["metadata"]:
        world.put(POD, make.pod(name, UID, ready=ready))


def back(world, make, name):
    """The kubelet ends the pods that are no longer wanted there."""
    node = world.at(NODE, None, name)
    if node is not None:
        uid = node["metadata"]["labels"].get(names.COMPUTE_DOMAIN_LABEL)
        world.put(NODE, make.node(name, uid))
        report_pod(world, make, name, ready=True)
        if uid is None:
            end(world, make, name)


def remove(world, make, name):
    """The node's object goes, and with it the pods that are bound to it."""
    world.objects.pop((NODE, None, name), None)
    unuse(world, make, name)
    end(world, make, name)


def collide(world, make, name):
    if world.at(RESOURCE_CLAIM_TEMPLATE, "team", "imex-channel-0") is None:
        world.put(RESOURCE_CLAIM_TEMPLATE, {"metadata": {"namespace": "team", "name": "imex-channel-0"}})


def uncollide(world, make, name):
    found = world.at(RESOURCE_CLAIM_TEMPLATE, "team", "imex-channel-0")
    if found is not None and not found["metadata"].get("labels"):
        world.delete(RESOURCE_CLAIM_TEMPLATE, found)


def delete(world, make, name):
    for domain in world.of(COMPUTE_DOMAIN):
        world.delete(COMPUTE_DOMAIN, domain)


def steal(world, make, name):
    for found in world.of(DAEMON_SET):
        world.delete(DAEMON_SET, found)


def enter(world, make, name):
    """A daemon starts if its node is labelled and has a kubelet, and joins its clique object."""
    node = world.at(NODE, None, name)
    if node is None or node["metadata"]["labels"].get(names.COMPUTE_DOMAIN_LABEL) != UID:
        return
    if is_silent(world, name):
        return
    if not world.of(DAEMON_SET):
        return
    pod = world.put(POD, make.pod(name, UID))
    read = next(iter(world.of(COMPUTE_DOMAIN_CLIQUE)), None)
    members = (
        ComputeDomainClique(compute_domain=UID, clique_id=make.clique) if read is None else read_clique(read)
    )
    ref = ObjectRef(pod["metadata"]["name"], pod["metadata"]["uid"])
    members = join_clique(members, node=name, ip_address=pod["status"]["podIP"], pod=ref, max_nodes=18)
    members = with_daemon_status(
        members, node=name, ip_address=pod["status"]["podIP"], status=Readiness.READY
    )
    world.put(COMPUTE_DOMAIN_CLIQUE, clique_json(members, "rackloom-imex", read))


HAPPENINGS = {
    "prepare": prepare,
    "daemon": enter,
    "end": end,
    "use": use,
    "unuse": unuse,
    "lose": lose,
    "back": back,
    "remove": remove,
    "collide": collide,
    "uncollide": uncollide,
    "delete": delete,
    "steal": steal,
}


def one_pass(world, config, make, carried):
    decision = reconcile_domain(take_domain_snapshot(world, UID, config, make.now))
    before = in_use(world)
    if carried is None:
        world.carry_out(decision, UID)
    else:
        world.carry_out(DomainDecision(actions=decision.actions[:carried]))
    assert before <= in_use(world), "a node is not let go while a pod holds a channel there"
    return decision


def in_use(world):
    """Labelled nodes on which a pod holds a channel of a wanted ComputeDomain."""
    domain = world.at(COMPUTE_DOMAIN, "team", "job")
    if domain is None or "deletionTimestamp" in domain["metadata"]:
        return set()
    labelled = {node["metadata"]["name"] for node in world.by(NODE, "domain", UID)}
    return labelled & {claim["metadata"]["name"] for claim in world.of(RESOURCE_CLAIM)}


def settle(world, config, make):
    for _ in range(20):
        decision = one_pass(world, config, make, None)
        if not decision.actions and decision.status is None:
            return
    raise AssertionError(f"does not settle: {decision}")


@pytest.mark.slow
@settings(max_examples=150)
@given(script=st.lists(st.tuples(EVENTS, PASSES), max_size=15))
def test_whatever_happens_it_settles_and_deletion_ends(make, settings, script):
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain())
    for what, carried in script:
        happen(world, make, what)
        one_pass(world, settings, make, carried)
    settle(world, settings, make)
    check_truth(world)
    for what in ("delete", "unuse n0", "unuse n1"):
        happen(world, make, what)
    settle(world, settings, make)
    check_nothing_left(world)


def check_truth(world):
    """The status of nodes agrees with their pods and cliques."""
    domain = world.at(COMPUTE_DOMAIN, "team", "job")
    if domain is None:
        return
    status = read_compute_domain_status(domain)
    assert status.conditions
    pods = {pod["spec"]["nodeName"] for pod in world.of(POD)}
    assert {node.name for node in status.nodes} <= pods
    if status.status is Readiness.READY:
        labelled = {node["metadata"]["name"] for node in world.by(NODE, "domain", UID)}
        assert labelled == {node.name for node in status.nodes}
        assert not {name for name in labelled if is_silent(world, name)}, "none of them is lost"
        assert status.nodes
    for found in world.of(COMPUTE_DOMAIN_CLIQUE):
        assert {daemon.node_name for daemon in read_clique(found).daemons} <= pods


def is_silent(world, name):
    return world.at(NODE, None, name)["status"]["conditions"][0]["status"] != "True"


def check_nothing_left(world):
    """Only foreign objects are left: nodes without our label, a foreign template, ending pods."""
    assert not world.of(COMPUTE_DOMAIN)
    assert not world.of(DAEMON_SET)
    assert all(not template["metadata"].get("labels") for template in world.of(RESOURCE_CLAIM_TEMPLATE))
    assert not world.by(NODE, "domain", UID)


@given(cut=st.integers(0, 8), deleted=st.booleans())
def test_every_decision_carried_out_in_part_goes_on(make, settings, cut, deleted):
    """The whole life, with the controller dying after `cut` actions of every decision it makes alone."""
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain())
    for what in ("prepare n0", "prepare n1", "daemon n0"):
        one_pass(world, settings, make, cut)
        happen(world, make, what)
    if deleted:
        happen(world, make, "delete")
    for _ in range(4):
        one_pass(world, settings, make, cut)
    settle(world, settings, make)
    if deleted:
        check_nothing_left(world)
    else:
        check_truth(world)
