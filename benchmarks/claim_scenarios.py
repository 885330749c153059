"""Claims on which remembering answers helps little. Prints pods per CPU second, one JSON object a row.

    python benchmarks/claim_scenarios.py [NODES [PODS]] [--quick]
    python benchmarks/claim_scenarios.py --grow [NODES ...]     memory and growth: 1000, 5000 and 20000 nodes

Each scenario places PODS pods on NODES nodes of eight GPUs (or four NICs) whose attributes all differ:

- selectors: each pod has a selector that no pod had before;
- uuid: each pod selects one GPU by its UUID, in random order;
- sizes: each pod takes one of 199 bandwidths of a shared NIC, and after half of them pods also end;
- memory: all pods ask for any GPU, the memory of GPUs differs within each node;
- shapes: one of 40 selectors, nodes of two to ten GPUs, and after a third of them pods also end.

The set-up of the fleet counts, reading the objects does not.

With --grow, each size is a process of its own. Nodes have two to ten GPUs, every second one also four shared
NICs, and 2,000 pods ask in turn for what these scenarios ask for. Slices are read one after another, as
`rackloom claim` reads them. `mib` is the memory of the process at the end, beyond what it had with everything
imported; `slices_mib` what it had beyond that when all slices were read; `peak_mib` the most that the whole
process ever had. The last row says how CPU time for a pod grows from the smallest to the largest number of
nodes: 0 if it does not, 1 if it grows as the nodes do (goal: 1.1).
"""

import argparse
import gc
import json
import math
import random
import resource
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.eligibility import compiled
from rackloom.core.allocate.fleet import Fleet
from rackloom.core.allocate.inputs import Features
from rackloom.core.allocate.objects import DeviceClass, Node, ResourceClaim, ResourceSlice
from rackloom.core.allocate.outcome import Allocation, Outcome
from rackloom.core.allocate.sharing import SharedParts

GPU, NIC = "gpu.example.com", "nic.example.com"
MODELS = ("h100", "h200", "b200", "gb200")
NEVER = 1 << 30
"""No pod ends."""
Fields = dict[str, Any]


def gpu(node: int, at: int, rng: random.Random) -> Fields:
    """A GPU that differs from all others."""
    return {
        "name": f"d{at}",
        "attributes": {
            "uuid": {"string": f"GPU-{node}-{at}"},
            "serial": {"int": rng.randrange(100_000)},
            "model": {"string": rng.choice(MODELS)},
        },
        "capacity": {"memory": {"value": f"{rng.choice([80, 141, 180, 192])}Gi"}},
    }


def nic(_: int, at: int, rng: random.Random) -> Fields:
    """A NIC of 400 Gbit/s that pods share."""
    policy = {"default": "1G", "validRange": {"min": "1G", "step": "1G"}}
    return {
        "name": f"d{at}",
        "allowMultipleAllocations": True,
        "attributes": {"serial": {"int": rng.randrange(100_000)}},
        "capacity": {"bandwidth": {"value": "400G", "requestPolicy": policy}},
    }


def selectors(nodes: int, pods: int, rng: random.Random) -> Iterator[Fields]:
    """A selector for each pod."""
    for _ in range(pods):
        yield {"select": _serial_above(rng.randrange(100_000), rng.choice(MODELS))}


def uuid(nodes: int, pods: int, rng: random.Random) -> Iterator[Fields]:
    """A GPU for each pod."""
    for number in rng.sample(range(nodes * 8), pods):
        yield {"select": f"device.attributes['{GPU}'].uuid == 'GPU-{number // 8}-{number % 8}'"}


def sizes(nodes: int, pods: int, rng: random.Random) -> Iterator[Fields]:
    """A bandwidth for each pod."""
    for _ in range(pods):
        yield {"capacity": {"requests": {"bandwidth": f"{rng.randrange(1, 200)}G"}}}


def memory(nodes: int, pods: int, rng: random.Random) -> Iterator[Fields]:
    """Any GPU."""
    for _ in range(pods):
        yield {}


def shapes(nodes: int, pods: int, rng: random.Random) -> Iterator[Fields]:
    """One of 40 selectors."""
    forty = [_serial_above(rng.randrange(60_000), rng.choice(MODELS)) for _ in range(40)]
    for _ in range(pods):
        yield {"select": rng.choice(forty)}


def _serial_above(serial: int, model: str) -> str:
    attributes = f"device.attributes['{GPU}']"
    return f"{attributes}.serial > {serial} && {attributes}.model in ['{model}', 'b200']"


