"""Making kubelet sync the pods of a node at once, where it would come back late.

kubelet calls NodePrepareResources when it syncs a pod without a sandbox. If that fails, SyncPod records the
event FailedPrepareDynamicResources and returns no error, so the pod is tried again not after 10 s but at its
next resync, after 60 to 90 s (k8s.io/kubernetes v1.34 to v1.37, kuberuntime_manager.go and pod_workers.go,
completeWork). A change of the pod's annotations syncs it at once (config.go, podsDifferSemantically). So
`PodSync` writes the time into one annotation of the pods that can be helped now. It does so in four cases:

- A claim is prepared whose call kubelet had given up.
- kubelet has registered the plugin: earlier pods failed because the driver was not registered.
- The API server answers again: kubelet could not read the pods' claims meanwhile.
- This process was stopped (SIGSTOP, a frozen cgroup) for 45 s or more: calls timed out without arriving
  here.

Nothing depends on the annotation. Where it cannot be written, pods wait for kubelet's resync.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import structlog

from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, NotFound, Rejected
from rackloom.claim.node.plugin import CheckpointEntry, PrepareState
from rackloom.claim.node.tasks import pause_until
from rackloom.core.cluster.claims import ClaimRef
from rackloom.core.cluster.metadata import full_name, is_being_deleted, name_of, namespace_of, uid_of
from rackloom.core.cluster.objects import (
    POD,
    RESOURCE_CLAIM,
    Object,
    allocated_devices,
    has_condition,
    has_pod_ended,
    metav1_micro_time,
    pod_claim_names,
)

log = structlog.get_logger(__name__)

RETRY_ANNOTATION = "rackloom.dev/prepare-retry"
"""`<time> <driver>`: no two are equal, since a write that changes nothing is no event on kubelet's watch."""
CLOCK_CHECK_SECONDS = 10.0
"""Between two checks of the clock."""
STOPPED_SECONDS = 45.0
"""kubelet's timeout of a call. A pause of `CLOCK_CHECK_SECONDS` that takes so long: the process was
stopped."""
RETRY_SECONDS = 2.0
"""Between attempts to reach an API server that does not answer and names no time."""


@dataclass(eq=False)
class PodSync:
    """The pods of one node, for the plugin of `driver`. `claims` gives what its checkpoint holds now."""

    api: KubeApi
    node: str
    driver: str
    claims: Callable[[], Mapping[str, CheckpointEntry]]
    wall: Callable[[], float]
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def wake(self) -> None:
        """Have `run` sync pods that kubelet may have failed before it could call the plugin."""
        self._wake.set()

    async def run(self) -> None:
        """Sync the waiting pods of the node whenever woken, or stopped for long; never returns."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            is_due = await pause_until(self._wake, CLOCK_CHECK_SECONDS)
            paused = loop.time() - began
            if paused >= STOPPED_SECONDS:
                log.warning("node.was-stopped", driver=self.driver, seconds=round(paused))
            if is_due or paused >= STOPPED_SECONDS:
                await self._retry(self._sync_waiting)

    async def sync_claim(self, ref: ClaimRef) -> None:
        """Sync the pods of this node that use a claim which has just been prepared."""
        await self._retry(lambda: self._sync_users(ref))

    async def _retry(self, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat `work` until it succeeds, or the API server does not allow it."""
        while True:
            try:
                await work()
            except Rejected as error:
                log.warning("node.pods-not-synced", driver=self.driver, reason=error.message)
                return
            except KubeError as error:
                await asyncio.sleep(error.retry_after or RETRY_SECONDS)
            else:
                return

    async def _sync_users(self, ref: ClaimRef) -> None:
        for pod in await self._pods(ref.namespace):
            if ref.name in pod_claim_names(pod):
                await self._sync(pod)

    async def _sync_waiting(self) -> None:
        for pod in await self._pods():
            if await self._is_waiting(pod):
                await self._sync(pod)

    async def _pods(self, namespace: str | None = None) -> list[Object]:
        """The pods of this node that may still have to start."""
        listed = await self.api.list(POD, namespace, fields=f"spec.nodeName={self.node}")
        return [pod for pod in listed.items if not has_pod_ended(pod) and not is_being_deleted(pod)]

    async def _is_waiting(self, pod: Object) -> bool:
        """Whether a pod has a claim with devices of this driver, and has not started, as far as can be seen.

        After a reboot kubelet may not have reported yet that the sandbox is gone; the checkpoint shows it
        already.
        """
        namespace, names = namespace_of(pod) or "", tuple(pod_claim_names(pod))
        states = {(claim.ref.namespace, claim.ref.name): claim.state for claim in self.claims().values()}
        ours = [states[namespace, name] for name in names if (namespace, name) in states]
        if any(state is not PrepareState.COMPLETED for state in ours):
            return True
        # kubelet makes the sandbox once all claims are prepared (KEP-3085).
        if has_condition(pod, "PodReadyToStartContainers"):
            return False
        return bool(ours) or any([await self._is_ours(namespace, name) for name in names])

    async def _is_ours(self, namespace: str, name: str) -> bool:
        try:
            claim = await self.api.get(RESOURCE_CLAIM, name, namespace)
        except NotFound:
            return False
        return any(device["driver"] == self.driver for device in allocated_devices(claim))

    async def _sync(self, pod: Object) -> None:
        """Annotate the pod. The UID in the patch has the API server refuse it for another pod of the name."""
        text = f"{metav1_micro_time(self.wall())} {self.driver}"
        patch = {"metadata": {"uid": uid_of(pod), "annotations": {RETRY_ANNOTATION: text}}}
        about = {"driver": self.driver, "pod": full_name(pod)}
        try:
            await self.api.patch(POD, name_of(pod), namespace_of(pod), patch)
        except (NotFound, Conflict):
            return
        except Rejected as error:
            log.warning("node.pod-not-synced", **about, reason=error.message)
        else:
            log.info("node.pod-synced", **about)
