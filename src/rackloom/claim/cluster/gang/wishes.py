"""What the pods of a gang say about it: its groups and their sizes, its segments and spares."""

import re
from collections.abc import Mapping

import msgspec

from rackloom.claim.cluster.admission.marks import GANG_LABEL
from rackloom.claim.cluster.gang import marks
from rackloom.errors import Refused

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_MOST = 4096
"""Members of a group: far above any rack, and small enough for one plan object."""
SPARES = 4
"""Spare trays per clique that any gang may keep; a larger gang may keep as many as it has members."""
EXAMPLE = f"write annotation {marks.SIZE_ANNOTATION} as 18, or as launcher=1,worker=18"


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod says of its gang; all pods of a gang say the same."""

    sizes: tuple[tuple[str, int], ...]
    """Groups in the order in which they were written, with the number of members."""
    segment: int | None = None
    spares: int = 0

    def has(self, group: str) -> bool:
        """Whether there is such a group."""
        return any(name == group for name, _ in self.sizes)


def read_wish(annotations: Mapping[str, str]) -> Wish:
    """Read the annotations of a pod. Raises Refused, with what to write instead."""
    segment = annotations.get(marks.SEGMENT_ANNOTATION)
    sizes = _sizes(annotations.get(marks.SIZE_ANNOTATION, ""))
    return Wish(
        sizes=sizes,
        segment=None if segment is None else _number(marks.SEGMENT_ANNOTATION, segment, least=1),
        spares=_spares(annotations, max(SPARES, sum(size for _, size in sizes))),
    )


def group_of(labels: Mapping[str, str]) -> str:
    """The group of a pod."""
    return labels.get(marks.GROUP_LABEL, marks.ONLY_GROUP)


def check_name(gang: str) -> None:
    """Raise Refused for a gang that cannot be the name of an object."""
    if not _NAME.fullmatch(gang):
        fix = f"use lower-case letters, digits and '-' in label {GANG_LABEL}"
        raise Refused(f"gang {gang!r} is no object name", nearest_fix=fix)


def _sizes(text: str) -> tuple[tuple[str, int], ...]:
    if "=" not in text:
        return ((marks.ONLY_GROUP, _number(marks.SIZE_ANNOTATION, text, least=1)),)
    pairs = [part.strip().partition("=") for part in text.split(",")]
    sizes = {name.strip(): _number(marks.SIZE_ANNOTATION, size, least=1) for name, _, size in pairs}
    if len(sizes) < len(pairs) or not all(map(_NAME.fullmatch, sizes)):
        raise Refused(f"annotation {marks.SIZE_ANNOTATION} is {text!r}", nearest_fix=EXAMPLE)
    return tuple(sizes.items())


def _spares(annotations: Mapping[str, str], most: int) -> int:
    """Reserved trays count towards no quota, so a small gang does not get many."""
    text = annotations.get(marks.SPARES_ANNOTATION, "0")
    return _number(marks.SPARES_ANNOTATION, text, least=0, most=min(most, _MOST))


def _number(annotation: str, text: str, *, least: int, most: int = _MOST) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdecimal() and least <= int(text[:9]) <= most):
        fix = EXAMPLE if annotation == marks.SIZE_ANNOTATION else f"use a number from {least} to {most}"
        raise Refused(f"annotation {annotation} is {text!r}", nearest_fix=fix)
    return int(text)
