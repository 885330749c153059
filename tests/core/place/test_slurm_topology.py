"""Blocks of a site, and Slurm's next topology while jobs run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.cluster.trays import PlacementSite, PlacementTray
from rackloom.core.place.slurm_topology import (
    SLURM_TAINT,
    NodeMove,
    SlurmTopology,
    next_topology,
    read_topology,
    topology_of,
    topology_of_nodes,
    topology_text,
)
from rackloom.errors import Refused

CLIQUE = "nvidia.com/gpu.clique"


def site(**cliques: str | None) -> PlacementSite:
    """`t1="a.1"`: the tray t1 in the clique a.1."""
    trays = (PlacementTray(name=name, clique=clique, gpus=4) for name, clique in cliques.items())
    return PlacementSite(tuple(trays))


def node(name: str, clique: str | None, *taints: str) -> dict[str, object]:
    labels = {} if clique is None else {CLIQUE: clique}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": [{"key": key, "effect": "NoExecute"} for key in taints]},
    }


def test_blocks_and_nodes_are_in_natural_order_whatever_the_order_of_the_trays() -> None:
    found = topology_of(site(t10="d-10.1", t9="d-9.1", t2="d-10.1", alone=None))
    assert list(found.blocks.items()) == [("d-9-1", ("t9",)), ("d-10-1", ("t2", "t10"))]
    assert found.block_size == 2
    assert topology_of(site(t2="d-10.1", t9="d-9.1", t10="d-10.1"), 18).block_size == 18


def test_two_cliques_are_never_one_block() -> None:
    with pytest.raises(Refused, match="would be one block"):
        topology_of(site(a="d-1.1", b="d.1-1"))


def test_only_tainted_nodes_are_slurms() -> None:
    nodes = [node("a", "c.1", SLURM_TAINT), node("b", "c.1"), node("c", "c.1", "other")]
    assert topology_of_nodes(nodes, taint=SLURM_TAINT).blocks == {"c-1": ("a",)}
    assert topology_of_nodes(nodes).blocks == {"c-1": ("a", "b", "c")}


def test_a_node_that_is_not_ready_or_cordoned_stays_in_its_block() -> None:
    sick = node("a", "c.1", SLURM_TAINT)
    sick["spec"] = {**sick["spec"], "unschedulable": True}  # type: ignore[dict-item]
    sick["status"] = {"conditions": [{"type": "Ready", "status": "Unknown"}]}
    assert topology_of_nodes([sick], taint=SLURM_TAINT).blocks == {"c-1": ("a",)}


def test_a_node_enters_a_block_only_when_no_job_runs_on_it() -> None:
    last = topology_of(site(a="x.1", b="x.1", c="y.1"))
    found = topology_of(site(a="x.1", b="y.1", c="y.1"))

    held = next_topology(last, found, {"b", "a"})
    assert held.topology is not None
    assert held.topology.blocks == {"x-1": ("a",), "y-1": ("c",)}
    assert held.waiting == ("b",)
    assert not held.moved

    # It still waits although only the last topology is remembered.
    assert next_topology(held.topology, found, {"b"}).waiting == ("b",)

    free = next_topology(held.topology, found, set())
    assert free.topology == found
    assert not free.waiting

    at_once = next_topology(last, found, set())
    assert at_once.topology == found
    assert at_once.moved == (NodeMove("b", "x-1", "y-1"),)


def test_what_may_be_busy_waits() -> None:
    last, found = topology_of(site(a="x.1", b="x.1")), topology_of(site(a="x.1", b="y.1"))
    assert next_topology(last, found, None).waiting == ("b",)


def test_an_emptied_topology_is_never_next() -> None:
    last = topology_of(site(a="x.1"))
    assert next_topology(last, topology_of(site(a=None)), set()).topology is None
    assert next_topology(last, topology_of(site(a="y.1")), {"a"}).topology is None


def test_a_file_of_a_person_is_not_compared_with() -> None:
    assert read_topology("- topology: nvlink\n  block: {block_sizes: [2], blocks: []}\n") is not None
    ranges = "- topology: nvlink\n  block: {block_sizes: [2], blocks: [{block: b, nodes: 'n[1-2]'}]}\n"
    for text in (ranges, "", "- topology: mine\n  flat: true\n", "{", "- 1\n- 2\n"):
        assert read_topology(text) is None


NODES = st.sampled_from([f"n{number}" for number in range(6)])
TOPOLOGIES = st.dictionaries(NODES, st.sampled_from(["x.1", "x.2", "y.1", None])).map(
    lambda cliques: topology_of(site(**cliques))
)


@given(TOPOLOGIES)
def test_what_is_written_is_read_again(topology: SlurmTopology) -> None:
    assert read_topology(topology_text(topology)) == topology


@given(TOPOLOGIES, TOPOLOGIES, st.sets(NODES))
def test_no_busy_node_ever_changes_its_block_and_idle_ones_arrive(
    last: SlurmTopology, found: SlurmTopology, busy: set[str]
) -> None:
    step = next_topology(last, found, busy)
    before, after = last.block_of, {} if step.topology is None else step.topology.block_of
    for name in busy:
        assert after.get(name) in (None, before.get(name))
    if step.topology is None:
        assert not set(found.block_of) - set(step.waiting)
        return
    assert all(step.topology.blocks.values())
    assert after == {name: block for name, block in found.block_of.items() if name not in step.waiting}
    # Once its jobs are over, one more step arrives.
    assert next_topology(step.topology, found, set()).topology == found
