"""From a job to the gang that the planner places: groups, claims, terms and anti-affinity.

`gang_of_job` adds the GPUs of its claims to the count of each group, and the job's priority. Groups with
the same claims have the same kind (`claim_kind`), named with the namespace of the job, because other
namespaces may have other templates of the same name. `claims_by_kind` finds the claims of one member.
IMEX channels and admin access take no device, and an unknown template raises Refused.

`terms_of_groups` gives each group its placement terms. Groups that may use the same trays share one
`where`, and groups with equal pod identity share one likeness for anti-affinity. A group without
requirements has no terms, which keeps the search on its fast, counting path.

`are_anti_affine` and `avoiding_job` apply anti-affinity between jobs that are planned together: trays of
the job that was planned first are avoided by the groups that must not be beside it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import combinations, product
from types import MappingProxyType

from rackloom.core.allocate.objects import ResourceClaim
from rackloom.core.cluster.jobs import Job, JobGroup, TemplateName, may_preempt, priority_of_job
from rackloom.core.cluster.pods import object_namespace, qualified_name
from rackloom.core.cluster.scheduling import PodIdentity
from rackloom.core.cluster.trays import (
    AvoidedTrays,
    Gang,
    GangGroup,
    GangPlan,
    PlacementTerms,
    claims_devices,
)
from rackloom.core.place.search.gang_needs import groups_apart
from rackloom.errors import Refused


def gang_of_job(
    job: Job,
    claimed: Mapping[str, int],
    *,
    priorities: Mapping[str, int],
    never: Collection[str] = (),
    segment: int | None = None,
    spares: int = 0,
    exclusive: bool = False,
    apart: bool = False,
    avoided: AvoidedTrays = MappingProxyType({}),
) -> Gang:
    """The gang of a job. `claimed`: GPUs that one member claims, by kind.

    `priorities`: those of priority classes. `never`: the classes whose pods never preempt.
    """
    terms, groups = terms_of_groups(job, avoided), []
    for group in job.groups:
        kind = claim_kind(job, group)
        groups.append(
            GangGroup(
                name=group.name,
                members=group.members,
                gpus=group.need.gpus + claimed.get(kind, 0),
                devices=kind if kind in claimed else None,
                share=group.share,
                follows=group.follows,
                terms=terms.get(group.name),
            )
        )
    return Gang(
        name=job.name,
        groups=groups_apart(groups) if apart else tuple(groups),
        priority=priority_of_job(job, priorities),
        preempts=may_preempt(job, never),
        segment=segment,
        spares=spares,
        exclusive=exclusive,
    )


def claim_kind(job: Job, group: JobGroup) -> str:
    """The name of its members' claims. Other namespaces have other templates of the same name."""
    claimed = "+".join((*group.need.templates, *group.need.claims))
    return qualified_name(object_namespace(job.objects[0]), claimed)


def claims_by_kind(
    job: Job, known: Mapping[tuple[str, str], ResourceClaim], channels: Collection[TemplateName]
) -> dict[str, tuple[ResourceClaim, ...]]:
    """The claims of a member of each group. Channels of ComputeDomains are served on every tray.

    `known`: by namespace and name. Claims that take no device are left out. Raises Refused for a template or
    a claim that is not known.
    """
    namespace = object_namespace(job.objects[0])
    found: dict[str, tuple[ResourceClaim, ...]] = {}
    for group in job.groups:
        claimed = (*group.need.templates, *group.need.claims)
        names = [name for name in claimed if (namespace, name) not in channels]
        missing = [name for name in names if (namespace, name) not in known]
        if missing:
            raise Refused(
                f"{job.name}: {group.name} claims {missing[0]}, of which nothing is known",
                nearest_fix="add its ResourceClaimTemplate, or the ComputeDomain that makes it, to the files",
            )
        claims = (known[namespace, name] for name in names)
        if taking := tuple(claim for claim in claims if claims_devices(claim)):
            found[claim_kind(job, group)] = taking
    return found


