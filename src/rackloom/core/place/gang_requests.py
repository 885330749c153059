"""From a job to the gang that the planner places: groups, claims, terms and anti-affinity.

`gang_of_job` adds the GPUs of its claims to what each group counts, and the job's priority. Groups with
the same claims have the same kind (`claim_kind`), named with the namespace of the job, because other
namespaces may have other templates of the same name. `claims_by_kind` finds the claims of one member;
IMEX channels and admin access take no device, and an unknown template raises Refused.

`terms_of_groups` gives each group its placement terms. Groups that may use the same trays share one
`where`; groups with equal pod identity share one likeness for anti-affinity. A group that asks for
nothing has no terms, which keeps the search on its fast, counting path.

`are_anti_affine` and `avoiding_job` apply anti-affinity between jobs that are planned together: trays of
the job that was planned first are avoided by the groups that must not be beside it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations, product
from types import MappingProxyType

from rackloom.core.allocate.objects import ResourceClaim
from rackloom.core.place.jobs import (
    Job,
    JobGroup,
    TemplateName,
    may_preempt,
    object_namespace,
    priority_of_job,
    qualified_name,
)
from rackloom.core.place.observed_site import AvoidedTrays, claims_devices
from rackloom.core.place.placement_values import Gang, GangGroup, GangPlan, PlacementTerms
from rackloom.core.place.pod_constraints import JsonMapping, PodIdentity
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
    """The gang; `claimed`: GPUs that one member claims, by kind; `priorities`: those of priority classes.

    `never`: the classes of which no pod preempts.
    """
    terms = terms_of_groups(job, avoided)
    groups = tuple(
        GangGroup(
            name=team.name,
            members=team.members,
            gpus=team.need.gpus + claimed.get(claim_kind(job, team), 0),
            devices=claim_kind(job, team) if claim_kind(job, team) in claimed else None,
            share=team.name if apart else team.share,
            terms=terms.get(team.name),
        )
        for team in job.teams
    )
    return Gang(
        name=job.name,
        groups=groups,
        priority=priority_of_job(job, priorities),
        preempts=may_preempt(job, never),
        segment=segment,
        spares=spares,
        exclusive=exclusive,
    )


def claim_kind(job: Job, team: JobGroup) -> str:
    """The name of what its members claim; other namespaces have other templates of the same name."""
    return qualified_name(_job_metadata(job), "+".join((*team.need.templates, *team.need.claims)))


def claims_by_kind(
    job: Job, known: Mapping[tuple[str, str], ResourceClaim], channels: Collection[TemplateName]
) -> dict[str, tuple[ResourceClaim, ...]]:
    """The claims of a member of each group; channels of ComputeDomains are served on every tray.

    `known`: by namespace and name. What takes no device is left out. Raises Refused for a template or a claim
    that is not known.
    """
    namespace = object_namespace(_job_metadata(job))
    found: dict[str, tuple[ResourceClaim, ...]] = {}
    for team in job.teams:
        claimed = (*team.need.templates, *team.need.claims)
        names = [name for name in claimed if (namespace, name) not in channels]
        missing = [name for name in names if (namespace, name) not in known]
        if missing:
            raise Refused(
                f"{job.name}: {team.name} claims {missing[0]}, of which nothing is known",
                nearest_fix="add its ResourceClaimTemplate, or the ComputeDomain that makes it, to the files",
            )
        claims = (known[namespace, name] for name in names)
        if taking := tuple(claim for claim in claims if claims_devices(claim)):
            found[claim_kind(job, team)] = taking
    return found


def _job_metadata(job: Job) -> JsonMapping:
    return job.objects[0].get("metadata") or {}


# Terms of groups beside devices.


def terms_of_groups(job: Job, avoided: AvoidedTrays) -> dict[str, PlacementTerms]:
    """By group; a group that asks for nothing is not told."""
    serious = groups_with_devices(job)
    where, apart = _where_by_group(serious, avoided), _anti_affinity_by_group(serious)
    found = {
        team.name: PlacementTerms(
            where=where.get(team.name, ""),
            channel=team.channel,
            likeness=apart[team.name][0] if team.name in apart else "",
            apart=apart[team.name][1] if team.name in apart else (),
        )
        for team in serious
    }
    return {name: terms for name, terms in found.items() if terms != PlacementTerms()}


def groups_with_devices(job: Job) -> tuple[JobGroup, ...]:
    """Those whose members take devices."""
    return tuple(team for team in job.teams if team.need.takes_devices)


def groups_by_trays(job: Job, avoided: AvoidedTrays) -> dict[str, JobGroup]:
    """One team for each of the `Terms.where` of a job; "" alone where all may use the same trays."""
    kinds = _distinct_groups(groups_with_devices(job), avoided)
    return {team.name if len(kinds) > 1 else "": team for team in kinds}


def _where_by_group(serious: Sequence[JobGroup], avoided: AvoidedTrays) -> dict[str, str]:
    kinds = _distinct_groups(serious, avoided)
    if len(kinds) < 2:
        return {}
    return {
        team.name: next(kind.name for kind in kinds if _may_use_same_trays(kind, team, avoided))
        for team in serious
    }


def _distinct_groups(serious: Sequence[JobGroup], avoided: AvoidedTrays) -> list[JobGroup]:
    """The first team of each kind that sees the site its own way."""
    kinds: list[JobGroup] = []
    for team in serious:
        if not any(_may_use_same_trays(kind, team, avoided) for kind in kinds):
            kinds.append(team)
    return kinds


def _may_use_same_trays(job_group: JobGroup, other: JobGroup, avoided: AvoidedTrays) -> bool:
    """Whether both may use the same trays."""
    return job_group.need.may_use_what(other.need) and avoided.get(job_group.name) == avoided.get(other.name)


def _anti_affinity_by_group(serious: Sequence[JobGroup]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The likeness of each group that keeps apart from some, and theirs."""
    if not any(team.need.apart for team in serious):
        return {}
    likes: list[JobGroup] = []
    for team in serious:
        if not any(like.known == team.known for like in likes):
            likes.append(team)
    foes = {like.name: tuple(other.name for other in likes if like.known.bars(other.known)) for like in likes}
    alike = {team.name: next(like.name for like in likes if like.known == team.known) for team in serious}
    return {name: (like, foes[like]) for name, like in alike.items() if foes[like]}


