"""Taking apart what a ComputeDomain had, in an order in which nothing is left behind.

Workload template, daemons, node labels; then, once all are being deleted, the finalizers in the same order.
Each step is decided from what is there, so it does not matter at which one the last controller died; and
each waits only for objects that are already being deleted, so the last one is always reached.
"""

from collections.abc import Iterable

from rackloom.claim.cluster.actions import Action, delete, release, unlabel
from rackloom.claim.cluster.snapshot import Snapshot
from rackloom.claim.cluster.things import ChannelClaim, Thing
from rackloom.claim.domain import names
from rackloom.claim.domain.objects import ComputeDomain


def teardown(snapshot: Snapshot) -> tuple[Action, ...]:
    """The next actions; none when all that remains is to see objects go."""
    workload = _ours(snapshot, snapshot.workload_templates + snapshot.shared_claims)
    daemons = _ours(snapshot, snapshot.daemon_objects)
    begin = (*_deletions(workload), *_deletions(daemons), *_unlabelling(snapshot))
    if begin:
        return begin
    if workload:
        return _releases(workload)
    if daemons:
        return _releases(daemons)
    return _last(snapshot)


def _ours(snapshot: Snapshot, things: tuple[Thing, ...]) -> tuple[Thing, ...]:
    """What may be deleted: where there is no ComputeDomain to ask, a label alone does not make it ours."""
    if snapshot.domain is not None:
        return things
    return tuple(one for one in things if names.FINALIZER in one.finalizers)


def users(snapshot: Snapshot) -> tuple[str, ...]:
    """Pods that hold a channel of this ComputeDomain and would lose IMEX by its deletion, as namespace/name.

    A claim that was made after the deletion was asked for holds nothing back: else it would never end.
    """
    domain = snapshot.domain
    if domain is None or domain.annotations.get(names.ALLOW_DELETION_ANNOTATION) == "true":
        return ()
    return tuple(
        f"{claim.thing.namespace}/{pod}"
        for claim in snapshot.claims
        if _counts(claim, domain)
        for pod in claim.reserved_for
    )


def _counts(claim: ChannelClaim, domain: ComputeDomain) -> bool:
    return claim.device is not None and claim.created <= domain.deleted_at


def _deletions(things: Iterable[Thing]) -> tuple[Action, ...]:
    return tuple(delete(one) for one in things if not one.deleting)


def _unlabelling(snapshot: Snapshot) -> tuple[Action, ...]:
    return tuple(unlabel(node, names.COMPUTE_DOMAIN_LABEL, snapshot.uid) for node in snapshot.nodes)


def _releases(things: Iterable[Thing]) -> tuple[Action, ...]:
    return tuple(release(one) for one in things if names.FINALIZER in one.finalizers)


def _last(snapshot: Snapshot) -> tuple[Action, ...]:
    thing = snapshot.domain_thing
    if thing is not None:
        return _releases((thing,))
    return _deletions(one.thing for one in snapshot.cliques if not any(pod.alive for pod in snapshot.pods))
