"""The objects that a ComputeDomain must have, each compared with what is there in its place.

A place is free, ours, taken by somebody else, or ours more than once. Only a free one is filled; of the other
two a person must decide, so they are told and nothing is deleted.
"""

import msgspec

from rackloom.claim.cluster.actions import Action, Create, release
from rackloom.claim.cluster.manifests import (
    daemon_set,
    daemon_template,
    network_policy,
    shared_claim,
    warm_clique,
    workload_template,
)
from rackloom.claim.cluster.settings import Settings
from rackloom.claim.cluster.snapshot import Snapshot
from rackloom.claim.cluster.things import Thing
from rackloom.claim.domain import names
from rackloom.claim.domain.isolation import ImexMode, Isolation, isolation_of
from rackloom.claim.domain.objects import AllocationMode, ComputeDomain
from rackloom.claim.kube.api import Kind, Object
from rackloom.claim.kube.kinds import DAEMON_SET, NETWORK_POLICY, RESOURCE_CLAIM, RESOURCE_CLAIM_TEMPLATE


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One wanted object and what is found for it."""

    kind: Kind
    wanted: Object
    ours: tuple[Thing, ...]
    taken_by: Thing | None
    """What has its name; of interest where none is ours."""

    @property
    def called(self) -> str:
        """Kind and name of the wanted object."""
        meta = self.wanted["metadata"]
        return f"{self.kind.kind} {meta['namespace']}/{meta['name']}"

    def filling(self) -> tuple[Action, ...]:
        """Create what is missing; let go of what somebody deleted, so that it can be created again."""
        if self.ours:
            return tuple(
                release(one) for one in self.ours if one.deleting and names.FINALIZER in one.finalizers
            )
        return () if self.taken_by is not None else (Create(kind=self.kind, obj=self.wanted),)


def needs_daemons(domain: ComputeDomain, settings: Settings) -> bool:
    """Whether the ComputeDomain has IMEX daemons of its own."""
    if settings.imex_mode is ImexMode.HOST_MANAGED:
        return False
    if warm_clique(domain, settings) is not None:
        return True
    return isolation_of(domain.labels, settings.isolation) is Isolation.DOMAIN


def slots(domain: ComputeDomain, snapshot: Snapshot, settings: Settings) -> tuple[Slot, ...]:
    """All objects that this ComputeDomain needs, in the order in which they are created."""
    wanted: list[tuple[Kind, Object]] = []
    if needs_daemons(domain, settings):
        wanted.append((RESOURCE_CLAIM_TEMPLATE, daemon_template(domain, snapshot.home)))
        wanted.append((NETWORK_POLICY, network_policy(domain, snapshot.home)))
        wanted.append((DAEMON_SET, daemon_set(domain, settings, snapshot.home)))
    if warm_clique(domain, settings) is None:
        wanted.append((RESOURCE_CLAIM_TEMPLATE, workload_template(domain, settings)))
        if shares_a_claim(domain, settings):
            wanted.append((RESOURCE_CLAIM, shared_claim(domain)))
    return tuple(_slot(kind, obj, snapshot) for kind, obj in wanted)


def shares_a_claim(domain: ComputeDomain, settings: Settings) -> bool:
    """Whether all pods of the ComputeDomain are to use one channel through one claim."""
    return uses_warm_clique(domain, settings) and domain.allocation_mode is AllocationMode.SINGLE


def uses_warm_clique(domain: ComputeDomain, settings: Settings) -> bool:
    """Whether it uses a warm IMEX domain of the clique it lands in."""
    managed = settings.imex_mode is ImexMode.DRIVER_MANAGED
    return managed and not needs_daemons(domain, settings)


def _slot(kind: Kind, wanted: Object, snapshot: Snapshot) -> Slot:
    target = wanted["metadata"]["labels"].get(names.TARGET_LABEL)
    return Slot(
        kind=kind,
        wanted=wanted,
        ours=snapshot.held_of(kind, target),
        taken_by=next((one for one in snapshot.named if _has_name_of(one, kind, wanted)), None),
    )


def _has_name_of(one: Thing, kind: Kind, wanted: Object) -> bool:
    meta = wanted["metadata"]
    return (one.kind, one.namespace, one.name) == (kind, meta["namespace"], meta["name"])
