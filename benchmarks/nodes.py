"""How long real nodes take: python tests/node/run.py --benchmark [--rounds N]

A control plane and two nodes (kubelet, containerd, runc) are started from nothing with
deploy/kubernetes/base on them. Then pods are made, N rounds of each kind: plain ones, pods of a new
ComputeDomain on both nodes in mode domain, in mode channel (through the webhook, which gives them one claim),
and seed 003's with four GPUs and four NICs. A row is one JSON object: seconds from `kubectl apply` until all
pods of a round are Running, and beside it the plain pods on the same kubelets. Seen by polling every 50 ms.
Between two rounds the nodes have five seconds to end what the round before left: all share this machine.

Images are imported before a node's kubelet starts, and are a row of their own.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.node.conftest import SLICES  # noqa: E402
from tests.node.nodes import NodeCluster  # noqa: E402
from tests.node.workloads import claiming, compute_domain, pod, until_gone, until_running  # noqa: E402
from tests.waiting import until_seen  # noqa: E402

EXAMPLE = ROOT / "examples/nixl-kv-transfer"
SETTLE = 5.0
DOMAIN_GOAL, CHANNEL_GOAL = 5.0, 1.0
"""Seconds: until a ComputeDomain's pods run in mode domain, and beyond a plain pod in mode channel."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="nodes-", ignore_cleanup_errors=True) as folder:
        images, containerd = (
            Path(os.environ[name]) for name in ("RACKLOOM_NODE_IMAGES", "RACKLOOM_CONTAINERD_ROOT")
        )
        began = time.monotonic()
        cluster = NodeCluster(Path(folder), images, containerd)
        try:
            cluster.start()
            _row("two nodes Ready, from nothing", [time.monotonic() - began])
            _install(cluster)
            _row("all slices published, from nothing", [time.monotonic() - began])
            measure(cluster, rounds)
        finally:
            cluster.stop()


def measure(cluster: NodeCluster, rounds: int) -> None:
    """The rows of pods."""
    names = [node.name for node in cluster.nodes]
    plain = [_timed(cluster, [pod(f"plain-{name}", node=name) for name in names]) for _ in range(rounds)]
    _row("plain pods", plain)
    domain = [_timed(cluster, *_job(f"domain-{number}", names)) for number in range(rounds)]
    _row("ComputeDomain, mode domain", domain, goal=DOMAIN_GOAL)
    cluster.kubectl("apply", "-k", str(ROOT / "deploy/kubernetes/webhook"))
    cluster.kubectl("rollout", "status", "-n", "rackloom-system", "deployment/rackloom-webhook")
    cluster.kubectl("label", "nodes", "--all", "rackloom.dev/imex-isolation=channel", "--overwrite")
    until_seen(lambda: _warm(cluster), "the cliques are warm", 120)
    channel = [
        _timed(cluster, *_job(f"channel-{number}", names, {"rackloom.dev/imex-isolation": "channel"}))
        for number in range(rounds)
    ]
    _row("ComputeDomain, mode channel", channel, goal=statistics.median(plain) + CHANNEL_GOAL)
    cluster.kubectl("label", "nodes", "--all", "rackloom.dev/imex-isolation-")
    for file in ("device-classes.yaml", "resource-claim-template-aligned.yaml"):
        cluster.kubectl("apply", "-f", str(EXAMPLE / file))
    template = "h100-4gpu-4nic-numa-aligned"
    ends = [
        _timed(cluster, [claiming(pod(f"kv-{name}", node=name), template) for name in names])
        for _ in range(rounds)
    ]
    _row("seed 003: four GPUs and four NICs a pod", ends)


def _install(cluster: NodeCluster) -> None:
    cluster.kubectl("apply", "-k", str(ROOT / "deploy/kubernetes/base"))
    wanted = SLICES * len(cluster.nodes)
    until_seen(
        lambda: len(cluster.get("resourceslices")["items"]) >= wanted, "every plugin has published", 120
    )


def _warm(cluster: NodeCluster) -> bool:
    nodes = cluster.get("nodes")["items"]
    return all("rackloom.dev/imex-channels" in node["metadata"]["labels"] for node in nodes)


def _job(name: str, nodes: list[str], labels: dict[str, str] | None = None) -> tuple[Any, ...]:
    domain = compute_domain(name, f"{name}-channel")
    domain["metadata"]["labels"] = labels or {}
    return [claiming(pod(f"{name}-{node}", node=node), f"{name}-channel") for node in nodes], domain


def _timed(cluster: NodeCluster, pods: list[dict[str, Any]], *first: dict[str, Any]) -> float:
    """Seconds until all pods run; afterwards they, and what was made with them, are gone."""
    names = [value["metadata"]["name"] for value in pods]
    began = time.monotonic()
    cluster.apply(*first, *pods)
    until_running(cluster, *names, within=120)
    taken = time.monotonic() - began
    cluster.kubectl("delete", "pod", *names, "--wait=false")
    for value in first:
        cluster.kubectl("delete", value["kind"], value["metadata"]["name"], "--timeout=60s")
    until_gone(cluster, *names)
    time.sleep(SETTLE)
    return taken


def _row(what: str, seconds: Iterable[float], goal: float | None = None) -> None:
    values = sorted(seconds)
    row: dict[str, Any] = {"what": what, "median_s": round(statistics.median(values), 2)}
    if len(values) > 1:
        row |= {"min_s": round(values[0], 2), "max_s": round(values[-1], 2), "rounds": len(values)}
    if goal is not None:
        row |= {"goal_s": round(goal, 2), "met": values[-1] <= goal}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
