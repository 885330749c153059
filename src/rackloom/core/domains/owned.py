"""The objects that a ComputeDomain must have, and the order in which they are created and taken apart.

Each required object is compared with the object under its name. The name is free, ours, taken by
another owner, or we have several objects of it. Only a free name is filled. In the other cases a
person must decide: the problem is reported and nothing is deleted.

A ComputeDomain that waits for quota (`quota`) gets none of the objects that it lacks. An evicted one is
withdrawn: its objects go and it stays. The claim template goes first and alone. Without it no more pods get
a channel, and before the daemons go, the pods are read again for one that got a channel in between.

Teardown deletes the workload template and the shared claim, then the daemons' objects, then removes
node labels. When all of them are being deleted, finalizers are removed in the same order. Each step is
decided from the existing objects, so the step at which the previous controller died does not matter. Each
waits only for objects that are already being deleted, so the last step is always reached. The DaemonSet
goes last of the daemons' objects: nothing else leads to the certificate Secrets of a ComputeDomain that is
gone.
Deletion is held back while pods hold a channel, unless an annotation allows it.
"""

from collections.abc import Iterable

import msgspec

from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ChannelClaim, ComputeDomain
from rackloom.core.cluster.names import AllocationMode, ImexIsolation, ImexMode, isolation_of
from rackloom.core.cluster.objects import (
    DAEMON_SET,
    NETWORK_POLICY,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    CreateObject,
    Object,
    ObjectWrite,
    ResourceKind,
    labels_of,
    title_of,
)
from rackloom.core.domains.manifests import (
    daemon_set,
    daemon_template,
    network_policy,
    shared_claim,
    warm_clique,
    workload_template,
)
from rackloom.core.domains.quota import QuotaState
from rackloom.core.domains.settings import ControllerSettings
from rackloom.core.domains.snapshot import (
    DomainSnapshot,
    OwnedObject,
    delete_object,
    release_finalizer,
    remove_label,
)

# Required objects.


class RequiredObject(msgspec.Struct, frozen=True, kw_only=True):
    """One required object and the objects found for it."""

    kind: ResourceKind
    wanted: Object
    ours: tuple[OwnedObject, ...]
    taken_by: OwnedObject | None
    """The object that has its name. It matters if none is ours."""

    @property
    def title(self) -> str:
        """`Kind namespace/name` of the required object."""
        return title_of(self.kind, self.wanted)

    def writes(self) -> tuple[ObjectWrite, ...]:
        """Create it if it is missing. Release one that a user deleted, so that it can be created again."""
        if self.ours:
            return tuple(
                release_finalizer(our)
                for our in self.ours
                if our.deleting and names.FINALIZER in our.finalizers
            )
        return () if self.taken_by is not None else (CreateObject(kind=self.kind, obj=self.wanted),)


def needs_daemons(domain: ComputeDomain, settings: ControllerSettings) -> bool:
    """Whether the ComputeDomain has dedicated IMEX daemons."""
    if settings.imex_mode is ImexMode.HOST_MANAGED:
        return False
    if warm_clique(domain, settings) is not None:
        return True
    return isolation_of(domain.labels, settings.isolation) is ImexIsolation.DOMAIN


def required_objects(domain: ComputeDomain, snapshot: DomainSnapshot) -> tuple[RequiredObject, ...]:
    """All objects that this ComputeDomain needs, in the order in which they are created."""
    settings = snapshot.settings
    required: list[tuple[ResourceKind, Object]] = []
    if needs_daemons(domain, settings):
        required += [
            (RESOURCE_CLAIM_TEMPLATE, daemon_template(domain, snapshot.home)),
            (NETWORK_POLICY, network_policy(domain, snapshot.home)),
            (DAEMON_SET, daemon_set(domain, settings, snapshot.home)),
        ]
    if warm_clique(domain, settings) is None and not asks_for_channels_of_others(domain, settings):
        required.append((RESOURCE_CLAIM_TEMPLATE, workload_template(domain, settings)))
        if uses_warm_clique(domain, settings):
            required.append((RESOURCE_CLAIM, shared_claim(domain)))
    return tuple(_required_object(kind, obj, snapshot) for kind, obj in required)


def asks_for_channels_of_others(domain: ComputeDomain, settings: ControllerSettings) -> bool:
    """Whether it wants all channels of a clique that it shares with other jobs.

    It gets no claim template. So its pods wait, and the status has the reason. With one they would be bound
    to nodes and fail there. A template could not be corrected either, once the ComputeDomain is labelled for
    domain mode.
    """
    return uses_warm_clique(domain, settings) and domain.allocation_mode is AllocationMode.ALL


