"""Allocates the claims of scenario files one by one and prints how fast, one JSON object per scenario.

    python benchmarks/claims.py SCENARIO...
    python benchmarks/claims.py --cluster NODES
    python benchmarks/claims.py --quick

The second form places eight claims of one GPU for each of NODES nodes (azure-nd96isr-h100-v5), as `rackloom
claim allocate` does, and prints the CPU time. The third does so for 40 nodes and for 160 in turn, for the
growth of a claim's cost, and runs one generated scenario.

A SCENARIO is a file, or a folder of *.json files. Each runs in a process of its own, for peak_mib's sake.
A scenario with `nodes` is filled pod by pod (each claim is a pod, on the first node that can serve it): what
is measured is `Fleet.place`, the set-up for the first pod included. A scenario with `node` is one call of
`allocate`. pods_per_s counts attempts; refusal_ms is the mean time to refuse the last claim once the nodes
have nothing left for it.
"""

import json
import resource
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import claim_scenarios
import msgspec

from rackloom.core.allocate.allocator import allocate
from rackloom.core.allocate.driver_slices import device_classes, slices_of
from rackloom.core.allocate.fleet import Fleet
from rackloom.core.allocate.inputs import Features
from rackloom.core.allocate.objects import DeviceClass, Node, ResourceClaim, ResourceSlice
from rackloom.core.allocate.outcome import Allocation
from rackloom.core.allocate.planning import PlacedClaim, allocate_each
from rackloom.topology.profiles import load_machine


def measured(scenario: dict[str, Any]) -> dict[str, Any]:
    """The figures of one scenario."""
    nodes = msgspec.convert(scenario.get("nodes") or [scenario["node"]], list[Node])
    classes = msgspec.convert(scenario["classes"], list[DeviceClass])
    slices = msgspec.convert(scenario["slices"], list[ResourceSlice])
    claims = msgspec.convert(scenario["claims"], list[ResourceClaim])
    features = msgspec.convert(scenario["features"], Features)
    start = time.perf_counter()
    if "nodes" in scenario:
        fleet = Fleet(nodes, classes, slices, features=features)
        times, found = zip(
            *(timed(lambda asked=claim: fleet.place([asked])) for claim in claims), strict=True
        )
        total = time.perf_counter() - start
        while isinstance(fleet.place([claims[-1]]), Allocation):
            pass
        refusals = [timed(lambda: fleet.place([claims[-1]]))[0] for _ in range(100)]
    else:
        times, found = zip(
            timed(lambda: allocate(nodes[0], classes, slices, claims, features=features)), strict=True
        )
        total = time.perf_counter() - start
        refusals = [] if isinstance(found[0], Allocation) else list(times)
    ordered = sorted(times)
    return {
        "scenario": scenario["name"],
        "pods_per_s": round(len(times) / total, 1),
        "p50_ms": round(ordered[len(ordered) // 2] * 1e3, 4),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1e3, 4),
        "refusal_ms": round(sum(refusals) / len(refusals) * 1e3, 4) if refusals else None,
        "allocated": sum(isinstance(answer, Allocation) for answer in found),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def claims_on_cluster(count: int) -> dict[str, Any]:
    """The CPU time of `allocate_each` for claims that fill `count` nodes."""
    machine = load_machine("azure-nd96isr-h100-v5")
    names = [f"node-{number}" for number in range(count)]
    slices = [slice_ for name in names for slice_ in slices_of(machine, name)]
    nodes = msgspec.convert([{"metadata": {"name": name}} for name in names], list[Node])
    ask = {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": 1}
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": ask}]}}
    written = [{"metadata": {"name": f"claim-{number}"}, "spec": spec} for number in range(8 * count)]
    claims = msgspec.convert(written, list[ResourceClaim])
    start = time.process_time()
    answers = allocate_each(nodes, device_classes(), slices, claims)
    spent = time.process_time() - start
    placed = sum(isinstance(answer, PlacedClaim) for answer in answers)
    return {"nodes": count, "claims": len(claims), "placed": placed, "cpu_s": round(spent, 4)}


def timed(call: Any) -> tuple[float, Any]:
    """Seconds, and what the call returned."""
    start = time.perf_counter()
    answer = call()
    return time.perf_counter() - start, answer


def files(names: list[str]) -> list[Path]:
    """The files, and those in the folders by name."""
    paths = map(Path, names)
    return [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]


def run_file(path: Path) -> None:
    """Print the figures of one file."""
    run(json.loads(path.read_text()))


def run(scenario: dict[str, Any]) -> None:
    """Print the figures of one scenario."""
    print(json.dumps(measured(scenario)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cluster"]:
        print(json.dumps(claims_on_cluster(int(sys.argv[2]))))
        sys.exit()
    if sys.argv[1:2] == ["--quick"]:
        for count in (40, 160) * 5:
            print(json.dumps(claims_on_cluster(count)), flush=True)
        run(claim_scenarios.written("memory", 20, 50))
        sys.exit()
    for name in files(sys.argv[1:]):
        process = get_context("spawn").Process(target=run_file, args=(name,))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{name}: the measurement ended with {process.exitcode}")
