"""Membership of a clique object: indexes are unique, small and stay with their node."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import (
    ComputeDomainClique,
    ObjectRef,
    Readiness,
    clique_json,
    read_clique,
)
from rackloom.core.domains import clique
from rackloom.errors import Refused

EMPTY = ComputeDomainClique(compute_domain="cd-uid", clique_id="7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1")
NODES = st.sampled_from([f"node-{number}" for number in range(6)])
STEPS = st.lists(st.tuples(st.sampled_from(["join", "leave", "restart"]), NODES), max_size=40)


def pod(node: str, life: int = 0) -> ObjectRef:
    return ObjectRef(f"daemon-{node}-{life}", f"uid-{node}-{life}")


def enter(value: ComputeDomainClique, node: str, life: int = 0, max_nodes: int = 18) -> ComputeDomainClique:
    address = f"10.0.{life}.{node[-1]}"
    return clique.join_clique(value, node=node, ip_address=address, pod=pod(node, life), max_nodes=max_nodes)


def test_the_first_members_get_the_smallest_indexes():
    value = enter(enter(EMPTY, "node-3"), "node-1")
    assert [(daemon.node_name, daemon.index) for daemon in value.daemons] == [("node-3", 0), ("node-1", 1)]


def test_a_freed_index_is_given_to_the_next_node():
    value = enter(enter(enter(EMPTY, "node-0"), "node-1"), "node-2")
    value = enter(clique.leave_clique(value, node="node-1", pod=pod("node-1")), "node-4")
    assert value.on("node-4").index == 1


@given(STEPS)
def test_indexes_are_unique_and_never_move_while_the_node_stays(steps):
    value, life, held = EMPTY, 0, {}
    for what, node in steps:
        if what == "leave":
            value = clique.leave_clique(value, node=node, pod=pod(node, life))
            held.pop(node, None)
        else:
            life += what == "restart"
            value = enter(value, node, life)
            assert value.on(node).index == held.setdefault(node, value.on(node).index)
        assert {daemon.node_name: daemon.index for daemon in value.daemons} == held
        assert len(set(held.values())) == len(held)


@given(STEPS)
def test_joining_twice_changes_nothing(steps):
    value = EMPTY
    for what, node in steps:
        value = enter(value, node) if what != "leave" else value
        assert enter(value, node) == (value if value.on(node) else enter(value, node))
        once = enter(value, node)
        assert enter(once, node) == once


def test_a_full_clique_refuses_and_the_fix_is_named():
    value = enter(enter(EMPTY, "node-0", max_nodes=2), "node-1", max_nodes=2)
    with pytest.raises(Refused) as refused:
        enter(value, "node-2", max_nodes=2)
    assert refused.value.reason == "all 2 places of this clique's IMEX domain are taken"
    assert refused.value.nearest_fix == (
        "raise the controller's --max-nodes-per-imex-domain, or use fewer nodes of the clique"
    )
    assert enter(value, "node-2", max_nodes=3).on("node-2").index == 2


def test_an_index_beyond_the_limit_or_taken_twice_is_given_anew():
    value = enter(enter(enter(EMPTY, "node-0"), "node-1"), "node-2")
    assert (
        enter(clique.leave_clique(value, node="node-0", pod=pod("node-0")), "node-2", 1, 2).on("node-2").index
        == 0
    )
    doubled = read_clique(
        {
            "metadata": {"name": "cd-uid.a.1"},
            "daemons": [
                {"nodeName": "node-0", "ipAddress": "10.0.0.1", "cliqueID": "a.1", "index": 0},
                {"nodeName": "node-1", "ipAddress": "10.0.0.2", "cliqueID": "a.1", "index": 0},
            ],
        }
    )
    assert enter(doubled, "node-1").on("node-1").index == 1


def test_the_first_index_stays_with_its_node_when_a_smaller_one_cannot_be_had():
    value = enter(enter(EMPTY, "node-0"), "node-1")
    assert enter(value, "node-0", life=1).on("node-0").index == 0
    beyond = msgspec.structs.replace(value.on("node-1"), index=-1)
    below = msgspec.structs.replace(value, daemons=(beyond,))
    assert enter(below, "node-1").on("node-1").index == 0


def test_who_leaves_takes_only_its_own_pod_along():
    value = enter(enter(EMPTY, "node-0"), "node-1")
    left = clique.leave_clique(value, node="node-0", pod=pod("node-0"))
    assert [daemon.node_name for daemon in left.daemons] == ["node-1"]
    assert left.owners == (pod("node-1"),)


def test_a_new_address_is_not_ready_until_it_says_so():
    entered, observed = enter(EMPTY, "node-0"), {"node": "node-0", "status": Readiness.READY}
    ready = clique.with_daemon_status(entered, ip_address="10.0.0.0", **observed)
    assert clique.with_daemon_status(entered, ip_address="10.0.9.9", **observed) == entered
    assert ready.on("node-0").status is Readiness.READY
    assert enter(ready, "node-0").on("node-0").status is Readiness.READY
    assert enter(ready, "node-0", life=1).on("node-0").status is Readiness.NOT_READY


def test_entries_and_owners_without_a_living_pod_of_this_domain_go():
    value = enter(enter(enter(EMPTY, "node-0"), "node-1"), "node-1", life=1)
    kept = clique.without_stale_daemons(value, {"node-1": [pod("node-1", 1)], "node-2": [pod("node-2")]})
    assert [daemon.node_name for daemon in kept.daemons] == ["node-1"]
    assert kept.owners == (pod("node-1", 1),)


def test_a_clique_object_survives_a_read_and_a_write():
    value = enter(enter(EMPTY, "node-0"), "node-1")
    written = clique_json(value, "rackloom-imex")
    assert read_clique(written) == value
    foreign = {**written, "later": {"field": 1}}
    assert clique_json(enter(value, "node-2"), "rackloom-imex", foreign)["later"] == {"field": 1}
    assert (written["apiVersion"], written["kind"]) == (names.API_VERSION, "ComputeDomainClique")
    assert written["metadata"] == {
        "name": "cd-uid.7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1",
        "namespace": "rackloom-imex",
        "labels": {
            names.COMPUTE_DOMAIN_LABEL: "cd-uid",
            names.CLIQUE_ID_LABEL: "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1",
        },
        "ownerReferences": [
            {"apiVersion": "v1", "kind": "Pod", "name": "daemon-node-0-0", "uid": "uid-node-0-0"},
            {"apiVersion": "v1", "kind": "Pod", "name": "daemon-node-1-0", "uid": "uid-node-1-0"},
        ],
    }
    assert written["daemons"][0] == {
        "nodeName": "node-0",
        "ipAddress": "10.0.0.0",
        "cliqueID": EMPTY.clique_id,
        "index": 0,
        "status": "NotReady",
    }


def test_labels_name_domain_and_clique_and_without_them_the_name_does():
    meta = {"name": "cd-uid.a.1"}
    plain = read_clique({"metadata": meta})
    assert (plain.compute_domain, plain.clique_id) == ("cd-uid", "a.1")
    labels = {names.COMPUTE_DOMAIN_LABEL: "labelled", names.CLIQUE_ID_LABEL: "b.2"}
    labelled = read_clique({"metadata": {**meta, "labels": labels}})
    assert (labelled.compute_domain, labelled.clique_id) == ("labelled", "b.2")


def test_a_write_keeps_name_and_labels_of_others():
    read = {"metadata": {"name": "given", "namespace": "elsewhere", "labels": {"team": "x"}, "uid": "u"}}
    meta = clique_json(EMPTY, "rackloom-imex", read)["metadata"]
    assert (meta["name"], meta["namespace"], meta["uid"]) == ("given", "elsewhere", "u")
    assert meta["labels"]["team"] == "x"
    assert meta["labels"][names.COMPUTE_DOMAIN_LABEL] == "cd-uid"


@pytest.mark.parametrize("text", ["10.0.0.1", "255.255.255.255", "fd00::7", "::", "::1"])
def test_an_ip_address(text):
    assert clique.is_ip_address(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "10.0.0", "10.0.0.01", "10.0.0.256", "10.0.0.1/24", "pod.example.com", "1" * 1000),
        *("10.0.0.1\n", " 10.0.0.1", "10.0.0.1\x00", "\u0661.0.0.1"),
        *("fe80::1%eth0", "fe80::1%a\n10.0.0.66 b", "::ffff:10.0.0.1"),
    ],
)
def test_no_ip_address(text):
    assert not clique.is_ip_address(text)
