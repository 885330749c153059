"""The objects that a ComputeDomain must have, and the order in which they are created and taken apart.

Each required object is compared with what is found under its name. The name is free, ours, taken by
another owner, or there are several objects of ours. Only a free name is filled; in the other cases a
person must decide: the problem is reported and nothing is deleted.

Teardown deletes the workload template and the shared claim, then the daemons' objects, then removes
node labels. When all of them are being deleted, finalizers are removed in the same order. Each step is
decided from what is there, so it does not matter where the previous controller died; each waits only
for objects that are already being deleted, so the last step is always reached. The DaemonSet goes last
of the daemons' objects: nothing else leads to the certificate Secrets of a ComputeDomain that is gone.
Deletion is held back while pods hold a channel, unless an annotation allows it.
"""

from collections.abc import Iterable

import msgspec

from rackloom.core.domains import names
from rackloom.core.domains.compute_domain import AllocationMode, ComputeDomain
from rackloom.core.domains.manifests import (
    daemon_set,
    daemon_template,
    network_policy,
    shared_claim,
    warm_clique,
    workload_template,
)
from rackloom.core.domains.names import ImexIsolation, ImexMode, isolation_of
from rackloom.core.domains.settings import ControllerSettings
from rackloom.core.domains.snapshot import (
    ChannelClaim,
    DomainSnapshot,
    OwnedObject,
    delete_object,
    release_finalizer,
    remove_label,
)
from rackloom.core.kubernetes.objects import (
    DAEMON_SET,
    NETWORK_POLICY,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    CreateObject,
    Object,
    ObjectWrite,
    ResourceKind,
)

# Required objects.


class RequiredObject(msgspec.Struct, frozen=True, kw_only=True):
    """One wanted object and what is found for it."""

    kind: ResourceKind
    wanted: Object
    ours: tuple[OwnedObject, ...]
    taken_by: OwnedObject | None
    """What has its name; of interest where none is ours."""

    @property
    def called(self) -> str:
        """Kind and name of the wanted object."""
        meta = self.wanted["metadata"]
        return f"{self.kind.kind} {meta['namespace']}/{meta['name']}"

    def filling(self) -> tuple[ObjectWrite, ...]:
        """Create what is missing; let go of what somebody deleted, so that it can be created again."""
        if self.ours:
            return tuple(
                release_finalizer(our)
                for our in self.ours
                if our.deleting and names.FINALIZER in our.finalizers
            )
        return () if self.taken_by is not None else (CreateObject(kind=self.kind, obj=self.wanted),)


def needs_daemons(domain: ComputeDomain, settings: ControllerSettings) -> bool:
    """Whether the ComputeDomain has IMEX daemons of its own."""
    if settings.imex_mode is ImexMode.HOST_MANAGED:
        return False
    if warm_clique(domain, settings) is not None:
        return True
    return isolation_of(domain.labels, settings.isolation) is ImexIsolation.DOMAIN


def required_objects(
    domain: ComputeDomain, snapshot: DomainSnapshot, settings: ControllerSettings
) -> tuple[RequiredObject, ...]:
    """All objects that this ComputeDomain needs, in the order in which they are created."""
    wanted: list[tuple[ResourceKind, Object]] = []
    if needs_daemons(domain, settings):
        wanted.append((RESOURCE_CLAIM_TEMPLATE, daemon_template(domain, snapshot.home)))
        wanted.append((NETWORK_POLICY, network_policy(domain, snapshot.home)))
        wanted.append((DAEMON_SET, daemon_set(domain, settings, snapshot.home)))
    if warm_clique(domain, settings) is None:
        wanted.append((RESOURCE_CLAIM_TEMPLATE, workload_template(domain, settings)))
        if shares_one_claim(domain, settings):
            wanted.append((RESOURCE_CLAIM, shared_claim(domain)))
    return tuple(_required_object(kind, obj, snapshot) for kind, obj in wanted)


