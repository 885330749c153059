"""Jobs that are placed side by side, and are never on one tray: anti-affinity between their pods."""

from collections.abc import Iterator, Sequence
from itertools import combinations, product

from rackloom.claim.place.reading.jobs import Job
from rackloom.claim.place.reading.neighbours import Known
from rackloom.claim.place.reading.terms import Avoided
from rackloom.claim.place.values import Plan

_Like = tuple[Known, set[str]]
"""Groups whose members are alike to others, by name."""


def are_strangers(jobs: Sequence[Job]) -> bool:
    """Whether members of two jobs are never on one tray."""
    if not any(team.known.apart for job in jobs for team in job.teams):
        return False
    return any(
        mine.bars(theirs)
        for one, other in combinations([_likes(job) for job in jobs], 2)
        for (mine, _), (theirs, _) in product(one, other)
    )


def avoided_beside(job: Job, planned: Job, plan: Plan, before: Avoided) -> Avoided:
    """What groups of a job avoid: what they did before, and trays of groups of another that was planned."""
    found = {name: dict(trays) for name, trays in before.items()}
    for group, tray in _barred(job, planned, plan):
        found.setdefault(group, {}).setdefault(tray, f"kept apart from {planned.name}")
    return found


def _barred(job: Job, planned: Job, plan: Plan) -> Iterator[tuple[str, str]]:
    """Groups, and trays with members of another job that they are never beside."""
    for (mine, groups), (theirs, others) in product(_likes(job), _likes(planned)):
        if mine.bars(theirs):
            trays = dict.fromkeys(seat.tray for seat in plan.seats if seat.group in others)
            yield from product(groups, trays)


def _likes(job: Job) -> list[_Like]:
    found: list[_Like] = []
    for team in job.teams:
        alike = next((groups for known, groups in found if known == team.known), None)
        if alike is None:
            found.append((team.known, {team.name}))
        else:
            alike.add(team.name)
    return found
