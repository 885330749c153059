"""Placed jobs as a scheduler takes them, and what of their files goes with them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from rackloom.claim.manifests.documents import Document
from rackloom.claim.place.reading.jobs import Job

if TYPE_CHECKING:
    from rackloom.claim.place.render.targets import Rendered

_OF_THE_SITE = ("Node", "Pod", "ResourceSlice")


def manifests(done: "Sequence[Rendered]", beside: Iterable[Any]) -> str:
    """Scripts first, then all objects, those that several jobs need once."""
    scripts = "\n".join(one.script for one in done if one.script)
    objects: list[Any] = []
    for value in (*beside, *(value for one in done for value in one.objects)):
        if value not in objects:
            objects.append(value)
    return scripts + "---\n".join(yaml.safe_dump(value, sort_keys=False) for value in objects)


def beside(documents: Iterable[Document], jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
    """What the files have beside the jobs (claim templates, ComputeDomains), unless it tells of the site."""
    placed = {id(value) for job in jobs for value in job.objects}
    for one in documents:
        if id(one.value) not in placed and not _tells_of_the_site(one.value):
            yield one.value


def _tells_of_the_site(value: dict[str, Any]) -> bool:
    allocated = (value.get("status") or {}).get("allocation")
    return value.get("kind") in _OF_THE_SITE or (value.get("kind") == "ResourceClaim" and bool(allocated))