def shares_one_claim(domain: ComputeDomain, settings: ControllerSettings) -> bool:
    """Whether all pods of the ComputeDomain are to use one channel through one claim."""
    return uses_warm_clique(domain, settings) and domain.allocation_mode is AllocationMode.SINGLE


def uses_warm_clique(domain: ComputeDomain, settings: ControllerSettings) -> bool:
    """Whether it uses a warm IMEX domain of the clique it lands in."""
    managed = settings.imex_mode is ImexMode.DRIVER_MANAGED
    return managed and not needs_daemons(domain, settings)


def _required_object(kind: ResourceKind, wanted: Object, snapshot: DomainSnapshot) -> RequiredObject:
    target = wanted["metadata"]["labels"].get(names.TARGET_LABEL)
    return RequiredObject(
        kind=kind,
        wanted=wanted,
        ours=snapshot.held_of(kind, target),
        taken_by=next((one for one in snapshot.named if _has_name_of(one, kind, wanted)), None),
    )


def _has_name_of(owned_object: OwnedObject, kind: ResourceKind, wanted: Object) -> bool:
    meta = wanted["metadata"]
    return (owned_object.kind, owned_object.namespace, owned_object.name) == (
        kind,
        meta["namespace"],
        meta["name"],
    )


# Teardown.


def teardown_writes(snapshot: DomainSnapshot) -> tuple[ObjectWrite, ...]:
    """The next actions; none when all that remains is to see objects go."""
    workload = _deletable(snapshot, snapshot.workload_templates + snapshot.shared_claims)
    daemons = _deletable(snapshot, snapshot.daemon_objects)
    begin = (*_deletions(workload), *_deletions(daemons), *_unlabelling(snapshot))
    if begin:
        return begin
    if workload:
        return _releases(workload)
    if daemons:
        return _releases(daemons)
    return _last_writes(snapshot)


def _deletable(snapshot: DomainSnapshot, things: tuple[OwnedObject, ...]) -> tuple[OwnedObject, ...]:
    """What may be deleted: where there is no ComputeDomain to ask, a label alone does not make it ours."""
    if snapshot.domain is not None:
        return things
    return tuple(one for one in things if names.FINALIZER in one.finalizers)


def channel_users(snapshot: DomainSnapshot) -> tuple[str, ...]:
    """Pods that hold a channel of this ComputeDomain and would lose IMEX by its deletion, as namespace/name.

    A claim that was made after the deletion was asked for holds nothing back: else it would never end.
    """
    domain = snapshot.domain
    if domain is None or domain.annotations.get(names.ALLOW_DELETION_ANNOTATION) == "true":
        return ()
    return tuple(
        f"{claim.thing.namespace}/{pod}"
        for claim in snapshot.claims
        if _holds_back(claim, domain)
        for pod in claim.reserved_for
    )


def _holds_back(claim: ChannelClaim, domain: ComputeDomain) -> bool:
    return claim.device is not None and claim.created <= domain.deleted_at


def _deletions(things: Iterable[OwnedObject]) -> tuple[ObjectWrite, ...]:
    return tuple(delete_object(one) for one in things if not one.deleting)


def _unlabelling(snapshot: DomainSnapshot) -> tuple[ObjectWrite, ...]:
    return tuple(remove_label(node, names.COMPUTE_DOMAIN_LABEL, snapshot.uid) for node in snapshot.nodes)


def _releases(things: Iterable[OwnedObject]) -> tuple[ObjectWrite, ...]:
    return tuple(release_finalizer(one) for one in things if names.FINALIZER in one.finalizers)


def _last_writes(snapshot: DomainSnapshot) -> tuple[ObjectWrite, ...]:
    thing = snapshot.domain_thing
    if thing is not None:
        return _releases((thing,))
    return _deletions(
        clique.thing for clique in snapshot.cliques if not any(pod.alive for pod in snapshot.pods)
    )
