"""What the groups of a job ask of their trays, and of each other, beside devices."""

from collections.abc import Mapping, Sequence

from rackloom.claim.place.reading.jobs import Job, Team
from rackloom.claim.place.values import Terms

Avoided = Mapping[str, Mapping[str, str]]
"""By group: nodes from which pods of other jobs keep it, and which."""


def terms_of(job: Job, avoided: Avoided) -> dict[str, Terms]:
    """By group; a group that asks for nothing is not told."""
    serious = serious_teams(job)
    where, apart = _wheres(serious, avoided), _apart(serious)
    found = {
        team.name: Terms(
            where=where.get(team.name, ""),
            channel=team.channel,
            likeness=apart[team.name][0] if team.name in apart else "",
            apart=apart[team.name][1] if team.name in apart else (),
        )
        for team in serious
    }
    return {name: terms for name, terms in found.items() if terms != Terms()}


def serious_teams(job: Job) -> tuple[Team, ...]:
    """Those whose members take devices."""
    return tuple(team for team in job.teams if team.need.takes_devices)


def kinds_of_where(job: Job, avoided: Avoided) -> dict[str, Team]:
    """One team for each of the `Terms.where` of a job; "" alone where all may use the same trays."""
    kinds = _unlike(serious_teams(job), avoided)
    return {team.name if len(kinds) > 1 else "": team for team in kinds}


def _wheres(serious: Sequence[Team], avoided: Avoided) -> dict[str, str]:
    kinds = _unlike(serious, avoided)
    if len(kinds) < 2:
        return {}
    return {team.name: next(one.name for one in kinds if _is_alike(one, team, avoided)) for team in serious}


def _unlike(serious: Sequence[Team], avoided: Avoided) -> list[Team]:
    """The first team of each kind that sees the site its own way."""
    kinds: list[Team] = []
    for team in serious:
        if not any(_is_alike(one, team, avoided) for one in kinds):
            kinds.append(team)
    return kinds


def _is_alike(one: Team, other: Team, avoided: Avoided) -> bool:
    """Whether both may use the same trays."""
    return one.need.may_use_what(other.need) and avoided.get(one.name) == avoided.get(other.name)


def _apart(serious: Sequence[Team]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The likeness of each group that keeps apart from some, and theirs."""
    if not any(team.need.apart for team in serious):
        return {}
    likes: list[Team] = []
    for team in serious:
        if not any(one.known == team.known for one in likes):
            likes.append(team)
    foes = {one.name: tuple(other.name for other in likes if one.known.bars(other.known)) for one in likes}
    alike = {team.name: next(one.name for one in likes if one.known == team.known) for team in serious}
    return {name: (like, foes[like]) for name, like in alike.items() if foes[like]}
