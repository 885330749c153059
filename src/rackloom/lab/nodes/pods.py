"""One pod on a simulated node, from being bound to being gone, by kubelet's own rules.

When a pod is tried again follows k8s.io/kubernetes v1.34 to v1.37 (pkg/kubelet), not a pause of our
choice:

- After a failed prepare, SyncPod records an event and returns no error (kuberuntime_manager.go). The
  pod worker takes the sync for done and queues the next one after the resync interval: 60 s, times 1 to
  1.5 (pod_workers.go, completeWork).
- A change of the pod's spec, labels or annotations syncs it at once (config.go,
  podsDifferSemantically). A change of its status does not. One that comes during a sync is handled
  after it.
- Between two syncs of a pod the runtime's state is listed again, once a second (GetNewerThan).
- After a failed unprepare, SyncTerminatingPod returns the error: the next one comes after 10 to 15 s.

`PodWorker` prepares the claims, writes the running status, runs the containers, unprepares the claims,
writes the final status and deletes the pod. Writes are repeated until the API server answers. Devices
and containers are behind the protocols `DeviceManager` and `ContainerRuntime`.

A pod that only the resync interval started is reported to `on_resync`: in a simulation that is a lost
wake-up.
"""

import asyncio
import contextlib
import ipaddress
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, NotFound, Rejected
from rackloom.core.cluster.objects import (
    EVENT,
    POD,
    RESOURCE_CLAIM,
    Object,
    has_pod_ended,
    is_being_deleted,
    is_pod_ready,
    metav1_time,
    pod_claim_names,
)
from rackloom.errors import Refused, Retry

# The interfaces to devices and to the container runtime.


class DeviceManager(Protocol):
    """The DRA plugins of a node."""

    async def prepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        """Prepare the pod's allocated claims. Called again after a failure, and after a restart.

        Raises:
            Retry, Refused: some claim is not prepared. As a kubelet does, the caller reports this in an event
                on the pod and calls again.
        """
        ...

    async def unprepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        """Unprepare the claims that `prepare` prepared, as they were then.

        Raises:
            Retry, Refused: something is still held. The caller tries again, and the pod stays until then.
        """
        ...


class ContainerRuntime(Protocol):
    """The container runtime of a node."""

    async def run(self, node: str, pod: Object, ready: Callable[[], Awaitable[None]]) -> int:
        """Run all containers, call `ready` when they are, return the exit code. Cancelled on deletion."""
        ...


class NoDeviceManager:
    """No plugin: a pod with claims starts at once."""

    async def prepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        """Prepare nothing."""

    async def unprepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        """Unprepare nothing."""


class IdleContainers:
    """Containers that are ready `start_s` seconds after their start and run until they are deleted."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._start_s = start_s

    async def run(self, node: str, pod: Object, ready: Callable[[], Awaitable[None]]) -> int:
        """Never returns."""
        await asyncio.sleep(self._start_s)
        await ready()
        await asyncio.Event().wait()
        return 0


# The fields of a Pod that a container runtime reads.


def rackloom_arguments(pod: Object) -> Iterator[tuple[str, ...]]:
    """The arguments with which each container runs `rackloom`, which is the program of the image, too."""
    for container in pod["spec"]["containers"]:
        words = (*container.get("command", ()), *container.get("args", ()))
        yield words[1:] if words[:1] == ("rackloom",) else words


def container_environment(pod: Object, edits: Iterable[str]) -> dict[str, str]:
    """The variables of the first container: those of the CDI specs, and those of the pod template."""
    found = dict(edit.split("=", 1) for edit in edits)
    for variable in pod["spec"]["containers"][0].get("env", ()):
        source = variable.get("valueFrom")
        if source:
            part, field = source["fieldRef"]["fieldPath"].split(".")
            found[variable["name"]] = pod[part][field]
        else:
            found[variable["name"]] = variable.get("value", "")
    return found


# The fields that kubelet reads in a Pod and writes into its status.


_POD_NETWORK = ipaddress.IPv4Address("10.0.0.0")


def has_work(pod: Object) -> bool:
    """Whether there is anything to do for a bound pod."""
    return not has_pod_ended(pod) or is_being_deleted(pod)


def is_reserved_for(claim: Object, pod: Object) -> bool:
    """Whether an allocated claim names this very pod among its users."""
    users = claim.get("status", {}).get("reservedFor", ())
    return any(user["resource"] == "pods" and user["uid"] == pod["metadata"]["uid"] for user in users)


def running_status(pod: Object, now: float, address: str, *, ready: bool) -> Object:
    """The status of a pod while all its containers run."""
    since = metav1_time(now)
    states = {"running": {"startedAt": since}}
    return {
        "phase": "Running",
        "startTime": since,
        "hostIP": "127.0.0.1",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": _kubelet_conditions(pod, since, ready=ready),
        "containerStatuses": [
            _container_status(container, states, ready=ready) for container in pod["spec"]["containers"]
        ],
    }


def ended_status(pod: Object, now: float, exit_code: int) -> Object:
    """The status of a pod after its containers ended with `exit_code`."""
    since = metav1_time(now)
    reason = "Completed" if exit_code == 0 else "Error"
    states = {"terminated": {"exitCode": exit_code, "reason": reason, "finishedAt": since}}
    return {
        "phase": "Succeeded" if exit_code == 0 else "Failed",
        "conditions": _kubelet_conditions(pod, since, ready=False),
        "containerStatuses": [
            _container_status(container, states, ready=False) for container in pod["spec"]["containers"]
        ],
    }


def warning_event(pod: Object, now: float, reason: str, message: str) -> Object:
    """A warning about a pod by the kubelet of its node."""
    meta = pod["metadata"]
    since = metav1_time(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
        "type": "Warning",
        "reason": reason,
        "message": message,
        "source": {"component": "kubelet", "host": pod["spec"]["nodeName"]},
        "reportingComponent": "kubelet",
        "reportingInstance": pod["spec"]["nodeName"],
        "firstTimestamp": since,
        "lastTimestamp": since,
        "count": 1,
    }


def pod_address(number: int) -> str:
    """The address of the n-th pod (from 1), in 10.0.0.0/8. Nothing listens there."""
    return str(_POD_NETWORK + number)


def address_number(pod: Object) -> int:
    """The n of the pod's address, or 0 while it has none."""
    address = pod.get("status", {}).get("podIP")
    return int(ipaddress.IPv4Address(address)) - int(_POD_NETWORK) if address else 0


