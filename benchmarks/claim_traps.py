"""Claims made to defeat the allocator: what makes each view, kind, index or order useless.

    python benchmarks/claim_traps.py [--quick | PODS [NODES...]]

Places PODS pods (200) on 1000 and 5000 nodes, if nothing else is said; with --quick, 20 on 50 and 200.
Prints pods per CPU second, one JSON object a row, and how CPU time grows from the smallest to the largest
number of nodes: 0 if it does not, 1 if it grows as the nodes do. More than 1.1 is `missed`. The set-up of
the fleet counts, reading the objects does not.

- unequal: each pod refuses one GPU by its UUID, so that all GPUs differ and none is pinned;
- either: each pod takes a GPU by its UUID or by its serial number;
- above: each pod asks for a serial number above a bound that only the last nodes have;
- pairs: two GPUs of one root; only the last two of a node share theirs, and all values differ;
- admin: every second pod has administrative access to two GPUs, the others fill the fleet;
- taints: each GPU has a taint of its own, each pod tolerates one, in random order;
- preferred: five alternatives, of which the last nodes have the first and all nodes have the last;
- drivers: eight drivers on each node, and claims with a request for each;
- everything: all GPUs of a node, where nodes differ in how many they have, and pods end;
- anywhere: a pool that all nodes reach;
- capacity: each pod asks for GPUs of more memory than a bound of its own;
- partitions: two partitions of one GPU (a constraint on its UUID), and pods end;
- profiles: five sizes of partitions of eight GPUs, by two counters of each GPU, and pods end;
- aligned: a GPU and a NIC of one root, where the NICs of a node stand in the opposite order;
- slices: a slice changes before each pod.
"""

import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import claim_scenarios
import msgspec

from rackloom.core.allocate.inputs import Features

GPU = "gpu.example.com"
ATTRIBUTES = f"device.attributes['{GPU}']"
Fields = dict[str, Any]


def slice_of(name: str, devices: list[Fields], *, driver: str = GPU, **spec: Any) -> Fields:
    """A slice of a node, unless `spec` says otherwise."""
    pool = {"name": name, "generation": 1, "resourceSliceCount": spec.pop("count", 1)}
    place = {} if "allNodes" in spec else {"nodeName": name}
    label = spec.pop("label", driver)
    fields = {"driver": driver, "pool": pool, "devices": devices, **place, **spec}
    return {"metadata": {"name": f"{label}-{name}"}, "spec": fields}


def gpus(node: int, rng: random.Random, count: int = 8, **more: Any) -> list[Fields]:
    """GPUs that differ from all others."""
    return [
        {
            "name": f"d{at}",
            "attributes": {
                "uuid": {"string": f"GPU-{node}-{at}"},
                "serial": {"int": node * 8 + at},
                "model": {"string": rng.choice(["h100", "h200"])},
            },
            "capacity": {"memory": {"value": f"{rng.choice([80, 141, 180, 192])}Gi"}},
            **more,
        }
        for at in range(count)
    ]


def ask(select: str | None = None, count: int = 1, **more: Any) -> Fields:
    """What a request asks for."""
    fields = {"deviceClassName": GPU, "allocationMode": "ExactCount", "count": count, **more}
    if fields["allocationMode"] == "All":
        del fields["count"]
    if select is not None:
        fields["selectors"] = [{"cel": {"expression": select}}]
    return fields


def asking(*asks: Fields, match: str | None = None) -> Fields:
    """The devices of a claim with one request for each ask."""
    requests = [{"name": f"r{number}", "exactly": each} for number, each in enumerate(asks)]
    return {"requests": requests, "constraints": [{"matchAttribute": match}] if match else []}


def plain(nodes: int, rng: random.Random) -> Iterator[Fields]:
    """Eight GPUs a node."""
    for number in range(nodes):
        yield slice_of(f"n{number}", gpus(number, rng))


def unequal(nodes: int, rng: random.Random) -> Fields:
    number = rng.randrange(nodes * 8)
    return asking(ask(f"{ATTRIBUTES}.uuid != 'GPU-{number // 8}-{number % 8}'"))


def either(nodes: int, rng: random.Random) -> Fields:
    number, serial = rng.randrange(nodes * 8), rng.randrange(nodes * 8)
    uuid = f"GPU-{number // 8}-{number % 8}"
    return asking(ask(f"{ATTRIBUTES}.uuid == '{uuid}' || {ATTRIBUTES}.serial == {serial}"))


def above(nodes: int, rng: random.Random) -> Fields:
    return asking(ask(f"{ATTRIBUTES}.serial > {nodes * 8 - 400 + rng.randrange(100)}"))


def roots(nodes: int, rng: random.Random) -> Iterator[Fields]:
    """GPUs of which only the last two of a node share a root."""
    for number in range(nodes):
        devices = gpus(number, rng)
        for at, device in enumerate(devices):
            device["attributes"]["root"] = {"string": f"{number}-{min(at, 6)}"}
        yield slice_of(f"n{number}", devices)


def pairs(nodes: int, rng: random.Random) -> Fields:
    return asking(ask(count=2), match=f"{GPU}/root")