# Anti-affinity between jobs that are planned together.


_LikeGroups = tuple[PodIdentity, set[str]]
"""Groups whose members are alike to others, by name."""


def are_anti_affine(jobs: Sequence[Job]) -> bool:
    """Whether members of two jobs are never on one tray."""
    if not any(team.known.apart for job in jobs for team in job.teams):
        return False
    return any(
        mine.bars(theirs)
        for one, other in combinations([_groups_by_identity(job) for job in jobs], 2)
        for (mine, _), (theirs, _) in product(one, other)
    )


def avoiding_job(job: Job, planned: Job, plan: GangPlan, before: AvoidedTrays) -> AvoidedTrays:
    """What groups of a job avoid: what they did before, and trays of groups of another that was planned."""
    found = {name: dict(trays) for name, trays in before.items()}
    for group, tray in _barred_trays(job, planned, plan):
        found.setdefault(group, {}).setdefault(tray, f"kept apart from {planned.name}")
    return found


def _barred_trays(job: Job, planned: Job, plan: GangPlan) -> Iterator[tuple[str, str]]:
    """Groups, and trays with members of another job that they are never beside."""
    for (mine, groups), (theirs, others) in product(_groups_by_identity(job), _groups_by_identity(planned)):
        if mine.bars(theirs):
            trays = dict.fromkeys(seat.tray for seat in plan.seats if seat.group in others)
            yield from product(groups, trays)


def _groups_by_identity(job: Job) -> list[_LikeGroups]:
    found: list[_LikeGroups] = []
    for team in job.teams:
        alike = next((groups for known, groups in found if known == team.known), None)
        if alike is None:
            found.append((team.known, {team.name}))
        else:
            alike.add(team.name)
    return found
