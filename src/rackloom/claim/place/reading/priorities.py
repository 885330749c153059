"""The priority of a job, by the priority classes that its pods name."""

from collections.abc import Collection, Iterator, Mapping

from rackloom.claim.place.reading.jobs import Job, part
from rackloom.claim.place.reading.pods import PodNeed

BUILT_IN = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}
"""Every cluster has them."""
UNNAMED = ""
"""What pods without a class have: the value of the class that is the global default."""
_OF_THE_GANG = ("spec", "runPolicy", "schedulingPolicy", "priorityClass")
"""Of an MPIJob: the class of its PodGroup, whatever its pods say."""


def priority_of(job: Job, classes: Mapping[str, int]) -> int:
    """That of the gang if it names a class, else the highest of its groups with devices; 0 if not known."""
    if named := _of_the_gang(job):
        return classes.get(named, 0)
    return max(need.priority or classes.get(need.priority_class, 0) for need in _needs(job))


def preempts(job: Job, never: Collection[str]) -> bool:
    """Whether the scheduler may make room for it; `never`: classes whose preemptionPolicy is Never."""
    if _of_the_gang(job) in (set(never) - {UNNAMED}):
        return False
    return all(need.preempts and need.priority_class not in never for need in _needs(job))


def unknown_classes(job: Job, classes: Mapping[str, int]) -> list[str]:
    """Classes that the job names and nobody knows, each once."""
    return [name for name in dict.fromkeys(_named(job)) if name and name not in classes]


def _needs(job: Job) -> list[PodNeed]:
    """Of the groups with devices, where there is one."""
    serious = [team.need for team in job.teams if team.need.takes_devices]
    return serious or [team.need for team in job.teams]


def _named(job: Job) -> Iterator[str]:
    yield _of_the_gang(job)
    yield from (team.need.priority_class for team in job.teams)


def _of_the_gang(job: Job) -> str:
    named = part(job.objects[0], _OF_THE_GANG) if job.kind == "MPIJob" else None
    return named if isinstance(named, str) else ""
