"""Which pods of a node use which claims: what a kubelet's DRA manager keeps in a checkpoint on the disk.

A claim that several pods share is prepared for the first of them and unprepared with the last
(k8s.io/kubernetes, pkg/kubelet/cm/dra).
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from rackloom.claim.kube.api import Object
from rackloom.errors import Retry
from rackloom.twin.kubelet.claims import PodClaim, pod_claim

_AGAIN_S = 1.0


@dataclass(slots=True)
class _Entry:
    claim: PodClaim
    pods: set[str] = field(default_factory=set)
    is_prepared: bool = False


class ClaimUsers:
    """The claims of one node, by namespace and name, each with the UIDs of the pods that use it."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._met: set[str] = set()
        self._started: set[str] = set()

    def meet(self, pod: Object) -> None:
        """Note that a pod is here, though nothing may be prepared for it yet."""
        self._met.add(pod["metadata"]["uid"])

    def begin(self, pod: Object, claims: Sequence[Object]) -> list[PodClaim]:
        """Note that `pod` uses these; returns those that are to be prepared for it.

        Raises:
            Retry: another claim of such a name has not been given back yet.
        """
        self.meet(pod)
        if pod["metadata"]["uid"] in self._started:
            self._forget_what_is_prepared()
        return [entry.claim for entry in [self._use(pod, claim) for claim in claims] if not entry.is_prepared]

    def _forget_what_is_prepared(self) -> None:
        """Only a kubelet that was restarted asks for a pod again: its checkpoint has but the users."""
        self._started.clear()
        for entry in self._entries.values():
            entry.is_prepared = False

    def _use(self, pod: Object, claim: Object) -> _Entry:
        found = pod_claim(claim)
        entry = self._entries.setdefault((found.ref.namespace, found.ref.name), _Entry(found))
        if entry.claim.uid != found.uid:
            same = f"old ResourceClaim with same name {found.ref.name}"
            raise Retry(f"{same} and different UID {entry.claim.uid} still exists", after=_AGAIN_S)
        # Who went while the node was off has no reservation left; a kubelet looks for such pods every minute.
        entry.pods &= {one["uid"] for one in claim["status"].get("reservedFor") or ()}
        entry.pods.add(pod["metadata"]["uid"])
        return entry

    def note_started(self, pod: Object, claims: Iterable[PodClaim]) -> None:
        """These were prepared, which is all that the pod lacked."""
        self._started.add(pod["metadata"]["uid"])
        for claim in claims:
            self._entries[claim.ref.namespace, claim.ref.name].is_prepared = True

    def end(self, pod: Object, claims: Sequence[Object]) -> list[PodClaim]:
        """Note that `pod` no longer uses these; returns those that nobody else does: to be unprepared.

        Of those it stays a user until `forget`, so that it can be asked again.
        """
        uid, last = pod["metadata"]["uid"], []
        is_known = uid in self._met
        self._met.discard(uid)
        self._started.discard(uid)
        for claim in claims:
            entry = self._entries.get((claim["metadata"]["namespace"], claim["metadata"]["name"]))
            if entry is None and not is_known:
                last += _left_by_another_process(claim, uid)
            elif entry is not None and entry.pods == {uid}:
                last.append(entry.claim)
            elif entry is not None:
                entry.pods.discard(uid)
        return last

    def forget(self, claims: Iterable[PodClaim]) -> None:
        """These were unprepared."""
        for claim in claims:
            self._entries.pop((claim.ref.namespace, claim.ref.name), None)


def need_plugins(registered: Container[str], claims: Sequence[Object]) -> None:
    """A pod whose plugin was never there uses nothing, so that it can go without one.

    Raises:
        Retry: the driver of a claim is not registered.
    """
    for driver in sorted({driver for one in claims for driver in pod_claim(one).drivers}):
        if driver not in registered:
            raise Retry(f"DRA driver {driver} is not registered", after=_AGAIN_S)


def _left_by_another_process(claim: Object, pod: str) -> list[PodClaim]:
    """There is no file behind this, so what an earlier process prepared is known from the claim alone."""
    status = claim.get("status") or {}
    others = {one["uid"] for one in status.get("reservedFor") or ()} - {pod}
    return [] if others or "allocation" not in status else [pod_claim(claim)]