SCENARIOS: dict[str, Any] = {
    "selectors": (selectors, GPU, gpu, (8, 8), NEVER),
    "uuid": (uuid, GPU, gpu, (8, 8), NEVER),
    "sizes": (sizes, NIC, nic, (4, 4), 2),
    "memory": (memory, GPU, gpu, (8, 8), NEVER),
    "shapes": (shapes, GPU, gpu, (2, 10), 3),
}


def written(name: str, nodes: int, pods: int) -> Fields:
    """A scenario as JSON values, in the form that `claims.py` reads.

    `releases` has, for each claim, those that end before it.
    """
    asks, driver, device, (fewest, most), churn = SCENARIOS[name]
    rng = random.Random(7)  # noqa: S311
    names = [f"n{at:05d}" for at in range(nodes)]
    slices = []
    for number, node in enumerate(names):
        devices = [device(number, at, rng) for at in range(rng.randint(fewest, most))]
        slices.append(slice_of(f"s{number}", driver, node, devices))
    select = {"cel": {"expression": f"device.driver == '{driver}'"}}
    claims = [claim(number, ask) for number, ask in enumerate(asks(nodes, pods, rng))]
    releases: list[list[int]] = []
    live: list[int] = []
    for number in range(pods):
        ends = number > pods // churn and live
        releases.append([live.pop(rng.randrange(len(live)))] if ends else [])
        live.append(number)
    return {
        "name": name,
        "nodes": [{"metadata": {"name": node}} for node in names],
        "classes": [{"metadata": {"name": "any"}, "spec": {"selectors": [select]}}],
        "slices": slices,
        "claims": claims,
        "releases": releases,
        "features": msgspec.to_builtins(Features(compatibility_groups=False, derived_attributes=False)),
    }


def slice_of(name: str, driver: str, node: str, devices: list[Fields]) -> Fields:
    """The only slice of a pool."""
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "pool": pool, "nodeName": node, "devices": devices}
    return {"metadata": {"name": name}, "spec": spec}


def claim(number: int, ask: Fields) -> Fields:
    """A claim of one device."""
    wanted = {"deviceClassName": "any", "allocationMode": "ExactCount", "count": 1, **ask}
    if (selector := wanted.pop("select", None)) is not None:
        wanted["selectors"] = [{"cel": {"expression": selector}}]
    spec = {"devices": {"requests": [{"name": "r", "exactly": wanted}]}}
    return {"metadata": {"name": f"c{number}", "uid": f"c{number}"}, "spec": spec}


def placed(scenario: Fields, pods: int | None = None) -> tuple[list[Fields | None], float, float]:
    """Where the first `pods` claims go (None: nowhere), and the seconds of CPU and wall time that it took.

    Before a claim, those that `releases` names for it end, and the slice that `shrinks` names loses its last
    device.
    """
    nodes = msgspec.convert(scenario.get("nodes") or [scenario["node"]], list[Node])
    classes = msgspec.convert(scenario["classes"], list[DeviceClass])
    slices = msgspec.convert(scenario["slices"], list[ResourceSlice])
    claims = msgspec.convert(scenario["claims"][:pods], list[ResourceClaim])
    features = msgspec.convert(scenario["features"], Features)
    releases = scenario.get("releases") or [[]] * len(claims)
    shrinks = scenario.get("shrinks")
    held: dict[int, Allocation] = {}
    outcomes = []
    # As in a process that runs for long: what was read is no work for the garbage collector.
    gc.collect()
    gc.freeze()
    # And CEL is loaded, as it is on the side of upstream.
    compiled("true")
    cpu, wall = time.process_time(), time.perf_counter()
    fleet = Fleet(nodes, classes, slices, features=features)
    for number, wanted in enumerate(claims):
        for earlier in releases[number]:
            if earlier in held:
                fleet.release(held.pop(earlier).results)
        if shrinks:
            changed = slices[shrinks[number]]
            spec = replace(changed.spec, devices=changed.spec.devices[:-1])
            slices[shrinks[number]] = replace(changed, spec=spec)
            fleet.replace_slice(changed, slices[shrinks[number]])
        outcome = fleet.place([wanted])
        outcomes.append(outcome)
        if isinstance(outcome, Allocation):
            held[number] = outcome
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return [_place(outcome) for outcome in outcomes], cpu, wall


def _place(outcome: Outcome) -> Fields | None:
    if not isinstance(outcome, Allocation):
        return None
    given = [device for result in outcome.results for device in result.devices.results]
    devices = [[device.request, device.driver, device.pool, device.device] for device in given]
    return {"node": outcome.node, "devices": devices}


