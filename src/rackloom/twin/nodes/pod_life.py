"""One pod on a simulated node, from being bound to being gone.

When a pod is tried again is kubelet's rule (k8s.io/kubernetes v1.34 to v1.37, pkg/kubelet), not a pause of
our choice:

- After a failed prepare, SyncPod records an event and returns no error (kuberuntime_manager.go), so the pod
  worker takes the sync for done and queues the next one after the resync interval: 60 s, times 1 to 1.5
  (pod_workers.go, completeWork).
- A change of the pod's spec, labels or annotations syncs it at once (config.go, podsDifferSemantically). A
  change of its status does not. One that comes during a sync is handled after it.
- Between two syncs of a pod the runtime's state is listed anew, which happens once a second (GetNewerThan).
- After a failed unprepare, SyncTerminatingPod returns the error: the next one comes after 10 to 15 s.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, NotFound, Object, Rejected
from rackloom.claim.kube.kinds import EVENT, POD, RESOURCE_CLAIM
from rackloom.claim.kube.pods import claim_names, has_ended, is_ready
from rackloom.errors import Refused, Retry
from rackloom.twin.nodes.hooks import Containers, Devices
from rackloom.twin.nodes.pod_objects import (
    differs_in_meaning,
    ended_status,
    is_leaving,
    is_reserved_for,
    running_status,
    warning,
)

_RETRY_S = 1.0
"""Between attempts to write what happened to an API server that does not answer."""
_NOT_PREPARED = "FailedPrepareDynamicResources"
"""The kubelet's reason for an event about a claim that is not prepared."""
_KILLED = 137
"""The exit code of a container that was killed."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SyncTiming:
    """Seconds between two syncs of a pod. The defaults are kubelet's; a test that sets others says why."""

    resync: float = 60.0
    """After one without an error (KubeletConfiguration.syncFrequency)."""
    backoff: float = 10.0
    """After one that failed (backOffPeriod)."""
    jitter: float = 0.5
    """Either is longer by up to this part of itself."""
    relist: float = 1.0
    """Between two lists of what the container runtime runs."""


REAL_TIMING = SyncTiming()


@dataclass(frozen=True, slots=True)
class Host:
    """What all pods of a process share. `wall` is seconds since the epoch."""

    api: KubeApi
    wall: Callable[[], float]
    devices: Devices
    containers: Containers
    turns: asyncio.Semaphore
    """How many calls for pods may be under way: a heartbeat must not wait behind a thousand of them."""
    rng: random.Random
    timing: SyncTiming = REAL_TIMING
    on_resync: Callable[[Object], None] = lambda pod: None
    """Called with each pod whose claims were prepared only because the resync interval was over."""

    def jittered(self, seconds: float) -> float:
        """As long, or longer by up to the jitter."""
        return seconds * (1.0 + self.timing.jitter * self.rng.random())


