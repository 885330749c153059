"""A job and its claims as the gang that the planner takes."""

from collections.abc import Collection, Mapping

from rackloom.claim.allocate.objects import ResourceClaim
from rackloom.claim.place.devices import gpus_in
from rackloom.claim.place.jobs import Job, Team
from rackloom.claim.place.labels import Labels
from rackloom.claim.place.values import Gang, Group
from rackloom.errors import Refused


def gang_of(
    job: Job,
    claims: Mapping[str, tuple[ResourceClaim, ...]],
    labels: Labels,
    *,
    priorities: Mapping[str, int],
    segment: int | None = None,
    spares: int = 0,
    exclusive: bool = False,
    apart: bool = False,
) -> Gang:
    """The gang; `claims` are those of one member by kind, `priorities` those of priority classes."""
    groups = tuple(
        Group(
            name=team.name,
            members=team.members,
            gpus=team.need.gpus + gpus_in(claims.get(kind_of(team), ()), labels),
            devices=kind_of(team) if kind_of(team) in claims else None,
            share=team.name if apart else team.share,
        )
        for team in job.teams
    )
    priority = max(team.need.priority or priorities.get(team.need.priority_class, 0) for team in job.teams)
    return Gang(
        name=job.name, groups=groups, priority=priority, segment=segment, spares=spares, exclusive=exclusive
    )


def kind_of(team: Team) -> str:
    """The name of what its members claim."""
    return "+".join((*team.need.templates, *team.need.claims))


def claims_by_kind(
    job: Job, known: Mapping[str, ResourceClaim], channels: Collection[str]
) -> dict[str, tuple[ResourceClaim, ...]]:
    """The claims of a member of each group; channels of ComputeDomains are served on every tray.

    Raises Refused for a template or a claim that is not `known`.
    """
    found: dict[str, tuple[ResourceClaim, ...]] = {}
    for team in job.teams:
        names = [name for name in (*team.need.templates, *team.need.claims) if name not in channels]
        missing = [name for name in names if name not in known]
        if missing:
            raise Refused(
                f"{job.name}: {team.name} claims {missing[0]}, of which nothing is known",
                nearest_fix="add its ResourceClaimTemplate, or the ComputeDomain that makes it, to the files",
            )
        if names:
            found[kind_of(team)] = tuple(known[name] for name in names)
    return found
