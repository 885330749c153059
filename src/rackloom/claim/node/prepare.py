"""Preparing and unpreparing one claim, with the checkpoint that makes both safe to repeat after a crash.

`fetch_claim` reads the ResourceClaim that kubelet names and checks its UID: a claim of the same name may
have replaced it.

`ClaimPreparer.prepare` works in this order:

1. Refuse a claim that was aborted here, while its fingerprint is unchanged and less than 90 s have passed
   (twice kubelet's timeout): a prepare that overlapped the unprepare may still arrive.
2. Raise `Retry` while another claim on this node still holds a device exclusively. kubelet unprepares
   that claim.
3. Write an entry in state PrepareStarted, with the driver's `intent`, to the checkpoint.
4. Let the driver prepare, then check step 2 again: another claim may have completed in the meantime.
5. Write the CDI spec, then the entry in state PrepareCompleted.

`unprepare` marks the entry as being undone, lets the driver undo it, removes the CDI spec, and drops the
entry. An entry that had only started becomes PrepareAborted instead, for step 1.

Invariant: everything that a driver may have touched is named by an entry on disk, and the entry goes only
after the undo. So a crash is safe between any two steps. Before step 3 nothing was touched. From step 3 to
step 5 the entry is PrepareStarted: kubelet prepares again, or the sweep of `run` undoes it by its intent. A
CDI spec without a completed entry is never handed to kubelet, and is rewritten or swept. During `unprepare`
the mark keeps the claim from being counted as prepared, and kubelet repeats the call until it succeeds.

`PluginMetrics` has the names that dashboards for NVIDIA's DRA driver use. All series exist with the value
zero from the start, so that the first failure is a change and not a new series.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rackloom.claim.kube.api import KubeApi, KubeError, NotFound, Rejected
from rackloom.claim.node.cdi import CdiDirectory
from rackloom.claim.node.plugin import (
    CheckpointEntry,
    NodePlugin,
    PrepareState,
    ReadyDevice,
)
from rackloom.claim.node.storage import Checkpoint
from rackloom.core.cluster.claims import AllocatedClaim, ClaimRef, read_claim
from rackloom.core.cluster.objects import RESOURCE_CLAIM, uid_of
from rackloom.errors import Refused, Retry

OPERATIONS = ("prepare", "unprepare")
PREPARE_ERRORS = ("lock_acquire", "prepare_devices", "publish_resources")
UNPREPARE_ERRORS = ("lock_acquire", "unprepare_devices")
DURATION_BUCKETS = tuple(0.05 * 2**step for step in range(9))


class PluginMetrics:
    """Counters of one plugin on one node. Its devices are of `kinds`."""

    def __init__(self, driver: str, node: str, kinds: tuple[str, ...]) -> None:
        self.registry = CollectorRegistry()
        self._driver = driver
        self._node = node
        self._kinds = kinds
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        by_operation, by_error = ("driver", "operation"), ("driver", "error_type")
        self._requests = counter(
            "nvidia_dra_requests", "Requests of kubelet of which every claim succeeded", by_operation
        )
        self._seconds = Histogram(
            "nvidia_dra_request_duration_seconds",
            "Time to answer kubelet",
            by_operation,
            buckets=DURATION_BUCKETS,
            registry=self.registry,
        )
        self._inflight = gauge("nvidia_dra_requests_inflight", "Requests being answered", by_operation)
        devices = ("node", "driver", "device_type")
        self._devices = gauge("nvidia_dra_prepared_devices", "Devices of claims that are prepared", devices)
        self._prepare_errors = counter("nvidia_dra_node_prepare_errors", "Claims not prepared", by_error)
        self._unprepare_errors = counter(
            "nvidia_dra_node_unprepare_errors", "Claims not given back", by_error
        )
        for operation in OPERATIONS:
            for family in (self._requests, self._seconds, self._inflight):
                family.labels(driver, operation)
        for error in PREPARE_ERRORS:
            self._prepare_errors.labels(driver, error)
        for error in UNPREPARE_ERRORS:
            self._unprepare_errors.labels(driver, error)

    @contextmanager
    def request(self, operation: str) -> Iterator[None]:
        """Count and time one request while it is answered."""
        labels = (self._driver, operation)
        with self._inflight.labels(*labels).track_inprogress(), self._seconds.labels(*labels).time():
            yield

    def succeeded(self, operation: str) -> None:
        """A request was answered without an error of any claim."""
        self._requests.labels(self._driver, operation).inc()

    def failed(self, operation: str) -> None:
        """A claim was answered with an error."""
        errors = self._prepare_errors if operation == "prepare" else self._unprepare_errors
        errors.labels(self._driver, f"{operation}_devices").inc()

    def not_published(self) -> None:
        """The slices could not be brought up to date."""
        self._prepare_errors.labels(self._driver, "publish_resources").inc()

    def page(self, claims: Mapping[str, CheckpointEntry]) -> bytes:
        """The page that Prometheus reads. `claims` are the checkpoint's entries."""
        completed = [entry for entry in claims.values() if entry.state is PrepareState.COMPLETED]
        found = [device.kind for entry in completed for device in entry.devices]
        for kind in self._kinds:
            self._devices.labels(self._node, self._driver, kind).set(found.count(kind))
        return generate_latest(self.registry)