class PodLife:
    """Leads one pod. `see` tells it what the API server knows; `live` does the rest.

    `claims` are those that the kubelet had prepared for it before it was restarted.
    """

    def __init__(self, host: Host, pod: Object, address: str, claims: tuple[Object, ...] = ()) -> None:
        self.claims = claims
        """What it has to give back: a kubelet keeps that on its disk."""
        self._host = host
        self._address = address
        self._leaving = asyncio.Event()
        self._seen = asyncio.Event()
        self._changed = asyncio.Event()
        self._pod = pod
        self._told = ""
        self._gone = False
        self._ready = False
        self.see(pod)

    @property
    def node(self) -> str:
        """Where the pod is."""
        name: str = self._pod["spec"]["nodeName"]
        return name

    def see(self, pod: Object) -> None:
        """Take note of the pod's state, unless a newer one is known (versions are ordered, KEP-5504)."""
        if _version(pod) < _version(self._pod):
            return
        if differs_in_meaning(self._pod, pod):
            self._changed.set()
        self._pod = pod
        self._seen.set()
        if is_leaving(pod):
            self._leaving.set()

    def see_gone(self) -> None:
        """Take note that the pod no longer exists: it was deleted by force."""
        self._gone = True
        self._leaving.set()

    async def live(self) -> None:
        """Lead the pod to its end; cancelled where the kubelet dies."""
        code = await self._until_leaving(self._start_and_run()) if not has_ended(self._pod) else None
        exit_code = _KILLED if code is None else code
        await self.give_back()
        if not has_ended(self._pod):
            await self._write(lambda pod: ended_status(pod, self._host.wall(), exit_code))
        await self._leaving.wait()
        if not self._gone:
            await self._delete()

    async def _until_leaving(self, work: Awaitable[int]) -> int | None:
        """The result of `work`, or None when the pod has to go first."""
        running = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._leaving.wait())
        try:
            await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            running.cancel()
            await asyncio.wait({running, leaving})
        return None if running.cancelled() else running.result()

    async def _start_and_run(self) -> int:
        await self._prepare()
        await self._write(lambda pod: self._running(pod, ready=False))
        async with asyncio.TaskGroup() as beside:
            keeping = beside.create_task(self._keep_ready())
            code = await self._host.containers.run(self.node, self._pod, self._become_ready)
            keeping.cancel()
        return code

    async def _become_ready(self) -> None:
        self._ready = True
        await self._write(lambda pod: self._running(pod, ready=True))

    async def _keep_ready(self) -> None:
        """Say again that the pod is ready where the node controller took it for lost in the meantime."""
        while True:
            await self._seen.wait()
            self._seen.clear()
            if self._ready and not is_ready(self._pod):
                await self._become_ready()

    def _running(self, pod: Object, *, ready: bool) -> Object:
        return running_status(pod, self._host.wall(), self._address, ready=ready)

    async def _prepare(self) -> None:
        """Ask at each sync until the pod's claims are prepared, whatever the error is."""
        is_resync = False
        while True:
            self._changed.clear()
            try:
                self.claims = await self._read_claims()
                await self._host.devices.prepare(self.node, self._pod, self.claims)
            except (Retry, Refused, KubeError) as error:
                await self._warn(str(error))
                is_resync = await self._next_sync()
            else:
                if is_resync:
                    self._host.on_resync(self._pod)
                return

    async def _next_sync(self) -> bool:
        """Until the resync interval is over (True), or something of the pod that counts has changed."""
        relisted = asyncio.create_task(asyncio.sleep(self._host.timing.relist))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._host.jittered(self._host.timing.resync)):
                    await self._changed.wait()
            await relisted
            return not self._changed.is_set()
        finally:
            relisted.cancel()

    async def _read_claims(self) -> tuple[Object, ...]:
        """The pod's claims as they are now, each reserved for it: a kubelet asks the API server itself."""
        claims = [await self._read_claim(name) for name in claim_names(self._pod)]
        return tuple(claims)

    async def _read_claim(self, name: str) -> Object:
        async with self._host.turns:
            claim = await self._host.api.get(RESOURCE_CLAIM, name, self._pod["metadata"]["namespace"])
        if not is_reserved_for(claim, self._pod):
            raise Retry(f"resource claim {name} is not reserved for this pod", after=self._host.timing.resync)
        return claim

    async def give_back(self) -> None:
        """Unprepare the claims of a pod that is gone."""
        claims = self.claims or await self._claims_left()
        while claims:
            try:
                await self._host.devices.unprepare(self.node, self._pod, claims)
            except (Retry, Refused) as error:
                await self._warn(str(error))
                await asyncio.sleep(self._host.jittered(self._host.timing.backoff))
            else:
                return

    async def _claims_left(self) -> tuple[Object, ...]:
        """What a kubelet that was restarted in between finds; a claim that is gone holds nothing."""
        namespace = self._pod["metadata"]["namespace"]
        get = partial(self._host.api.get, RESOURCE_CLAIM, namespace=namespace)
        found = [await self._insist(partial(get, name)) for name in claim_names(self._pod)]
        return tuple(claim for claim in found if claim is not None)

    async def _warn(self, message: str) -> None:
        """One event for each new message; a kubelet's recorder counts the others."""
        if message == self._told:
            return
        try:
            await self._host.api.create(EVENT, warning(self._pod, self._host.wall(), _NOT_PREPARED, message))
            self._told = message
        except KubeError:
            pass  # Told with the next failure.

    async def _write(self, status: Callable[[Object], Object]) -> None:
        """Change the pod's status, on top of whatever others wrote meanwhile."""
        while not self._gone:
            changed = {**self._pod, "status": {**self._pod.get("status", {}), **status(self._pod)}}
            write = partial(self._host.api.replace, POD, changed, subresource="status")
            with contextlib.suppress(Conflict):
                self._see_answer(await self._insist(write))
                return
            self._see_answer(await self._insist(self._read))

    async def _read(self) -> Object:
        meta = self._pod["metadata"]
        return await self._host.api.get(POD, meta["name"], meta["namespace"])

    def _see_answer(self, found: Object | None) -> None:
        if found is None or found["metadata"]["uid"] != self._pod["metadata"]["uid"]:
            self.see_gone()
        else:
            self.see(found)

    async def _delete(self) -> None:
        """Let go of the pod; one with finalizers stays until their owners are done."""
        meta = self._pod["metadata"]
        delete = partial(self._host.api.delete, POD, meta["name"], meta["namespace"])
        with contextlib.suppress(Conflict):  # Another pod has the name now.
            await self._insist(partial(delete, uid=meta["uid"], grace_seconds=0))

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """The answer of the API server, asked until it answers; None where there is no such object.

        Raises:
            Conflict: the object is not the one that was meant, or was changed since.
            Rejected: no kubelet would have asked for this.
        """
        while True:
            try:
                async with self._host.turns:
                    return await call()
            except NotFound:
                return None
            except (Conflict, Rejected):
                raise
            except KubeError:
                await asyncio.sleep(_RETRY_S)


def _version(obj: Object) -> int:
    return int(obj["metadata"]["resourceVersion"])
