"""Mode best, by example: its preferences, the limits of its proofs, and its refusals."""

from typing import Any

from rackloom.core.allocate.objects import ResourceSlice
from rackloom.core.allocate.outcome import Allocation, Cost, Refusal

ROOT, NUMA = "resource.kubernetes.io/pcieRoot", "resource.kubernetes.io/numaNode"


def names(outcome: Any) -> list[str]:
    assert isinstance(outcome, Allocation)
    return [device.device for result in outcome.results for device in result.devices.results]


def machine(cluster: Any) -> list[ResourceSlice]:
    """Eight roots in two NUMA nodes, each with a GPU and a NIC. NICs are numbered against the roots."""

    def device(kind: str, number: int, root: int) -> dict[str, Any]:
        attributes = {"kind": {"string": kind}, ROOT: {"string": f"pci{root}"}, NUMA: {"int": root // 4}}
        return {"name": f"{kind}{number}", "attributes": attributes}

    return [
        cluster.slice(
            [*(device("gpu", n, n) for n in range(8)), *(device("nic", n, 7 - n) for n in range(8))]
        )
    ]


def kind(name: str) -> str:
    return f"device.attributes['d.example.com'].kind == '{name}'"


def test_a_gpu_and_a_nic_come_from_one_root_without_a_constraint(cluster: Any) -> None:
    claim = cluster.claim(
        cluster.request("gpu", select=kind("gpu")), cluster.request("nic", select=kind("nic"))
    )
    outcome = cluster.allocate(machine(cluster), claim, mode="best")
    assert names(outcome) == ["gpu0", "nic7"]
    assert outcome.optimality.cost == Cost(alternatives=0, broken=1, room=0, apart=0, unlinked=0)
    assert outcome.optimality.proved


def test_a_numa_node_that_is_in_use_is_filled_before_another_is_opened(cluster: Any) -> None:
    claim = cluster.claim(
        cluster.request("gpu", 2, select=kind("gpu")), cluster.request("nic", 2, select=kind("nic"))
    )
    held = ["gpu4", "gpu5", "nic3", "nic2"]
    outcome = cluster.allocate(machine(cluster), claim, state=cluster.in_use(*held), mode="best")
    assert names(outcome) == ["gpu6", "gpu7", "nic0", "nic1"]
    assert outcome.optimality.cost.broken == 0


def test_partitions_come_from_the_gpu_that_is_used_the_most(cluster: Any) -> None:
    sets = [{"name": f"gpu{gpu}", "counters": {"sm": {"value": "7"}}} for gpu in range(3)]
    made = [
        {
            "name": f"gpu{gpu}-{number}",
            "consumesCounters": [{"counterSet": f"gpu{gpu}", "counters": {"sm": {"value": "2"}}}],
        }
        for gpu in range(3)
        for number in range(3)
    ]
    pool = {"resourceSliceCount": 2}
    slices = [
        cluster.slice([], "counters", sharedCounters=sets, pool=pool),
        cluster.slice(made, "devices", pool=pool),
    ]
    state = cluster.in_use("gpu1-0", "gpu2-0", "gpu2-1")
    packed = cluster.allocate(slices, cluster.claim(cluster.request()), state=state, mode="best")
    assert names(packed) == ["gpu2-2"]
    two = cluster.allocate(slices, cluster.claim(cluster.request(count=2)), state=state, mode="best")
    assert names(two) == ["gpu1-1", "gpu1-2"]


def test_preferred_alternatives_come_before_everything_else(cluster: Any) -> None:
    """First fit gives r0 its first alternative and r1 and r2 their last. The sum counts."""
    devices = [{"name": f"d{n}", "attributes": {"kind": {"string": k}}} for n, k in enumerate("abcd")]
    only = [cluster.ask(select=kind(name)) for name in "abcd"]
    claim = cluster.claim(
        cluster.first_of("r0", only[0], only[1]),
        cluster.first_of("r1", only[0], only[2], only[3]),
        cluster.first_of("r2", only[2], only[3], only[1]),
    )
    slices = [cluster.slice(devices)]
    first = cluster.allocate(slices, claim)
    best = cluster.allocate(slices, claim, mode="best")
    assert names(first) == ["d0", "d2", "d3"]
    assert best.optimality.cost.alternatives == 1
    assert names(best) == ["d1", "d0", "d2"]


def test_pairs_follow_the_links(cluster: Any) -> None:
    """A ring of four GPUs, each link a clique of two: the two that are given are neighbours."""
    ring = [
        {"name": f"d{n}", "attributes": {"clique": {"ints": sorted([at, (at + 1) % 4])}}}
        for n, at in enumerate([0, 2, 1, 3])
    ]
    claim = cluster.claim(cluster.request("a"), cluster.request("b"))
    assert names(cluster.allocate([cluster.slice(ring)], claim)) == ["d0", "d1"]
    outcome = cluster.allocate([cluster.slice(ring)], claim, mode="best")
    assert outcome.optimality.cost.unlinked == 0


def test_a_large_choice_ends_and_says_that_it_is_not_proved(cluster: Any) -> None:
    devices = [
        {
            "name": f"d{n}",
            "attributes": {ROOT: {"string": f"pci{n % 37}"}, NUMA: {"int": n % 5}, "clique": {"int": n % 7}},
        }
        for n in range(128)
    ]
    slices, claim = [cluster.slice(devices)], cluster.claim(cluster.request(count=8))
    outcome = cluster.allocate(slices, claim, mode="best")
    assert len(set(names(outcome))) == 8
    assert not outcome.optimality.proved
    assert outcome.optimality.cost.unlinked < 28


def test_where_the_first_fit_refuses_best_refuses(cluster: Any) -> None:
    claim = cluster.claim(cluster.request(count=9, select=kind("gpu")))
    assert isinstance(cluster.allocate(machine(cluster), claim, mode="best"), Refusal)