def admin(nodes: int, rng: random.Random) -> Fields:
    return asking(ask(count=2, adminAccess=True) if rng.random() < 0.5 else ask(count=4))


def tainted(nodes: int, rng: random.Random) -> Iterator[Fields]:
    """Each GPU has a taint of its own."""
    for number in range(nodes):
        devices = gpus(number, rng)
        for at, device in enumerate(devices):
            device["taints"] = [{"key": "owner", "value": f"{number}-{at}", "effect": "NoSchedule"}]
        yield slice_of(f"n{number}", devices)


def taints(nodes: int, rng: random.Random) -> Fields:
    value = f"{rng.randrange(nodes)}-{rng.randrange(8)}"
    return asking(ask(tolerations=[{"key": "owner", "operator": "Equal", "value": value}]))


def aging(nodes: int, rng: random.Random) -> Iterator[Fields]:
    """Models by the order of nodes: the best come last."""
    for number in range(nodes):
        devices = gpus(number, rng)
        for device in devices:
            device["attributes"]["model"] = {"string": f"m{min(4, (nodes - number) // 20)}"}
        yield slice_of(f"n{number}", devices)


def preferred(nodes: int, rng: random.Random) -> Fields:
    models = [f"m{number}" for number in range(5)]
    asks = [{"name": model, **ask(f"{ATTRIBUTES}.model == '{model}'")} for model in models]
    return {"requests": [{"name": "r", "firstAvailable": asks}]}


def eight_drivers(nodes: int, rng: random.Random) -> Iterator[Fields]:
    """Two devices of each of eight drivers."""
    for number in range(nodes):
        for driver in range(8):
            yield slice_of(f"n{number}", gpus(number, rng, 2), driver=f"d{driver}.example.com")


def drivers(nodes: int, rng: random.Random) -> Fields:
    wanted = rng.sample(range(8), 8)
    return asking(*(ask(f"device.driver == 'd{driver}.example.com'") for driver in wanted))


def odd_counts(nodes: int, rng: random.Random) -> Iterator[Fields]:
    """Nodes of one to ten GPUs."""
    for number in range(nodes):
        yield slice_of(f"n{number}", gpus(number, rng, rng.randint(1, 10)))


def everything(nodes: int, rng: random.Random) -> Fields:
    return asking(ask(allocationMode="All"))


def common(nodes: int, rng: random.Random) -> Iterator[Fields]:
    """GPUs on each node, and four slices of devices that every node reaches."""
    yield from plain(nodes, rng)
    for number in range(4):
        devices = [{"name": f"far-{number}-{at}", "attributes": {"far": {"bool": True}}} for at in range(128)]
        yield slice_of("common", devices, allNodes=True, count=4, label=f"far-{number}")


def anywhere(nodes: int, rng: random.Random) -> Fields:
    return asking(ask(f"'far' in {ATTRIBUTES}"))


def capacity(nodes: int, rng: random.Random) -> Fields:
    memory = f"device.capacity['{GPU}'].memory"
    return asking(ask(f"{memory}.compareTo(quantity('{rng.randrange(80_000, 180_000)}Mi')) > 0"))


def partitioned(nodes: int, rng: random.Random) -> Iterator[Fields]:
    """Four GPUs of seven partitions each."""
    for number in range(nodes):
        sets = [{"name": f"gpu{at}", "counters": {"sm": {"value": "7"}}} for at in range(4)]
        devices = []
        for size, starts in ((1, 7), (2, 3), (3, 2), (7, 1)):
            for at in range(4):
                draws = [{"counterSet": f"gpu{at}", "counters": {"sm": {"value": str(size)}}}]
                attributes = {"uuid": {"string": f"GPU-{number}-{at}"}, "size": {"int": size}}
                devices += [
                    {"name": f"g{at}-{size}-{start}", "attributes": attributes, "consumesCounters": draws}
                    for start in range(starts)
                ]
        yield slice_of(f"n{number}", [], count=2, sharedCounters=sets, label="counters")
        yield slice_of(f"n{number}", devices, count=2)


def partitions(nodes: int, rng: random.Random) -> Fields:
    sizes = [rng.choice([1, 1, 2, 3]) for _ in range(2)]
    return asking(*(ask(f"{ATTRIBUTES}.size == {size}") for size in sizes), match=f"{GPU}/uuid")


PROFILES = {"7g": (7, 80, 1), "4g": (4, 40, 1), "3g": (3, 40, 2), "2g": (2, 20, 3), "1g": (1, 10, 7)}
"""Of each size, the slices and the memory that a partition draws, and how many a GPU has."""


def profiled(nodes: int, rng: random.Random) -> Iterator[Fields]:
    """Eight GPUs of fourteen partitions each."""
    for number in range(nodes):
        sets, devices = [], []
        for at in range(8):
            totals = {"sm": {"value": "7"}, "memory": {"value": "80Gi"}}
            sets.append({"name": f"gpu{at}", "counters": totals})
            for profile, (sm, memory, count) in PROFILES.items():
                taken = {"sm": {"value": str(sm)}, "memory": {"value": f"{memory}Gi"}}
                draws = [{"counterSet": f"gpu{at}", "counters": taken}]
                attributes = {"profile": {"string": profile}}
                devices += [
                    {"name": f"g{at}-{profile}-{of}", "attributes": attributes, "consumesCounters": draws}
                    for of in range(count)
                ]
        yield slice_of(f"n{number}", [], count=3, sharedCounters=sets, label="counters")
        yield slice_of(f"n{number}", devices[:64], count=3, label="first")
        yield slice_of(f"n{number}", devices[64:], count=3, label="second")


