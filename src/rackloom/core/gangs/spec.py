"""What the pods of a gang declare (sizes, segments, spares), and what the operator sets.

A pod belongs to a gang by the label `rackloom.dev/gang`; the annotation `rackloom.dev/gang-size` says
for how many pods to wait: `18`, or `launcher=1,worker=18` for several groups. All pods of a gang must
declare the same. A segment is a number of members that share one NVLink clique; without it the whole
gang shares one.

Reserved spare trays count towards no ResourceQuota, because no pod runs on them. A small gang may
therefore keep only a few, and a larger one at most as many as it has members. What cannot be read is
refused with an example of what to write.
"""

import re
from collections.abc import Mapping

import msgspec

from rackloom.core.domains import names
from rackloom.core.kubernetes.pods import GANG_LABEL
from rackloom.errors import Refused

# Names on pods, nodes and GangPlans. They are part of the public interface.


GANG_GATE = GANG_LABEL
"""The scheduling gate of a pod whose gang is not placed yet."""
GANG_TAINT = GANG_LABEL
"""On reserved trays, effect NoSchedule; its value is the UID of the GangPlan."""
GANG_FINALIZER = GANG_LABEL
"""On a GangPlan while trays may be reserved for it."""
GROUP_LABEL = "rackloom.dev/gang-group"
"""On pods of gangs with several groups: the group of the pod."""
SIZE_ANNOTATION = "rackloom.dev/gang-size"
"""On every pod of a gang: `18`, or `launcher=1,worker=18`."""
SEGMENT_ANNOTATION = "rackloom.dev/gang-segment"
"""The number of members of a group that share a clique; without it the whole gang shares one."""
SPARES_ANNOTATION = "rackloom.dev/gang-spares"
"""The number of trays to reserve in each clique for members whose tray is lost."""
TRAY_ANNOTATION = "rackloom.dev/gang-tray"
"""On a pod that was ungated: the node that it is pinned to."""
RELEASED_ANNOTATION = "rackloom.dev/gang-released"
"""On a pod that was ungated: the time (RFC 3339)."""
RANK_LABELS = (
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
    "leaderworkerset.sigs.k8s.io/worker-index",
    "apps.kubernetes.io/pod-index",
)
"""Where controllers write the rank of a pod. Neighbours in rank become neighbours in the plan."""
DEFAULT_GROUP = "member"
"""The group of a gang that names none."""


# What one pod declares about its gang.


_GANG_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_MOST_MEMBERS = 4096
"""Members of a group: far above any rack, and small enough for one plan object."""
SPARES_OF_ANY_GANG = 4
"""Spare trays per clique that any gang may keep; a larger gang may keep as many as it has members."""
SIZE_EXAMPLE = f"write annotation {SIZE_ANNOTATION} as 18, or as launcher=1,worker=18"


class GangSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod declares about its gang; all pods of a gang declare the same."""

    sizes: tuple[tuple[str, int], ...]
    """Groups in the order in which they were written, with the number of members."""
    segment: int | None = None
    spares: int = 0

    def has(self, group: str) -> bool:
        """Whether there is such a group."""
        return any(name == group for name, _ in self.sizes)


def read_gang_spec(annotations: Mapping[str, str]) -> GangSpec:
    """Read the annotations of a pod. Raises Refused, with what to write instead."""
    segment = annotations.get(SEGMENT_ANNOTATION)
    sizes = _read_sizes(annotations.get(SIZE_ANNOTATION, ""))
    return GangSpec(
        sizes=sizes,
        segment=None if segment is None else _read_number(SEGMENT_ANNOTATION, segment, least=1),
        spares=_read_spares(annotations, max(SPARES_OF_ANY_GANG, sum(size for _, size in sizes))),
    )


def gang_group_of(labels: Mapping[str, str]) -> str:
    """The group of a pod."""
    return labels.get(GROUP_LABEL, DEFAULT_GROUP)


def check_gang_name(gang: str) -> None:
    """Raise Refused for a gang that cannot be the name of an object."""
    if not _GANG_NAME.fullmatch(gang):
        fix = f"use lower-case letters, digits and '-' in label {GANG_LABEL}"
        raise Refused(f"gang {gang!r} is no object name", nearest_fix=fix)


def _read_sizes(text: str) -> tuple[tuple[str, int], ...]:
    if "=" not in text:
        return ((DEFAULT_GROUP, _read_number(SIZE_ANNOTATION, text, least=1)),)
    pairs = [part.strip().partition("=") for part in text.split(",")]
    sizes = {name.strip(): _read_number(SIZE_ANNOTATION, size, least=1) for name, _, size in pairs}
    if len(sizes) < len(pairs) or not all(map(_GANG_NAME.fullmatch, sizes)):
        raise Refused(f"annotation {SIZE_ANNOTATION} is {text!r}", nearest_fix=SIZE_EXAMPLE)
    return tuple(sizes.items())


def _read_spares(annotations: Mapping[str, str], most: int) -> int:
    """Reserved trays count towards no ResourceQuota, so a small gang may keep only a few."""
    text = annotations.get(SPARES_ANNOTATION, "0")
    return _read_number(SPARES_ANNOTATION, text, least=0, most=min(most, _MOST_MEMBERS))


def _read_number(annotation: str, text: str, *, least: int, most: int = _MOST_MEMBERS) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdecimal() and least <= int(text[:9]) <= most):
        fix = SIZE_EXAMPLE if annotation == SIZE_ANNOTATION else f"use a number from {least} to {most}"
        raise Refused(f"annotation {annotation} is {text!r}", nearest_fix=fix)
    return int(text)


# What an operator sets for the gang controller.


class GangSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    settle: float = 2.0
    """Between the reservation of the last tray and the check of all trays: kube-scheduler may still bind a
    pod that it decided on before it saw the taint."""
    lost_after: float = 300.0
    """A tray that is not ready for so long is lost: its members are deleted and move to another tray. The
    node controller evicts pods after the same time."""
    bind_after: float = 120.0
    """A pod that was ungated and is unschedulable for so long is moved or recreated. A plan of which no pod
    was ungated is withdrawn when pods are missing for so long. For the last pods of a Job, its longest
    back-off is added."""
    again: float = 15.0
    """Between two attempts to place a gang that does not fit, since pods of others end without an event here.
    Also the shortest time between two reads of the owners of its pods."""
    max_spares: int = 8
    """Spare trays that all gangs of a namespace may keep together. No ResourceQuota counts them, since no pod
    runs on them."""
    clique_label: str = names.GPU_CLIQUE_LABEL
    """The node label whose value names the NVLink clique."""


def checked_gang_settings(settings: GangSettings) -> GangSettings:
    """The settings, unchanged. Raises Refused for values without a sense."""
    for name in ("settle", "lost_after", "bind_after", "again"):
        if not 0 < getattr(settings, name) < float("inf"):
            raise Refused(f"{name} is {getattr(settings, name)}", nearest_fix="use seconds above 0")
    if settings.max_spares < 0:
        raise Refused(f"max_spares is {settings.max_spares}", nearest_fix="use 0 for none")
    if not settings.clique_label:
        raise Refused("clique_label is empty", nearest_fix=f"use {names.GPU_CLIQUE_LABEL}")
    return settings