def measured(name: str, nodes: int, pods: int) -> Fields:
    """The row of one scenario."""
    places, spent, _ = placed(written(name, nodes, pods))
    return {
        "scenario": name,
        "nodes": nodes,
        "pods": pods,
        "placed": sum(place is not None for place in places),
        "pods_per_cpu_s": round(pods / spent, 1),
    }


MIXED: tuple[tuple[str, Any], ...] = (
    ("gpu", selectors),
    ("gpu", uuid),
    ("nic", sizes),
    ("gpu", memory),
    ("gpu", shapes),
)
"""What pods of a mixed fleet ask for in turn, with the class of the device."""
GROWN = [1000, 5000, 20_000]
GROWTH, MOST_MIB = 1.1, 300
"""The goals: the largest exponent, and the most memory at the largest number of nodes."""


def mixed_slices(nodes: int, rng: random.Random) -> Iterator[Fields]:
    """GPUs on each node, and NICs on every second one."""
    for number in range(nodes):
        node = f"n{number:05d}"
        gpus = [gpu(number, at, rng) for at in range(rng.randint(2, 10))]
        yield slice_of(f"g{number}", GPU, node, gpus)
        if number % 2:
            yield slice_of(f"i{number}", NIC, node, [nic(number, at, rng) for at in range(4)])


def grown(nodes: int, pods: int) -> Fields:
    """The row of a mixed fleet."""
    compiled("true")
    gc.collect()
    before = _memory_mib()
    rng, parts = random.Random(7), SharedParts()  # noqa: S311
    slices = [parts.of(msgspec.convert(each, ResourceSlice)) for each in mixed_slices(nodes, rng)]
    fleet_nodes = [msgspec.convert({"metadata": {"name": f"n{number:05d}"}}, Node) for number in range(nodes)]
    classes = [
        {
            "metadata": {"name": name},
            "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{driver}'"}}]},
        }
        for name, driver in (("gpu", GPU), ("nic", NIC))
    ]
    asks = [(name, of(nodes, pods, rng)) for name, of in MIXED]
    wanted = []
    for number in range(pods):
        name, of = asks[number % len(asks)]
        wanted.append(claim(number, {"deviceClassName": name, **next(of)}))
    claims = msgspec.convert(wanted, list[ResourceClaim])
    gc.collect()
    gc.freeze()
    read = _memory_mib()
    spent = time.process_time()
    fleet = Fleet(fleet_nodes, msgspec.convert(classes, list[DeviceClass]), slices)
    placed_pods = sum(isinstance(fleet.place([each]), Allocation) for each in claims)
    spent = time.process_time() - spent
    return {
        "scenario": "mixed",
        "nodes": nodes,
        "devices": sum(len(each.spec.devices) for each in slices),
        "pods": pods,
        "placed": placed_pods,
        "pods_per_cpu_s": round(pods / spent, 1),
        "slices_mib": round(read - before),
        "mib": round(_memory_mib() - before),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def _memory_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def print_growth(sizes: list[int], pods: int) -> None:
    """Print a row for each number of nodes, and the growth."""
    with get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        rows = []
        for nodes in sizes:
            rows.append(processes.apply(grown, (nodes, pods)))
            print(json.dumps(rows[-1]), flush=True)
    first, last = rows[0], rows[-1]
    slower = first["pods_per_cpu_s"] / last["pods_per_cpu_s"]
    exponent = round(math.log(slower) / math.log(last["nodes"] / first["nodes"]), 2)
    goals = {"goal": GROWTH, "goal_mib": MOST_MIB}
    met = exponent <= GROWTH and last["mib"] <= MOST_MIB
    print(json.dumps({"scenario": "mixed", "growth": exponent, "mib": last["mib"], **goals, "met": met}))


def main() -> None:
    """Print a row for each scenario."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nodes", nargs="?", type=int, default=1000)
    parser.add_argument("pods", nargs="?", type=int, default=500)
    parser.add_argument("--quick", action="store_true", help="50 nodes and pods: shows that it works")
    parser.add_argument("--grow", nargs="*", type=int, metavar="NODES", help="memory and growth, mixed nodes")
    asked = parser.parse_args()
    if asked.grow is not None:
        print_growth(asked.grow or GROWN, 2000)
        return
    nodes, pods = (50, 50) if asked.quick else (asked.nodes, asked.pods)
    for name in SCENARIOS:
        print(json.dumps(measured(name, nodes, pods)), flush=True)


if __name__ == "__main__":
    main()