def _kubelet_conditions(pod: Object, since: str, *, ready: bool) -> list[Object]:
    """The conditions of kubelet. Other conditions (PodScheduled, readiness gates) stay as they are."""
    ours = {"Initialized": True, "ContainersReady": ready, "Ready": ready, "PodReadyToStartContainers": True}
    kept = [
        condition
        for condition in pod.get("status", {}).get("conditions", ())
        if condition["type"] not in ours
    ]
    written = [
        {"type": name, "status": str(holds), "lastTransitionTime": since} for name, holds in ours.items()
    ]
    return [*kept, *written]


def _container_status(container: Object, state: Object, *, ready: bool) -> Object:
    return {
        "name": container["name"],
        "image": container.get("image", ""),
        "imageID": "",
        "ready": ready,
        "started": ready,
        "restartCount": 0,
        "state": state,
    }


# The pod worker.


_RETRY_S = 1.0
"""Between attempts to write to an API server that does not answer."""
_NOT_PREPARED = "FailedPrepareDynamicResources"
"""The kubelet's reason for an event about a claim that is not prepared."""
_KILLED_EXIT_CODE = 137
"""The exit code of a container that was killed."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SyncTiming:
    """Seconds between two syncs of a pod. The defaults are kubelet's. A test with others gives its reason."""

    resync: float = 60.0
    """After one without an error (KubeletConfiguration.syncFrequency)."""
    backoff: float = 10.0
    """After one that failed (backOffPeriod)."""
    jitter: float = 0.5
    """Either is longer by up to this part of itself."""
    relist: float = 1.0
    """Between two lists of the containers that the runtime runs."""


REAL_TIMING = SyncTiming()


@dataclass(frozen=True, slots=True)
class PodHost:
    """The part that all pods of a process share. `wall` is seconds since the epoch."""

    api: KubeApi
    wall: Callable[[], float]
    devices: DeviceManager
    containers: ContainerRuntime
    turns: asyncio.Semaphore
    """How many calls for pods may be under way: a heartbeat must not wait behind a thousand of them."""
    rng: random.Random
    timing: SyncTiming = REAL_TIMING
    on_resync: Callable[[Object], None] = lambda pod: None
    """Called with each pod that had its claims prepared only because the resync interval was over."""

    def jittered(self, seconds: float) -> float:
        """As long, or longer by up to the jitter."""
        return seconds * (1.0 + self.timing.jitter * self.rng.random())