# Terms of groups beside devices.


def terms_of_groups(job: Job, avoided: AvoidedTrays) -> dict[str, PlacementTerms]:
    """By group. A group without requirements has none."""
    groups = groups_with_devices(job)
    kinds = _first_alike(groups, lambda a, b: _may_use_same_trays(a, b, avoided))
    is_divided = len(_distinct(kinds)) > 1
    identities: dict[str, JobGroup] = {}
    if any(group.need.apart for group in groups):
        identities = _first_alike(groups, lambda a, b: a.identity == b.identity)
    distinct = _distinct(identities)
    # By identity, the identities with which it shares no tray, perhaps its own.
    conflicts = {
        mine.name: tuple(theirs.name for theirs in distinct if mine.identity.bars(theirs.identity))
        for mine in distinct
    }
    found = {}
    for group in groups:
        identity = identities.get(group.name, group).name
        terms = PlacementTerms(
            where=kinds[group.name].name if is_divided else "",
            channel=group.channel,
            likeness=identity if conflicts.get(identity) else "",
            apart=conflicts.get(identity, ()),
        )
        if terms != PlacementTerms():
            found[group.name] = terms
    return found


def groups_with_devices(job: Job) -> tuple[JobGroup, ...]:
    """The groups with members that take devices."""
    return tuple(group for group in job.groups if group.need.takes_devices)


def groups_by_trays(job: Job, avoided: AvoidedTrays) -> dict[str, JobGroup]:
    """One group for each `PlacementTerms.where` of a job. Only "" if all may use the same trays."""
    with_devices = groups_with_devices(job)
    kinds = _distinct(_first_alike(with_devices, lambda a, b: _may_use_same_trays(a, b, avoided)))
    return {group.name if len(kinds) > 1 else "": group for group in kinds}


def _first_alike(
    groups: Iterable[JobGroup], are_alike: Callable[[JobGroup, JobGroup], bool]
) -> dict[str, JobGroup]:
    """By name of each group, the first one that is like it."""
    found: dict[str, JobGroup] = {}
    for group in groups:
        found[group.name] = next((first for first in _distinct(found) if are_alike(first, group)), group)
    return found


def _distinct(first_alike: Mapping[str, JobGroup]) -> list[JobGroup]:
    return [group for name, group in first_alike.items() if group.name == name]


def _may_use_same_trays(group: JobGroup, other: JobGroup, avoided: AvoidedTrays) -> bool:
    return group.need.may_use_same_nodes(other.need) and avoided.get(group.name) == avoided.get(other.name)


# Anti-affinity between jobs that are planned together.


def are_anti_affine(jobs: Sequence[Job]) -> bool:
    """Whether members of two jobs are never on one tray."""
    if not any(group.identity.apart for job in jobs for group in job.groups):
        return False
    return any(
        mine.bars(theirs)
        for job, other in combinations([_names_by_identity(job) for job in jobs], 2)
        for (mine, _), (theirs, _) in product(job, other)
    )


def avoiding_job(job: Job, planned: Job, plan: GangPlan, before: AvoidedTrays) -> AvoidedTrays:
    """`before`, and the trays of the groups of a planned job that groups of `job` are never beside."""
    found = {name: dict(trays) for name, trays in before.items()}
    for (mine, names), (theirs, others) in product(_names_by_identity(job), _names_by_identity(planned)):
        if mine.bars(theirs):
            trays = dict.fromkeys(member.tray for member in plan.seats if member.group in others)
            for name, tray in product(names, trays):
                found.setdefault(name, {}).setdefault(tray, f"kept apart from {planned.name}")
    return found


def _names_by_identity(job: Job) -> list[tuple[PodIdentity, list[str]]]:
    """The groups of a job, by how other pods see their members."""
    first_alike = _first_alike(job.groups, lambda a, b: a.identity == b.identity)
    return [
        (first.identity, [name for name, alike in first_alike.items() if alike is first])
        for first in _distinct(first_alike)
    ]
