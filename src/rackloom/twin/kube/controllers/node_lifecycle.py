"""The node controller: a node whose heartbeat stopped is unknown and takes no pods.

Its pods stay where they are: eviction after tolerationSeconds is not simulated.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import KubeError, Object
from rackloom.claim.kube.timestamps import whole_time
from rackloom.twin.kube.direct import DirectApi
from rackloom.twin.kube.server import FakeKube

LOOK_SECONDS = 5.0
"""kube-controller-manager's --node-monitor-period."""
LEASE_NAMESPACE = "kube-node-lease"
UNREACHABLE = "node.kubernetes.io/unreachable"
_EFFECTS = ("NoSchedule", "NoExecute")


class NodeLifecycle:
    """Compares each node's lease with the time. `wall` is seconds since the epoch."""

    def __init__(self, kube: FakeKube, wall: Callable[[], float]) -> None:
        self._store = kube.store
        self._api = DirectApi(kube, "kube-controller-manager")
        self._wall = wall

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Look at every node once."""
        for node in self._store.all(kinds.NODE):
            name = node["metadata"]["name"]
            lease = self._store.find(kinds.LEASE, (LEASE_NAMESPACE, name))
            if lease is None:
                continue
            with suppress(KubeError):
                await self._judge(node, silent=is_late(lease, self._wall()))

    async def _judge(self, node: Object, *, silent: bool) -> None:
        if silent and _ready_status(node) != "Unknown":
            await self._say_unknown(node)
        if silent != _is_tainted(node):
            others = [one for one in node.get("spec", {}).get("taints") or () if one["key"] != UNREACHABLE]
            ours = [{"key": UNREACHABLE, "effect": effect} for effect in _EFFECTS] if silent else []
            patch = {"spec": {"taints": others + ours}}
            await self._api.patch(kinds.NODE, node["metadata"]["name"], None, patch)

    async def _say_unknown(self, node: Object) -> None:
        since = whole_time(self._wall())
        others = [one for one in node["status"]["conditions"] if one["type"] != "Ready"]
        told = {
            "type": "Ready",
            "status": "Unknown",
            "reason": "NodeStatusUnknown",
            "message": "Kubelet stopped posting node status.",
            "lastTransitionTime": since,
        }
        patch = {"status": {"conditions": [*others, told]}}
        await self._api.patch(kinds.NODE, node["metadata"]["name"], None, patch, subresource="status")


def is_late(lease: Object, now: float) -> bool:
    """Whether a heartbeat is older than it counts."""
    renewed = datetime.fromisoformat(lease["spec"]["renewTime"]).timestamp()
    return now - renewed > float(lease["spec"]["leaseDurationSeconds"])


def _ready_status(node: Object) -> str:
    conditions = node.get("status", {}).get("conditions") or ()
    return next((str(one["status"]) for one in conditions if one["type"] == "Ready"), "Unknown")


def _is_tainted(node: Object) -> bool:
    return any(one["key"] == UNREACHABLE for one in node.get("spec", {}).get("taints") or ())
