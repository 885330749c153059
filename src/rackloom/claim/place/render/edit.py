"""Copies of a job's objects with changes in their pod templates."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from rackloom.claim.place.reading.jobs import Job, Team

Object = dict[str, Any]


class Draft:
    """The objects of a job, to be changed."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.objects: list[Object] = [deepcopy(one) for one in job.objects]

    @property
    def main(self) -> Object:
        """The object itself; of pods, the first."""
        return self.objects[0]

    def templates(self) -> Iterator[tuple[Team, int, Object]]:
        """Each pod template with its group; of pods, each pod with its member number."""
        if self.job.kind != "Pod":
            seen: set[tuple[str | int, ...]] = set()
            for team in self.job.teams:
                if team.template not in seen:
                    seen.add(team.template)
                    yield team, 0, _at(self.main, team.template)
            return
        alike = len(self.job.teams) == 1
        for number, pod in enumerate(self.objects):
            yield self.job.teams[0 if alike else number], number if alike else 0, pod

    def mark(self, template: Object, kind: str, values: Mapping[str, str]) -> None:
        """Add `labels` or `annotations`."""
        metadata = inside(template, "metadata")
        metadata[kind] = {**(metadata.get(kind) or {}), **values}


def inside(value: Object, *path: str) -> Object:
    """The mapping at a path; made where it is absent."""
    for key in path:
        if value.get(key) is None:
            value[key] = {}
        value = value[key]
    return value


def _at(value: Any, path: tuple[str | int, ...]) -> Object:
    for key in path:
        value = value[key]
    found: Object = value
    return found
