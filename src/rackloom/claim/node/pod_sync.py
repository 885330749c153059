"""Having kubelet sync pods at once that would otherwise wait for its resync.

kubelet calls `NodePrepareResources` when it syncs a pod that has no sandbox yet. If that fails, for whatever
reason, SyncPod records the event FailedPrepareDynamicResources and returns no error, so the pod is not tried
again after the 10 s of other failures, but at its next resync: after 60 to 90 s (k8s.io/kubernetes v1.34 to
v1.37, pkg/kubelet/kuberuntime/kuberuntime_manager.go and pod_workers.go, completeWork). The call itself may
take 45 s.

A change of the pod's annotations that arrives on kubelet's watch syncs the pod at once
(pkg/kubelet/config/config.go, podsDifferSemantically), or, where a sync is under way, as soon as that has
ended. So the plugin writes the time into one annotation of the pods that it can help now. It does so in four
cases:

- A claim is prepared that kubelet had gone away without (`of_claim`; `Requests` finds that out).
- kubelet has registered the plugin. Pods that came before failed with "DRA driver ... is not registered", and
  a plugin that ended in the middle of a call left its pod behind (`run`, woken by the registrar).
- The API server answers again. kubelet could not read the pods' claims meanwhile (`run`, woken by the
  publisher).
- This process was stopped (SIGSTOP, a frozen cgroup) for as long as kubelet waits for an answer. kubelet has
  given up calls meanwhile that never arrived here (`run` sees by its clock that its pause took too long).

Nothing depends on it: where the annotation cannot be written, pods wait for the resync as before.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import structlog

from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, NotFound, Object, Rejected
from rackloom.claim.kube.kinds import POD, RESOURCE_CLAIM
from rackloom.claim.kube.pods import claim_names, has_ended
from rackloom.claim.kube.timestamps import micro_time
from rackloom.claim.node.values import ClaimRef, Entry, State

log = structlog.get_logger(__name__)

ANNOTATION = "rackloom.dev/prepare-retry"
"""`<time> <driver>`: no two are equal, since a write that changes nothing is no event on kubelet's watch."""
LOOK_SECONDS = 10.0
"""Between two looks at the clock."""
STOPPED_SECONDS = 45.0
"""kubelet's timeout of a call. A pause of `LOOK_SECONDS` that takes so long: the process was stopped."""
RETRY_SECONDS = 2.0
"""Between attempts to reach an API server that does not answer and names no time."""


class PodSync:
    """The pods of one node, for the plugin of `driver`. `claims` gives what its checkpoint holds now."""

    def __init__(
        self,
        api: KubeApi,
        node: str,
        driver: str,
        claims: Callable[[], Mapping[str, Entry]],
        wall: Callable[[], float],
    ) -> None:
        self._api = api
        self._node = node
        self._driver = driver
        self._claims = claims
        self._wall = wall
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Have `run` look for pods that kubelet may have turned away before it could ask the plugin."""
        self._wake.set()

    async def run(self) -> None:
        """Sync the waiting pods of the node whenever woken, or stopped for long; never returns."""
        while True:
            await self._woken()
            self._wake.clear()
            await self._insist(self._sync_waiting)

    async def _woken(self) -> None:
        """Until woken, or until this process goes on after it was stopped for long."""
        loop = asyncio.get_running_loop()
        while not self._wake.is_set():
            began = loop.time()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._wake.wait()
            if loop.time() - began >= STOPPED_SECONDS:
                log.warning("node.was-stopped", driver=self._driver, seconds=round(loop.time() - began))
                return

    async def of_claim(self, ref: ClaimRef) -> None:
        """Sync the pods of this node that use a claim, which nobody could until now."""
        await self._insist(lambda: self._sync_users(ref))

    async def _insist(self, work: Callable[[], Awaitable[None]]) -> None:
        """Work until it is done, or the API server does not allow it."""
        while True:
            try:
                await work()
            except Rejected as error:
                log.warning("node.pods-not-synced", driver=self._driver, reason=error.message)
                return
            except KubeError as error:
                await asyncio.sleep(error.retry_after or RETRY_SECONDS)
            else:
                return

    async def _sync_users(self, ref: ClaimRef) -> None:
        for pod in await self._pods(ref.namespace):
            if ref.name in claim_names(pod):
                await self._sync(pod)

    async def _sync_waiting(self) -> None:
        for pod in await self._pods():
            if await self._waits(pod):
                await self._sync(pod)

    async def _pods(self, namespace: str | None = None) -> list[Object]:
        """The pods of this node that may still have to start."""
        listed = await self._api.list(POD, namespace, fields=f"spec.nodeName={self._node}")
        return [
            pod for pod in listed.items if not has_ended(pod) and "deletionTimestamp" not in pod["metadata"]
        ]

    async def _waits(self, pod: Object) -> bool:
        """Whether a pod has a claim with devices of this driver, and has not started, as far as can be seen.

        After a reboot kubelet may not have said yet that the sandbox is gone; the checkpoint knows already.
        """
        namespace, names = pod["metadata"]["namespace"], tuple(claim_names(pod))
        states = {(one.ref.namespace, one.ref.name): one.state for one in self._claims().values()}
        ours = [states[namespace, name] for name in names if (namespace, name) in states]
        if any(state is not State.COMPLETED for state in ours):
            return True
        if _has_sandbox(pod):
            return False
        return bool(ours) or any([await self._is_ours(namespace, name) for name in names])

    async def _is_ours(self, namespace: str, name: str) -> bool:
        try:
            claim = await self._api.get(RESOURCE_CLAIM, name, namespace)
        except NotFound:
            return False
        devices = ((claim.get("status") or {}).get("allocation") or {}).get("devices") or {}
        return any(one["driver"] == self._driver for one in devices.get("results") or ())

    async def _sync(self, pod: Object) -> None:
        """Annotate this very pod: the API server refuses a patch with the UID of another."""
        meta = pod["metadata"]
        text = f"{micro_time(self._wall())} {self._driver}"
        patch = {"metadata": {"uid": meta["uid"], "annotations": {ANNOTATION: text}}}
        about = {"driver": self._driver, "pod": f"{meta['namespace']}/{meta['name']}"}
        try:
            await self._api.patch(POD, meta["name"], meta["namespace"], patch)
        except (NotFound, Conflict):
            return
        except Rejected as error:
            log.warning("node.pod-not-synced", **about, reason=error.message)
        else:
            log.info("node.pod-synced", **about)


def _has_sandbox(pod: Object) -> bool:
    """Whether kubelet has started it, which it does once all claims are prepared (KEP-3085)."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "PodReadyToStartContainers" and one["status"] == "True" for one in conditions)