def uses_warm_clique(domain: ComputeDomain, settings: ControllerSettings) -> bool:
    """Whether it uses a warm IMEX domain of the clique it lands in."""
    managed = settings.imex_mode is ImexMode.DRIVER_MANAGED
    return managed and not needs_daemons(domain, settings)


def _required_object(kind: ResourceKind, wanted: Object, snapshot: DomainSnapshot) -> RequiredObject:
    title = title_of(kind, wanted)
    return RequiredObject(
        kind=kind,
        wanted=wanted,
        ours=snapshot.held_of(kind, labels_of(wanted).get(names.TARGET_LABEL)),
        taken_by=next((item for item in snapshot.named if item.title == title), None),
    )


# Teardown.


def teardown_writes(snapshot: DomainSnapshot) -> tuple[ObjectWrite, ...]:
    """The next writes, none while it remains to wait for deletions.

    Each step depends on the existing objects, and never on earlier steps. So a controller that starts in the
    middle continues, and each stage waits only for objects whose deletion has begun.
    """
    workload = _deletable(snapshot, snapshot.workload_templates + snapshot.shared_claims)
    daemons = _deletable(snapshot, snapshot.daemon_objects)
    begin = (*_deletions(workload), *_deletions(daemons), *_unlabelling(snapshot))
    if begin:
        return begin
    if workload:
        return _releases(workload)
    if daemons:
        return _releases(daemons)
    if snapshot.domain_object is not None:
        return _releases((snapshot.domain_object,))
    # A living daemon would create its clique object again.
    if any(pod.alive for pod in snapshot.pods):
        return ()
    return _deletions(record.owned for record in snapshot.cliques)


def is_withdrawn(snapshot: DomainSnapshot) -> bool:
    """Whether its objects go though it stays: it is evicted, and no pod uses it."""
    return snapshot.quota.state is QuotaState.EVICTED and not channel_holders(snapshot)


def may_have_certificates(snapshot: DomainSnapshot) -> bool:
    """Whether its Secrets are made and renewed. Daemons that run need theirs while it waits for quota."""
    if snapshot.quota.state is QuotaState.WAITING:
        return any(not daemon_set.deleting for daemon_set in snapshot.held_of(DAEMON_SET))
    return not is_withdrawn(snapshot)


def withdraw_writes(snapshot: DomainSnapshot) -> tuple[ObjectWrite, ...]:
    """The next writes that take a ComputeDomain's objects apart. The last gives its quota back."""
    entries = snapshot.workload_templates + snapshot.shared_claims
    if entries:
        return _deletions(entries) or _releases(entries)
    daemons = snapshot.daemon_objects
    if begin := (*_deletions(daemons), *_unlabelling(snapshot)):
        return begin
    if daemons:
        return _releases(daemons)
    is_over = not any(pod.alive for pod in snapshot.pods)
    return (snapshot.quota.give_back,) if is_over and snapshot.quota.give_back is not None else ()


def _deletable(snapshot: DomainSnapshot, objects: tuple[OwnedObject, ...]) -> tuple[OwnedObject, ...]:
    """Objects that may be deleted. Once the ComputeDomain is gone, a label alone proves no ownership."""
    if snapshot.domain is not None:
        return objects
    return tuple(owned for owned in objects if names.FINALIZER in owned.finalizers)


def channel_users(snapshot: DomainSnapshot) -> tuple[str, ...]:
    """Pods that hold a channel of this ComputeDomain and would lose IMEX by its deletion, as namespace/name.

    A claim that was created after the deletion began does not count, or the deletion might never end.
    """
    domain = snapshot.domain
    if domain is None or domain.annotations.get(names.ALLOW_DELETION_ANNOTATION) == "true":
        return ()
    early = (claim for claim in snapshot.claims if claim.created <= domain.deleted_at)
    return _holders(early)


def channel_holders(snapshot: DomainSnapshot) -> tuple[str, ...]:
    """Pods that hold a channel of this ComputeDomain, as namespace/name."""
    return _holders(snapshot.claims)


def _holders(claims: Iterable[ChannelClaim]) -> tuple[str, ...]:
    allocated = (claim for claim in claims if claim.device is not None)
    return tuple(f"{claim.namespace}/{pod}" for claim in allocated for pod in claim.reserved_for)


def _deletions(objects: Iterable[OwnedObject]) -> tuple[ObjectWrite, ...]:
    return tuple(delete_object(owned) for owned in objects if not owned.deleting)


def _unlabelling(snapshot: DomainSnapshot) -> tuple[ObjectWrite, ...]:
    return tuple(remove_label(node, names.COMPUTE_DOMAIN_LABEL, snapshot.uid) for node in snapshot.nodes)


def _releases(objects: Iterable[OwnedObject]) -> tuple[ObjectWrite, ...]:
    return tuple(release_finalizer(owned) for owned in objects if names.FINALIZER in owned.finalizers)