# Reading a ResourceClaim.


API_RETRY_SECONDS = 0.25


class ObsoleteClaim(Refused):
    """No pod needs this claim any more: it is gone, was replaced, or kubelet unprepared it."""


async def fetch_claim(api: KubeApi, ref: ClaimRef, driver: str) -> AllocatedClaim:
    """The claim of `ref` as the API server has it now.

    Raises `ObsoleteClaim` when it is gone or was replaced, `Refused` when it is not allocated, and `Retry`
    when the API server does not answer.
    """
    try:
        found = await api.get(RESOURCE_CLAIM, ref.name, ref.namespace)
    except NotFound as error:
        raise ObsoleteClaim(f"claim {ref} does not exist any more") from error
    except KubeError as error:
        raise api_failure(f"cannot read claim {ref}", error) from error
    if (uid := uid_of(found)) != ref.uid:
        raise ObsoleteClaim(
            f"claim {ref} got replaced: its UID is {uid}, the pod's claim was {ref.uid}",
            nearest_fix="delete the pod, so that it is scheduled with the new claim",
        )
    return read_claim(found, ref, driver)


def api_failure(doing: str, error: KubeError) -> Exception:
    """`Retry` for an answer of the API server that may change, `Refused` for one that will not."""
    if isinstance(error, Rejected):
        return Refused(f"{doing}: {error.message}", nearest_fix="give the plugin's service account its role")
    return Retry(f"{doing}: {error.message}", after=error.retry_after or API_RETRY_SECONDS)


# Preparing and unpreparing it.


ABORTED_TTL = 90.0
"""Seconds: twice kubelet's timeout. A prepare that overlapped the unprepare has ended by then."""
HELD_RETRY_SECONDS = 1.0