class PodWorker:
    """Runs one pod: `run` takes it to its end, `update` gives it the newest object of the API server.

    `claims` are those that the kubelet had prepared for it before it was restarted.
    """

    def __init__(self, host: PodHost, pod: Object, address: str, claims: tuple[Object, ...] = ()) -> None:
        self.claims = claims
        """The claims to unprepare. Kubelet keeps them on its disk."""
        self._host = host
        self._address = address
        self._leaving = asyncio.Event()
        self._updated = asyncio.Event()
        self._changed = asyncio.Event()
        self._pod = pod
        self._warned = ""
        self._gone = False
        self._ready = False
        self.update(pod)

    @property
    def node(self) -> str:
        """The node of the pod."""
        name: str = self._pod["spec"]["nodeName"]
        return name

    def update(self, pod: Object) -> None:
        """Take note of the pod's state, unless a newer one is known (versions are ordered, KEP-5504)."""
        # Answers to our own writes and events of the watch arrive in any order.
        if _resource_version(pod) < _resource_version(self._pod):
            return
        # Whether a kubelet that knows a pod would sync it for this: its status does not count.
        if self._pod["spec"] != pod["spec"] or any(
            (self._pod["metadata"].get(part) or {}) != (pod["metadata"].get(part) or {})
            for part in ("labels", "annotations")
        ):
            self._changed.set()
        self._pod = pod
        self._updated.set()
        if is_being_deleted(pod):
            self._leaving.set()

    def note_deleted(self) -> None:
        """Take note that the pod no longer exists: it was deleted by force."""
        self._gone = True
        self._leaving.set()

    async def run(self) -> None:
        """Run the pod to its end. Cancelled if the kubelet dies."""
        code = await self._until_leaving(self._start_and_run()) if not has_pod_ended(self._pod) else None
        exit_code = _KILLED_EXIT_CODE if code is None else code
        # Kubelet unprepares before it reports the end: then the claim may go to another pod.
        await self.unprepare()
        if not has_pod_ended(self._pod):
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
            if not running.cancelled():
                running.exception()  # marks it as retrieved, if this worker is cancelled with its machine
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
        """Report readiness again after the node controller marked the pod as lost."""
        while True:
            await self._updated.wait()
            self._updated.clear()
            if self._ready and not is_pod_ready(self._pod):
                await self._become_ready()

    def _running(self, pod: Object, *, ready: bool) -> Object:
        return running_status(pod, self._host.wall(), self._address, ready=ready)

    async def _prepare(self) -> None:
        """Prepare at each sync until the pod's claims are prepared, after any error."""
        is_resync = False
        while True:
            self._changed.clear()
            try:
                # The pod's claims as they are now, each reserved for it: a kubelet reads them itself.
                claims = [await self._read_claim(name) for name in pod_claim_names(self._pod)]
                self.claims = tuple(claims)
                await self._host.devices.prepare(self.node, self._pod, self.claims)
            except (Retry, Refused, KubeError) as error:
                await self._warn(str(error))
                is_resync = await self._next_sync()
            else:
                if is_resync:
                    self._host.on_resync(self._pod)
                return

    async def _next_sync(self) -> bool:
        """Wait for the resync interval (True), or for a change of the pod that causes a sync."""
        relisted = asyncio.create_task(asyncio.sleep(self._host.timing.relist))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._host.jittered(self._host.timing.resync)):
                    await self._changed.wait()
            await relisted
            return not self._changed.is_set()
        finally:
            relisted.cancel()

    async def _read_claim(self, name: str) -> Object:
        async with self._host.turns:
            claim = await self._host.api.get(RESOURCE_CLAIM, name, self._pod["metadata"]["namespace"])
        if not is_reserved_for(claim, self._pod):
            raise Retry(f"resource claim {name} is not reserved for this pod", after=self._host.timing.resync)
        return claim

    async def unprepare(self) -> None:
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
        """The claims that a restarted kubelet finds. A deleted claim holds nothing."""
        namespace = self._pod["metadata"]["namespace"]
        get = partial(self._host.api.get, RESOURCE_CLAIM, namespace=namespace)
        found = [await self._until_answered(partial(get, name)) for name in pod_claim_names(self._pod)]
        return tuple(claim for claim in found if claim is not None)

    async def _warn(self, message: str) -> None:
        """One event for each new message. A kubelet's recorder counts the others."""
        if message == self._warned:
            return
        try:
            await self._host.api.create(
                EVENT, warning_event(self._pod, self._host.wall(), _NOT_PREPARED, message)
            )
            self._warned = message
        except KubeError:
            pass  # The next failure is reported instead.

    async def _write(self, status: Callable[[Object], Object]) -> None:
        """Change the pod's status, on top of concurrent writes by others."""
        while not self._gone:
            changed = {**self._pod, "status": {**self._pod.get("status", {}), **status(self._pod)}}
            write = partial(self._host.api.replace, POD, changed, subresource="status")
            with contextlib.suppress(Conflict):
                self._update_from(await self._until_answered(write))
                return
            self._update_from(await self._until_answered(self._read))

    async def _read(self) -> Object:
        meta = self._pod["metadata"]
        return await self._host.api.get(POD, meta["name"], meta["namespace"])

    def _update_from(self, found: Object | None) -> None:
        if found is None or found["metadata"]["uid"] != self._pod["metadata"]["uid"]:
            self.note_deleted()
        else:
            self.update(found)

    async def _delete(self) -> None:
        """Delete the pod. One with finalizers stays until their owners are done."""
        meta = self._pod["metadata"]
        delete = partial(self._host.api.delete, POD, meta["name"], meta["namespace"])
        with contextlib.suppress(Conflict):  # Another pod has the name now.
            await self._until_answered(partial(delete, uid=meta["uid"], grace_seconds=0))

    async def _until_answered(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """The answer of the API server, or None if there is no such object. Repeats until it answers.

        Raises:
            Conflict: the object is not the one that was meant, or was changed since.
            Rejected: no kubelet would have sent this.
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


def _resource_version(obj: Object) -> int:
    return int(obj["metadata"]["resourceVersion"])