def profiles(nodes: int, rng: random.Random) -> Fields:
    return asking(ask(f"{ATTRIBUTES}.profile == '{rng.choice(list(PROFILES))}'"))


ROOT = "resource.kubernetes.io/pcieRoot"


def opposed(nodes: int, rng: random.Random) -> Iterator[Fields]:
    """Eight GPUs and eight NICs; the first GPU has the root of the last NIC."""
    for number in range(nodes):
        for driver, step in ((GPU, 1), ("nic.example.com", -1)):
            devices = gpus(number, rng)
            for device, root in zip(devices[::step], range(8), strict=True):
                device["attributes"][ROOT] = {"string": f"pci{root}"}
            yield slice_of(f"n{number}", devices, driver=driver)


def aligned(nodes: int, rng: random.Random) -> Fields:
    kinds = (GPU, "nic.example.com")
    return asking(*(ask(f"device.driver == '{driver}'") for driver in kinds), match=ROOT)


def any_gpu(nodes: int, rng: random.Random) -> Fields:
    return asking(ask())


Devices = Callable[[int, random.Random], Iterator[Fields]]
Asks = Callable[[int, random.Random], Fields]
SCENARIOS: dict[str, tuple[Devices, Asks, bool, bool]] = {
    "unequal": (plain, unequal, False, False),
    "either": (plain, either, False, False),
    "above": (plain, above, False, False),
    "pairs": (roots, pairs, False, False),
    "admin": (plain, admin, False, False),
    "taints": (tainted, taints, False, False),
    "preferred": (aging, preferred, False, False),
    "drivers": (eight_drivers, drivers, False, False),
    "everything": (odd_counts, everything, True, False),
    "anywhere": (common, anywhere, True, False),
    "capacity": (plain, capacity, False, False),
    "partitions": (partitioned, partitions, True, False),
    "profiles": (profiled, profiles, True, False),
    "aligned": (opposed, aligned, False, False),
    "slices": (plain, any_gpu, False, True),
}
"""Devices, claims, whether pods end, and whether a slice changes before each pod."""


def written(name: str, nodes: int, pods: int) -> Fields:
    """A scenario as JSON values, in the form that `claims.py` reads."""
    make_slices, make_ask, ending, changing = SCENARIOS[name]
    rng = random.Random(7)  # noqa: S311
    slices = list(make_slices(nodes, rng))
    asks = [make_ask(nodes, rng) for _ in range(pods)]
    shrinks = [rng.randrange(len(slices)) for _ in asks]
    releases: list[list[int]] = []
    live: list[int] = []
    for number in range(pods):
        ends = ending and len(live) > pods // 4
        releases.append([live.pop(rng.randrange(len(live)))] if ends else [])
        live.append(number)
    return {
        "name": name,
        "nodes": [{"metadata": {"name": f"n{at}"}} for at in range(nodes)],
        "classes": [{"metadata": {"name": GPU}, "spec": {}}],
        "slices": slices,
        "claims": [
            {"metadata": {"name": f"c{at}", "uid": f"c{at}"}, "spec": {"devices": ask}}
            for at, ask in enumerate(asks)
        ],
        "releases": releases,
        "shrinks": shrinks if changing else [],
        "features": msgspec.to_builtins(Features(compatibility_groups=False, derived_attributes=False)),
    }


def measured(name: str, nodes: int, pods: int) -> Fields:
    """The row of one scenario."""
    places, spent, _ = claim_scenarios.placed(written(name, nodes, pods))
    return {
        "scenario": name,
        "nodes": nodes,
        "pods": pods,
        "placed": sum(place is not None for place in places),
        "pods_per_cpu_s": round(pods / spent, 1),
    }


GOAL = 1.1
"""The largest exponent of growth."""


def growth(rows: list[Fields]) -> float:
    """The exponent by which the time for one pod grows with the number of nodes."""
    first, last = rows[0], rows[-1]
    slower = first["pods_per_cpu_s"] / last["pods_per_cpu_s"]
    return round(math.log(slower) / math.log(last["nodes"] / first["nodes"]), 2)


if __name__ == "__main__":
    numbers = [20, 50, 200] if sys.argv[1:] == ["--quick"] else [int(text) for text in sys.argv[1:]]
    fleet_sizes = numbers[1:] or [1000, 5000]
    for each in SCENARIOS:
        found = [measured(each, size, (numbers or [200])[0]) for size in fleet_sizes]
        for row in found:
            sys.stdout.write(json.dumps(row) + "\n")
        exponent = growth(found)
        row = {"scenario": each, "growth": exponent, "goal": GOAL, "missed": exponent > GOAL}
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
