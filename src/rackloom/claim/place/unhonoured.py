"""What a job requires of the scheduler that its plan does not keep: said by name, never passed over."""

from collections.abc import Iterable, Iterator

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading.jobs import Job, Team, name_in, part
from rackloom.claim.place.reading.neighbours import (
    Json,
    is_told,
    means,
    named_by,
    required_terms,
    told,
)
from rackloom.claim.place.values import Plan

_EXCLUSIVE = (
    "alpha.jobset.sigs.k8s.io/exclusive-topology",
    "leaderworkerset.sigs.k8s.io/exclusive-topology",
)


def unhonoured(job: Job, plan: Plan, labels: Labels) -> Iterator[str]:
    """One sentence each."""
    found: dict[str, None] = {}
    for team in job.teams:
        found |= dict.fromkeys(_of_template(job, team, labels))
    yield from found
    yield from _of_helpers(job, plan)


def _of_template(job: Job, team: Team, labels: Labels) -> Iterator[str]:
    for spec in _specs(job, team):
        yield from _of_affinity(job, team, spec, labels)
        yield from _of_anti_affinity(team, spec, labels)
        yield from _of_the_rest(team, spec)
    for owner in (job.objects[0], part(job.objects[0], team.template)):
        for key in _EXCLUSIVE:
            if part(owner, ("metadata", "annotations", key)):
                yield f"{key} is not honoured: other jobs may be where it goes"


def _specs(job: Job, team: Team) -> Iterator[Json]:
    """Of the pods of a team: its template's, or one of each pod."""
    if team.template:
        yield part(job.objects[0], (*team.template, "spec")) or {}
        return
    for one in job.objects:
        if team.name in ("pod", name_in(one.get("metadata") or {})):
            yield one.get("spec") or {}


def _of_affinity(job: Job, team: Team, spec: Json, labels: Labels) -> Iterator[str]:
    for term in required_terms(spec, "podAffinity"):
        key, selector = term.get("topologyKey"), term.get("labelSelector")
        what = f"required pod affinity of {team.name} by {key} is not honoured"
        if key != labels.clique:
            yield f"{what}: members share a clique ({labels.clique}), and nothing narrower or wider"
        elif not means(term, team.known, team.known):
            yield f"{what}: it asks for pods of others ({told(selector)})"
        elif not term.get("matchLabelKeys") and not _names_it(job, team, selector, labels):
            yield f"{what} towards other jobs: two jobs with {told(selector)} would have to share a clique"


def _names_it(job: Job, team: Team, selector: Json | None, labels: Labels) -> bool:
    """Whether a selector is of this job alone: by a label that its controller makes, or by its name.

    `rack-worker` is of the job `rack`; pods `rack-0` and `rack-1` are called after `rack`.
    """
    own = {*team.made, labels.gang, labels.job}
    names = [job.name.rpartition("/")[2], *(name_in(one.get("metadata") or {}) for one in job.objects)]
    return any(
        key in own or value.startswith(name) or (job.kind == "Pod" and name.startswith(value))
        for key, value in named_by(selector)
        for name in names
    )


def _of_anti_affinity(team: Team, spec: Json, labels: Labels) -> Iterator[str]:
    for term in required_terms(spec, "podAntiAffinity"):
        if not is_told(term, labels.host):
            what = f"required pod anti-affinity of {team.name} by {term.get('topologyKey')} is not honoured"
            yield f"{what}: only {labels.host} is, with the labels and namespaces of pods"


def _of_the_rest(team: Team, spec: Json) -> Iterator[str]:
    for one in spec.get("topologySpreadConstraints") or ():
        if one.get("whenUnsatisfiable") != "ScheduleAnyway":
            key, skew = one.get("topologyKey"), one.get("maxSkew")
            yield (
                f"topologySpreadConstraints of {team.name} by {key} (maxSkew {skew}) are not honoured:"
                " members are not spread"
            )
    ports = sorted({port for one in spec.get("containers") or () for port in _host_ports(one)})
    for port in ports:
        yield f"hostPort {port} of {team.name} is not honoured: two members may be on one tray"
    if team.template and spec.get("nodeName"):
        yield f"nodeName {spec['nodeName']} of {team.name} is not honoured: a tray is chosen for it"


def _host_ports(container: Json) -> Iterable[int]:
    return (one["hostPort"] for one in container.get("ports") or () if one.get("hostPort"))


def _of_helpers(job: Job, plan: Plan) -> Iterator[str]:
    """A member without devices stands beside the first that has some, whatever keeps it off."""
    seats = {team.name: [seat.tray for seat in plan.seats if seat.group == team.name] for team in job.teams}
    for helper in (one for one in job.teams if not one.need.takes_devices):
        beside = [one.name for one in job.teams if one.known.bars(helper.known)]
        here = [name for name in beside if name != helper.name and seats[helper.name][0] in seats[name]]
        if here or (helper.name in beside and helper.members > 1):
            yield (
                f"required pod anti-affinity of {helper.name} is not honoured:"
                f" it is beside {' and '.join(here) or 'its like'} on {seats[helper.name][0]}"
            )
