"""What keeps a ComputeDomain from being as asked, each with what to change. They heal when it is changed."""

from collections.abc import Collection

import msgspec

from rackloom.claim.cluster.settings import Settings
from rackloom.claim.cluster.slots import Slot, slots, uses_warm_clique
from rackloom.claim.cluster.snapshot import Snapshot
from rackloom.claim.domain import names
from rackloom.claim.domain.isolation import ImexMode, Isolation
from rackloom.claim.domain.objects import AllocationMode, ComputeDomain
from rackloom.claim.kube.kinds import RESOURCE_CLAIM_TEMPLATE

NAMED_AT_MOST = 8
"""Names listed in a message; the rest are counted."""
ERRORS_AT_MOST = 4
"""Different errors of nvidia-imex in one status."""


class Problem(msgspec.Struct, frozen=True):
    """One problem: a condition's reason and message."""

    reason: str
    message: str


def problems(domain: ComputeDomain, snapshot: Snapshot, settings: Settings) -> tuple[Problem, ...]:
    """All problems of a ComputeDomain that is not being deleted, the one to solve first in front."""
    if snapshot.invalid:
        return (Problem("InvalidSpec", snapshot.invalid),)
    found = [problem for slot in slots(domain, snapshot, settings) for problem in _of_slot(slot)]
    found += _of_labels(domain, settings)
    found += _of_cliques(snapshot)
    found += _of_daemons(snapshot)
    if uses_warm_clique(domain, settings):
        found += _of_channel_mode(domain, snapshot)
    found += [Problem("ApiRefused", failure) for failure in snapshot.failures]
    return tuple(found)


def listed(found: Collection[str]) -> str:
    """Names for a message."""
    shown = ", ".join(sorted(found)[:NAMED_AT_MOST])
    more = len(found) - NAMED_AT_MOST
    return f"{shown} and {more} more" if more > 0 else shown


def _of_slot(slot: Slot) -> list[Problem]:
    if len(slot.ours) > 1:
        found = ", ".join(sorted(one.called for one in slot.ours))
        return [Problem("DuplicateObjects", f"{found} belong to this ComputeDomain; delete all but one")]
    if slot.ours or slot.taken_by is None:
        return []
    whose = f"ComputeDomain {slot.taken_by.domain}" if slot.taken_by.domain else "somebody else"
    fix = f"delete it ({slot.taken_by.called})"
    if slot.kind == RESOURCE_CLAIM_TEMPLATE and slot.wanted["metadata"]["labels"].get(names.TARGET_LABEL) == (
        names.TARGET_WORKLOAD
    ):
        fix += ", or create this ComputeDomain anew with another spec.channel.resourceClaimTemplate.name"
        return [Problem("TemplateNameTaken", f"{slot.called} exists and belongs to {whose}; {fix}")]
    return [Problem("ObjectNameTaken", f"{slot.called} exists and belongs to {whose}; {fix}")]


def _of_labels(domain: ComputeDomain, settings: Settings) -> list[Problem]:
    asked = domain.labels.get(names.ISOLATION_LABEL)
    if asked == Isolation.CHANNEL and settings.imex_mode is ImexMode.HOST_MANAGED:
        told = f"label {names.ISOLATION_LABEL} asks for a channel of its own, but the hosts run nvidia-imex"
        return [Problem("ChannelModeUnavailable", f"{told} here and share one; remove the label")]
    if asked is None or asked in set(Isolation):
        return []
    known = " or ".join(Isolation)
    return [Problem("UnknownIsolation", f"label {names.ISOLATION_LABEL} is {asked!r}; use {known}")]


def _of_cliques(snapshot: Snapshot) -> list[Problem]:
    return [
        Problem(
            "IsolationMixed",
            f"nodes of clique {clique_id} disagree about isolation ({', '.join(said)}), but a node holds one"
            f" IMEX session; give all of them the same {names.ISOLATION_LABEL}",
        )
        for clique_id, said in sorted(snapshot.mixed_nodes.items())
    ]


def _of_daemons(snapshot: Snapshot) -> list[Problem]:
    """Nodes on which nvidia-imex does not run, by what it logged; in channel mode those of the clique."""
    pods = (*snapshot.pods, *(() if snapshot.warm is None else snapshot.warm.pods))
    errors: dict[str, set[str]] = {}
    for pod in pods:
        if pod.alive and pod.imex_error:
            errors.setdefault(pod.imex_error, set()).add(pod.node)
    return [
        Problem("ImexStartFailed", f"nvidia-imex does not run on {listed(nodes)}: {error}")
        for error, nodes in sorted(errors.items())[:ERRORS_AT_MOST]
    ]


def _of_channel_mode(domain: ComputeDomain, snapshot: Snapshot) -> list[Problem]:
    if domain.allocation_mode is AllocationMode.ALL:
        fix = f"use Single, or label the ComputeDomain {names.ISOLATION_LABEL}=domain"
        return [Problem("AllChannelsRefused", f"allocationMode All would take every job's channel; {fix}")]
    return [*_of_claim_size(snapshot), *_of_clique_size(domain, snapshot)]


def _of_claim_size(snapshot: Snapshot) -> list[Problem]:
    shared = names.shared_claim_name(snapshot.uid)
    pods = sum(len(claim.reserved_for) for claim in snapshot.claims if claim.thing.name == shared)
    if pods < names.PODS_PER_CLAIM:
        return []
    limit = f"ResourceClaim {shared} is reserved for {pods} pods, the most that one claim allows"
    return [Problem("ClaimFull", f"{limit}; further pods wait: put more GPUs in each pod, or split the job")]


def _of_clique_size(domain: ComputeDomain, snapshot: Snapshot) -> list[Problem]:
    if snapshot.warm is None or domain.num_nodes <= len(snapshot.warm.nodes):
        return []
    has = f"clique {snapshot.warm.clique_id} has {len(snapshot.warm.nodes)}"
    fix = "one channel spans one clique: ask for fewer, or use a ComputeDomain per clique"
    return [Problem("ExceedsClique", f"numNodes is {domain.num_nodes}, and {has}; {fix}")]
