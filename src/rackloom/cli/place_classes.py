"""Priority classes of the files and of the site that `rackloom place` is given."""

from collections.abc import Iterable, Iterator

from rackloom.claim.manifests.documents import Document
from rackloom.claim.place.reading.jobs import Job, part
from rackloom.claim.place.reading.pods import NEVER
from rackloom.claim.place.reading.priorities import BUILT_IN, UNNAMED, unknown_classes
from rackloom.claim.place.refusal.moves import listed
from rackloom.errors import Refused

_KIND = "PriorityClass"
_LOWEST, _HIGHEST = -(2**31), 1_000_000_000
"""Of classes that people make; those above are Kubernetes' own (scheduling.k8s.io/v1)."""


class PriorityClasses:
    """Values by name, and whether the site has told all that it has."""

    def __init__(self, documents: Iterable[Document], *, asked: bool) -> None:
        """`asked`: a cluster was asked for its classes. Raises Refused for a value that none may have."""
        classes = [one for one in documents if one.value.get("kind") == _KIND]
        self.values: dict[str, int] = dict(BUILT_IN)
        self.never: set[str] = set()
        self._is_known = asked or bool(classes)
        for one in classes:
            name, value = _read(one)
            self._add(name, value, one)
            # Of several defaults the API server takes the lowest.
            is_default = one.value.get("globalDefault") is True
            if is_default and value <= self.values.get(UNNAMED, value):
                self._add(UNNAMED, value, one)

    def _add(self, name: str, value: int, of: Document) -> None:
        self.values[name] = value
        self.never.discard(name)
        if of.value.get("preemptionPolicy") == NEVER:
            self.never.add(name)

    def check(self, job: Job) -> None:
        """Refuse a class that the site does not have: the API server would refuse the pods."""
        unknown = unknown_classes(job, self.values)
        if unknown and self._is_known:
            known = sorted(name for name in self.values if name != UNNAMED)
            raise Refused(
                f"{job.name} names the {_KIND} {unknown[0]}, which there is not",
                nearest_fix=f"name one of {listed(known, most=8)}, or add {unknown[0]} to the files",
            )

    def notes(self, job: Job) -> Iterator[str]:
        """Classes of which no file tells the value."""
        for name in unknown_classes(job, self.values):
            yield (
                f"nothing is known of the {_KIND} {name}: it counts as priority 0, so no preemption is"
                " offered for it; add the site's priorityclasses to --site"
            )


def _read(one: Document) -> tuple[str, int]:
    name, value = part(one.value, ("metadata", "name")), one.value.get("value", 0)
    if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, int):
        raise Refused(
            f"{one.where(('value',))}: a {_KIND} has the name {name!r} and the value {value!r}",
            nearest_fix="give it a name, and a whole number as value",
        )
    if name not in BUILT_IN and not _LOWEST <= value <= _HIGHEST:
        raise Refused(
            f"{one.where(('value',))}: the {_KIND} {name} has the value {value}",
            nearest_fix=f"set it from {_LOWEST} to {_HIGHEST}: the API server takes no other",
        )
    return name, value