@dataclass(eq=False)
class ClaimPreparer:
    """Prepares and unprepares claims of one plugin, and keeps the checkpoint and the CDI specs with it."""

    plugin: NodePlugin
    checkpoint: Checkpoint
    cdi: CdiDirectory
    wall: Callable[[], float]

    def ready(self, uid: str) -> tuple[ReadyDevice, ...] | None:
        """The devices of a claim that is prepared, as the checkpoint and the CDI directory show."""
        entry = self.checkpoint.claims.get(uid)
        if entry is None or entry.state is not PrepareState.COMPLETED or entry.undoing:
            return None
        ids = [cdi_id for device in entry.devices for cdi_id in device.cdi_ids]
        return entry.devices if self.cdi.has_all(uid, ids) else None

    async def prepare(self, claim: AllocatedClaim) -> tuple[ReadyDevice, ...]:
        """Prepare a claim that is not `ready`. Raises `Retry` or `Refused`."""
        uid, known = claim.ref.uid, self.checkpoint.claims.get(claim.ref.uid)
        is_aborted = known is not None and known.state is PrepareState.ABORTED and not self._expired(known)
        if known is not None and is_aborted and known.fingerprint == claim.fingerprint:
            raise ObsoleteClaim(
                f"stale prepare: claim {claim.ref} was already aborted on this node",
                nearest_fix="delete the pod if it still waits for this claim",
            )
        self._await_devices(claim)
        intent = self.plugin.intent(claim)
        # On disk before the driver touches anything: from here on a crash is undone by this entry.
        started = CheckpointEntry(
            ref=claim.ref, state=PrepareState.STARTED, fingerprint=claim.fingerprint, record=intent
        )
        self._begin(started)
        prepared = await self.plugin.prepare(claim)
        # The attempts of two claims may overlap: the one that completes later must not share the device.
        self._await_devices(claim)
        # The spec first: a completed entry promises kubelet that its CDI ids can be resolved.
        self.cdi.write(uid, prepared)
        devices = tuple(
            ReadyDevice(
                requests=(device.result.main_request,),
                pool=device.result.pool,
                device=device.result.device,
                cdi_ids=self.cdi.ids(uid, device),
                share_id=device.result.share_id,
                admin_access=bool(device.result.admin_access),
                kind=device.kind,
            )
            for device in prepared.devices
        )
        record = {**intent, **prepared.record}
        completed = msgspec.structs.replace(
            started, state=PrepareState.COMPLETED, devices=devices, record=record
        )
        self.checkpoint.put(completed)
        return devices

    async def unprepare(self, uid: str) -> None:
        """Undo the prepare of a claim, if it is known. Raises `Retry` or `Refused`."""
        entry = self.checkpoint.claims.get(uid)
        if entry is None or entry.state is PrepareState.ABORTED:
            self.cdi.remove(uid)
            return
        self._begin(msgspec.structs.replace(entry, undoing=True))
        # Claims that have, or may soon have, devices here. One that is being unprepared does not count: two
        # of them would each leave the undo to the other.
        others = [
            other
            for other in self.checkpoint.claims.values()
            if other.ref.uid != uid and other.state is not PrepareState.ABORTED and not other.undoing
        ]
        await self.plugin.unprepare(entry, others)
        # The entry goes last: after a crash before this, kubelet's next call or the sweep undoes again.
        self.cdi.remove(uid)
        if entry.state is PrepareState.COMPLETED:
            self.checkpoint.drop(uid)
        else:
            self.checkpoint.put(
                CheckpointEntry(
                    ref=entry.ref,
                    state=PrepareState.ABORTED,
                    fingerprint=entry.fingerprint,
                    aborted_at=self.wall(),
                )
            )

    def forget_aborted(self) -> None:
        """Drop entries of aborted claims whose prepare must have ended by now."""
        for uid, entry in list(self.checkpoint.claims.items()):
            if entry.state is PrepareState.ABORTED and self._expired(entry):
                self.checkpoint.drop(uid)

    def sweep_specs(self) -> None:
        """Remove CDI specs of claims without an entry, and partial specs."""
        self.cdi.remove_partials()
        for uid in self.cdi.claims() - set(self.checkpoint.claims):
            self.cdi.remove(uid)

    def _begin(self, entry: CheckpointEntry) -> None:
        """Record the attempt before it starts."""
        if self.checkpoint.claims.get(entry.ref.uid) != entry:
            self.checkpoint.put(entry)

    def _expired(self, entry: CheckpointEntry) -> bool:
        return self.wall() - (entry.aborted_at or 0.0) >= ABORTED_TTL

    def _await_devices(self, claim: AllocatedClaim) -> None:
        """A device that another claim still has will be free once kubelet has unprepared that one."""
        wanted = {
            (result.pool, result.device)
            for result in claim.results
            if not result.admin_access and result.share_id is None
        }
        for holder in self.checkpoint.claims.values():
            if holder.state is not PrepareState.COMPLETED or holder.ref.uid == claim.ref.uid:
                continue
            for device in holder.devices:
                is_exclusive = not device.admin_access and device.share_id is None
                if is_exclusive and (device.pool, device.device) in wanted:
                    raise Retry(
                        f"device {device.device} is still held by claim {holder.ref} on this node",
                        after=HELD_RETRY_SECONDS,
                    )
