"""What the benchmarks of node plugins share: a node with an API server and a kubelet, claims, rows."""

import sys
import time
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any

# The kubelet is that of the tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

from site_figures import load
from tests.claim.node.plugin_manager import KubeletPluginManager

from rackloom.claim.node.run import PluginDirectories, PluginHost
from rackloom.core.cluster.objects import NODE, RESOURCE_CLAIM
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.dra_manager import PodClaim, pod_claim

NODE_NAME = "bench"
NAMESPACES = ("default", "rackloom-imex")
SIMULATED = "kubelet and API server, in this process"
WRITES = ("create", "replace", "patch", "apply", "delete")


class Counting:
    """An API server's client that counts what it writes."""

    def __init__(self, api: DirectApi) -> None:
        self._api = api
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        self.writes += name in WRITES
        return getattr(self._api, name)


async def cluster() -> Counting:
    """An API server that knows the node."""
    api = Counting(DirectApi(FakeKube(namespaces=NAMESPACES, seed=1), "bench"))
    await api.create(NODE, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE_NAME}})
    return api


def host_below(root: Path) -> PluginHost:
    """Where the plugin and kubelet meet."""
    places = PluginDirectories(registry=root / "reg", plugins=root / "plug", cdi=root / "cdi")
    return PluginHost(node=NODE_NAME, boot_id="boot", directories=places, wall=time.time)


async def claim(api: Any, number: int, driver: str, device: str, config: Any = None) -> PodClaim:
    """An allocated claim for one device."""
    made = await api.create(
        RESOURCE_CLAIM,
        {
            "apiVersion": RESOURCE_CLAIM.api_version,
            "kind": "ResourceClaim",
            "metadata": {"name": f"claim-{number}", "namespace": "default"},
            "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": driver}}]}},
        },
    )
    result = {"request": "r", "driver": driver, "pool": NODE_NAME, "device": device}
    opaque = {"source": "FromClaim", "opaque": {"driver": driver, "parameters": config}}
    devices = {"results": [result], "config": [] if config is None else [opaque]}
    user = {"resource": "pods", "name": f"p-{number}", "uid": f"pod-{number}"}
    status = {"allocation": {"devices": devices}, "reservedFor": [user]}
    return pod_claim(await api.replace(RESOURCE_CLAIM, {**made, "status": status}, subresource="status"))


async def claims_measured(
    plugin: str, kubelet: KubeletPluginManager, made: Iterable[PodClaim]
) -> list[dict[str, Any]]:
    """Every claim prepared and given back, one after the other."""
    prepares, unprepares = [], []
    for claim in made:
        prepares.append(await timed(kubelet.prepare(claim)))
        unprepares.append(await timed(kubelet.unprepare(claim)))
    return [latency(plugin, "prepare", prepares), latency(plugin, "unprepare", unprepares)]


def latency(plugin: str, measure: str, times: list[float]) -> dict[str, Any]:
    """The row of many times of one thing."""
    return row(plugin, measure, claims=len(times), **percentiles(times))


async def timed(work: Awaitable[Any]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    await work
    return (time.perf_counter() - start) * 1e3


def percentiles(times: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    ordered = sorted(times)
    return {
        "p50_ms": round(ordered[len(ordered) // 2], 3),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)], 3),
    }


def row(plugin: str, measure: str, **figures: Any) -> dict[str, Any]:
    """One row."""
    return {"plugin": plugin, "measure": measure, **figures, "simulated": SIMULATED, **load()}
