"""A job and its claims as the gang that the planner takes."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from rackloom.claim.allocate.objects import ResourceClaim
from rackloom.claim.place.reading.devices import takes_devices
from rackloom.claim.place.reading.jobs import Job, Team, Template, in_namespace, namespace_in
from rackloom.claim.place.reading.pods import Json
from rackloom.claim.place.reading.priorities import preempts, priority_of
from rackloom.claim.place.reading.terms import Avoided, terms_of
from rackloom.claim.place.values import Gang, Group
from rackloom.errors import Refused


def gang_of(
    job: Job,
    claimed: Mapping[str, int],
    *,
    priorities: Mapping[str, int],
    never: Collection[str] = (),
    segment: int | None = None,
    spares: int = 0,
    exclusive: bool = False,
    apart: bool = False,
    avoided: Avoided = MappingProxyType({}),
) -> Gang:
    """The gang; `claimed`: GPUs that one member claims, by kind; `priorities`: those of priority classes.

    `never`: the classes of which no pod preempts.
    """
    terms = terms_of(job, avoided)
    groups = tuple(
        Group(
            name=team.name,
            members=team.members,
            gpus=team.need.gpus + claimed.get(kind_of(job, team), 0),
            devices=kind_of(job, team) if kind_of(job, team) in claimed else None,
            share=team.name if apart else team.share,
            terms=terms.get(team.name),
        )
        for team in job.teams
    )
    return Gang(
        name=job.name,
        groups=groups,
        priority=priority_of(job, priorities),
        preempts=preempts(job, never),
        segment=segment,
        spares=spares,
        exclusive=exclusive,
    )


def kind_of(job: Job, team: Team) -> str:
    """The name of what its members claim; other namespaces have other templates of the same name."""
    return in_namespace(_metadata(job), "+".join((*team.need.templates, *team.need.claims)))


def claims_by_kind(
    job: Job, known: Mapping[tuple[str, str], ResourceClaim], channels: Collection[Template]
) -> dict[str, tuple[ResourceClaim, ...]]:
    """The claims of a member of each group; channels of ComputeDomains are served on every tray.

    `known`: by namespace and name. What takes no device is left out. Raises Refused for a template or a claim
    that is not known.
    """
    namespace = namespace_in(_metadata(job))
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
        if taking := tuple(one for one in claims if takes_devices(one)):
            found[kind_of(job, team)] = taking
    return found


def _metadata(job: Job) -> Json:
    return job.objects[0].get("metadata") or {}
