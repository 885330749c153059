"""KAI at work: its pod grouper, its scheduler and its binder as processes of this machine.

Its operator, which would install them, and its admission webhooks are not there.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from tests.cluster.control_plane import ControlPlane
from tests.cluster.credentials import MASTERS
from tests.cluster.kubectl import kubectl
from tests.cluster.processes import Child, start
from tests.cluster.renderings.applied import apply, established
from tests.cluster.renderings.build import KAI, KAI_PARTS, source

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import Object, ResourceKind

POD_GROUP = ResourceKind("scheduling.run.ai", "v2alpha2", "PodGroup", "podgroups", namespaced=True)
_CRDS = (
    "kai.scheduler_topologies",
    "scheduling.run.ai_bindrequests",
    "scheduling.run.ai_podgroups",
    "scheduling.run.ai_queues",
)
_NO_ADDRESS = "0"
"""controller-runtime serves nothing there."""
_NO_PORT = "-1"
"""Go's listener refuses it, and the scheduler runs without. Otherwise it would listen on all interfaces."""
_UNLIMITED = {"quota": -1, "limit": -1, "overQuotaWeight": 1}


@contextlib.asynccontextmanager
async def kai_at_work(programs: Path, cluster: ControlPlane, api: KubeApi) -> AsyncIterator[None]:
    """The CRDs, a queue with room for everything, and the three parts."""
    crds = await asyncio.to_thread(source, KAI_PARTS, KAI) / "deployments" / "kai-scheduler" / "crds"
    for crd in _CRDS:
        await asyncio.to_thread(kubectl, cluster, "apply", "--server-side", "-f", str(crds / f"{crd}.yaml"))
    await established(api)
    await asyncio.to_thread(apply, cluster, [_queue("all"), _queue("default", parentQueue="all")])
    with contextlib.ExitStack() as running:
        for child in _started(programs, cluster):
            running.callback(child.stop)
        yield


def _queue(name: str, **more: str) -> Object:
    spec = {"resources": dict.fromkeys(("gpu", "cpu", "memory"), _UNLIMITED), **more}
    return {"apiVersion": "scheduling.run.ai/v2", "kind": "Queue", "metadata": {"name": name}, "spec": spec}


def _started(programs: Path, cluster: ControlPlane) -> Iterator[Child]:
    kubeconfig = cluster.kubeconfig("kai", MASTERS)
    quiet = (f"--metrics-bind-address={_NO_ADDRESS}", f"--health-probe-bind-address={_NO_ADDRESS}")
    deaf = (f"--plugin-server-port={_NO_PORT}", "--listen-address=127.0.0.1:0")
    for part, words in {"podgrouper": quiet, "scheduler": deaf, "binder": quiet}.items():
        # The scheduler knows no flag for it.
        command = ["env", f"KUBECONFIG={kubeconfig}", programs / part, *words]
        yield start(f"kai-{part}", command, cluster.logs)
