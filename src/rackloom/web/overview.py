"""The site on one screen: a cell for each rack, and the numbers that a viewer reads first.

`rack_counts` counts the contribution of one rack to the numbers, and `overview_cell` decides how the rack is
shown among all others. Both depend only on the frame of the rack, so a change costs the work of one rack.
`site_summary` makes a sentence and five numbers of the sums.

The sentence and the healthy GPUs come from the findings. A GPU is in use or free only if every layer that
would report it was read. All others are unknown. A number that may be higher or lower states for how many
GPUs, and since when.

An operator's numbers are those of the site. A tenant's count its own GPUs alone: those that its pods use,
those that are healthy, and the fastest transfer from them. The largest job is the largest that fits for it.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import msgspec

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.findings import Level, needs_attention
from rackloom.core.diagnosis.snapshot import GpuChain, Layer, MeasuredTransfer
from rackloom.web.frames import (
    GROUP_MODES,
    STATE_CLASSES,
    ColourGroup,
    ColourMode,
    GpuShade,
    GpuState,
    MapColours,
    RackFrame,
    gpu_shade,
    letter_of,
)
from rackloom.web.highlight import group_mark, rack_marks
from rackloom.web.live import LiveReading
from rackloom.web.model import MapGpu, SiteMap, rack_id
from rackloom.web.panels import FreeCapacity
from rackloom.web.racks import LEVEL_CLASSES

# The contribution of one rack to the numbers.


PROVED = "holds"
"""The verdict of a transfer that was measured and kept its promise."""


class RackCounts(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of one rack that the viewer may see, or of many racks."""

    gpus: int = 0
    used: int = 0
    """GPUs used by an instance or a pod. For a tenant's own GPUs, by a pod."""
    use_unknown: int = 0
    problems: int = 0
    """GPUs with a finding that needs attention."""
    health_unknown: int = 0
    """Other GPUs that a finding names, or all if the site was not examined."""
    fastest: MeasuredTransfer | None = None
    """The fastest transfer from one of them that kept its promise."""


def rack_counts(frame: RackFrame) -> RackCounts:
    """Count the GPUs of one rack."""
    seen = [(gpu, gpu.chain) for tray in frame.rack.trays for gpu in tray if gpu.chain is not None]
    if not seen:
        return RackCounts()
    used = [_is_used(frame, gpu, chain) for gpu, chain in seen]
    marks = None if frame.marks is None else frame.marks.gpus.values()
    unknown = len(seen) if marks is None else sum(mark.level is Level.UNKNOWN for mark in marks)
    return RackCounts(
        gpus=len(seen),
        used=used.count(True),
        use_unknown=used.count(None),
        problems=0 if marks is None else len(marks) - unknown,
        health_unknown=unknown,
        fastest=_fastest([chain.transfer for _, chain in seen if chain.transfer is not None]),
    )


def _is_used(frame: RackFrame, gpu: MapGpu, chain: GpuChain) -> bool | None:
    """Whether a GPU is in use. A tenant's own GPUs are all taken, so there it is whether a pod uses them."""
    if frame.operator:
        return gpu.taken
    return None if Layer.CLUSTER not in frame.known else chain.use is not None


def _fastest(transfers: Collection[MeasuredTransfer]) -> MeasuredTransfer | None:
    proved = [transfer for transfer in transfers if transfer.verdict == PROVED]
    return max(proved, key=lambda transfer: (transfer.gigabytes_per_second, transfer.at), default=None)


def site_counts(racks: Sequence[RackCounts]) -> RackCounts:
    """The sums over some racks."""
    return RackCounts(
        gpus=sum(rack.gpus for rack in racks),
        used=sum(rack.used for rack in racks),
        use_unknown=sum(rack.use_unknown for rack in racks),
        problems=sum(rack.problems for rack in racks),
        health_unknown=sum(rack.health_unknown for rack in racks),
        fastest=_fastest([rack.fastest for rack in racks if rack.fastest is not None]),
    )


# One rack among all.


class OverviewCell(msgspec.Struct, frozen=True, kw_only=True):
    """The cell of one rack among all others."""

    id: str
    name: str
    style: str
    """Its style classes."""
    mark: str
    """A letter of its largest group, or an exclamation mark for a problem."""
    words: str
    """The content of the cell, in words."""
    trays: tuple[str, ...]
    """The style class of each tray, top first."""


def cell_id(name: str) -> str:
    """The id of the cell of a rack. The rack itself has another one."""
    return "c" + rack_id(name)[1:]


def overview_cell(
    frame: RackFrame, mode: ColourMode, colours: MapColours, counts: RackCounts
) -> OverviewCell:
    """How one rack is shown. New groups in it are given colours."""
    trays = [
        [gpu_shade(frame, mode, (tray, gpu)) for gpu in range(len(gpus))]
        for tray, gpus in enumerate(frame.rack.trays)
    ]
    shades = [shade for tray in trays for shade in tray]
    levels = {mark.level for mark in frame.marks.gpus.values()} if frame.marks is not None else ()
    worst = next((f" {LEVEL_CLASSES[level]}" for level in Level if level in levels), "")
    group = _largest_group(shades)
    letter = letter_of(colours.groups.number(group)) if group is not None else ""
    return OverviewCell(
        id=cell_id(frame.rack.name),
        name=frame.rack.name,
        style=f"{_style(frame, mode, colours, shades)}{worst} {rack_marks(shades)}",
        mark="!" if counts.problems else letter,
        words=", ".join(_cell_words(mode, counts, shades)),
        trays=tuple(_tray_style(frame, mode, colours, tray) for tray in trays),
    )


def _tray_style(frame: RackFrame, mode: ColourMode, colours: MapColours, shades: Sequence[GpuShade]) -> str:
    """The style class of a tray, with the mark of the group that it is drawn for."""
    style = _style(frame, mode, colours, shades)
    group = _largest_group(shades) if style.startswith("h") else None
    return style if group is None else f"{style} {group_mark(group.key)}"


def _style(frame: RackFrame, mode: ColourMode, colours: MapColours, shades: Sequence[GpuShade]) -> str:
    """The style class of some GPUs: a problem or a doubt about some of them is not averaged away.

    An operator sees a group if it has at least half of the GPUs, a tenant if it has any.
    """
    # Lists are counted, because a Counter of four GPUs costs ten times as much.
    states = [shade.state for shade in shades]
    if mode is ColourMode.HEALTH:
        return STATE_CLASSES[next((state for state in _WORST_FIRST if state in states), GpuState.FREE)]
    if mode in GROUP_MODES:
        group = _largest_group(shades)
        if group is not None and (not frame.operator or states.count(GpuState.GROUP) * 2 >= len(shades)):
            return f"h{colours.groups.hue(group)}"
        return STATE_CLASSES[max(_UNGROUPED, key=states.count)]
    if states.count(GpuState.UNKNOWN) * 2 >= len(shades):
        return STATE_CLASSES[GpuState.UNKNOWN]
    if mode is ColourMode.FRAGMENTATION:
        return f"{STATE_CLASSES[GpuState.STRANDED]}{_level(states.count(GpuState.STRANDED), len(shades))}"
    used = states.count(GpuState.USED) + states.count(GpuState.OTHERS)
    return f"{STATE_CLASSES[GpuState.USED]}{_level(used, len(shades))}"


_WORST_FIRST = (GpuState.CRITICAL, GpuState.DEGRADED, GpuState.UNKNOWN, GpuState.HEALTHY, GpuState.OTHERS)
_UNGROUPED = (GpuState.UNKNOWN, GpuState.OTHERS, GpuState.FREE)
LEVELS = 4


def _level(some: int, whole: int) -> int:
    """The darkness of a share: 0 for none and 4 for all, so that a full rack differs from any other."""
    if some == whole:
        return LEVELS
    return 1 + some * (LEVELS - 1) // whole if some else 0


def _largest_group(shades: Sequence[GpuShade]) -> ColourGroup | None:
    groups = Counter(shade.group for shade in shades if shade.state is GpuState.GROUP and shade.group)
    return max(groups, key=lambda group: (groups[group], group.key), default=None)


def _cell_words(mode: ColourMode, counts: RackCounts, shades: Sequence[GpuShade]) -> Iterator[str]:
    states = Counter(shade.state for shade in shades)
    if mode in GROUP_MODES:
        groups = Counter(
            shade.group.name for shade in shades if shade.state is GpuState.GROUP and shade.group
        )
        for name, count in groups.most_common(MOST_NAMED):
            yield f"{count} of {name}"
        if len(groups) > MOST_NAMED:
            yield f"{len(groups) - MOST_NAMED} more groups"
    for state, words in _COUNTED_WORDS.items():
        if states[state]:
            nobody = f"in no {mode}, or free" if state is GpuState.FREE and mode in GROUP_MODES else ""
            yield f"{states[state]} {nobody or words}"
    if counts.problems and mode is not ColourMode.HEALTH:
        yield f"{counts.problems} with a problem"


MOST_NAMED = 3
"""Groups of a rack that are named. The rest is counted."""
_COUNTED_WORDS = {
    GpuState.CRITICAL: "critical",
    GpuState.DEGRADED: "degraded",
    GpuState.USED: "in use",
    GpuState.OTHERS: "in use by somebody else",
    GpuState.STRANDED: "stranded in partly taken trays",
    GpuState.HEALTHY: "healthy",
    GpuState.FREE: "free",
    GpuState.UNKNOWN: "unknown",
}


# The sentence and the five numbers.


class KeyNumber(msgspec.Struct, frozen=True, kw_only=True):
    """One number that is read first."""

    label: str
    value: str
    note: str = ""
    since: float | None = None
    """Since when something about it is unknown."""
    at: float | None = None
    """When it was found."""
    tone: str = ""
    """bad for a problem, doubt if something is unknown."""


class SiteSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The summary that a viewer reads first."""

    sentence: str
    since: float | None = None
    """When the state in the sentence began."""
    tone: str = ""
    numbers: tuple[KeyNumber, ...]


UNKNOWN = "unknown"


def site_summary(now: LiveReading, whole: SiteMap, counts: RackCounts, room: FreeCapacity) -> SiteSummary:
    """The sentence and the numbers of one viewer. `whole` is its part of the site."""
    label = "GPUs in use" if whole.operator else "Your GPUs used by pods"
    numbers: tuple[KeyNumber, ...] = (
        _attention(whole),
        _share(whole, counts, label, counts.used, counts.use_unknown),
        _healthy(whole, counts),
        _largest_job(whole, room),
        _fastest_path(whole, counts),
    )
    if now.unread_since is not None:
        numbers = tuple(_as_last_known(number, now.unread_since) for number in numbers)
    sentence, since, tone = _sentence(whole, counts)
    return SiteSummary(sentence=sentence, since=since, tone=tone, numbers=numbers)


def _as_last_known(number: KeyNumber, since: float) -> KeyNumber:
    last = "" if number.value == UNKNOWN else f"last known: {number.value}"
    return KeyNumber(label=number.label, value=UNKNOWN, note=last, since=since, tone="doubt")


def _sentence(whole: SiteMap, counts: RackCounts) -> tuple[str, float | None, str]:
    """The sentence, when its state began, and its tone."""
    if whole.findings is None:
        return "The site has not been examined yet.", None, "doubt"
    wrong = needs_attention(whole.findings)
    shown = wrong or whole.findings
    if shown:
        first, is_single = shown[0], len(shown) == 1
        what = f"need{'s' * is_single} attention" if wrong else f"{'is' if is_single else 'are'} unknown"
        begin = f"One thing {what}: " if is_single else f"{len(shown)} things {what}, first: "
        title = first.title or first.subject
        # A sentence about an unknown state ends with the time since which it is unknown.
        if not wrong and first.since is not None:
            return f"{begin}{title}", first.since, "doubt"
        return f"{begin}{title}.", None, "bad" if wrong else "doubt"
    if not counts.gpus:
        return ("No GPU is known yet." if whole.operator else "You have no GPUs here yet."), None, ""
    return f"Nothing needs attention: all {_gpus(whole, counts.gpus)} are healthy.", None, ""


def _gpus(whole: SiteMap, count: int) -> str:
    if not whole.operator:
        return f"your {count:,} GPUs"
    racks = len(whole.racks)
    return f"{count:,} GPUs in {racks:,} {'rack' if racks == 1 else 'racks'}"


def _attention(whole: SiteMap) -> KeyNumber:
    label = "Needs attention"
    if whole.findings is None:
        return KeyNumber(label=label, value=UNKNOWN, note="not examined yet", tone="doubt")
    wrong = len(needs_attention(whole.findings))
    doubts = len(whole.findings) - wrong
    return KeyNumber(
        label=label,
        value=f"{wrong:,}",
        note=f"and {doubts:,} unknown" if doubts else "",
        at=whole.examined_at,
        tone="bad" if wrong else "doubt" if doubts else "",
    )


def _healthy(whole: SiteMap, counts: RackCounts) -> KeyNumber:
    label = "Healthy" if whole.operator else "Your healthy GPUs"
    healthy = counts.gpus - counts.problems - counts.health_unknown
    found = _share(whole, counts, label, healthy, counts.health_unknown)
    return msgspec.structs.replace(found, tone="bad") if counts.problems else found


def _share(whole: SiteMap, counts: RackCounts, label: str, some: int, doubtful: int) -> KeyNumber:
    """The number of GPUs with a property, and the number for which it is unknown."""
    if not counts.gpus:
        return KeyNumber(label=label, value="0", note="of 0")
    since = _unknown_since(whole) if doubtful else None
    if doubtful == counts.gpus:
        return KeyNumber(label=label, value=UNKNOWN, since=since, tone="doubt")
    note = f"of {counts.gpus:,}" + (f", {doubtful:,} unknown" if doubtful else "")
    return KeyNumber(label=label, value=f"{some:,}", note=note, since=since, tone="doubt" if doubtful else "")


def _largest_job(whole: SiteMap, room: FreeCapacity) -> KeyNumber:
    unknown = f"{room.unknown_trays:,}" if room.unknown_trays else ""
    if room.gang_trays:
        value = f"{room.gang_gpus:,} GPUs"
        trays = f"{room.gang_trays} trays of one domain"
        note = f"at least {trays}, {unknown} unknown" if unknown else trays
    else:
        value, note = (UNKNOWN, f"{unknown} trays") if unknown else ("none", "")
    since, tone = (_unknown_since(whole), "doubt") if unknown else (None, "")
    return KeyNumber(label="Largest job that fits", value=value, note=note, since=since, tone=tone)


def _fastest_path(whole: SiteMap, counts: RackCounts) -> KeyNumber:
    label = "Fastest proved path"
    status, found = whole.layer(Layer.TRANSFER), counts.fastest
    if not whole.known(Layer.TRANSFER):
        note = "" if status.unknown_since is not None else "transfers were not read"
        return KeyNumber(label=label, value=UNKNOWN, note=note, since=status.unknown_since, tone="doubt")
    if found is None:
        return KeyNumber(label=label, value="none yet", note="no measured transfer kept a promise")
    emulated = ", emulated" if found.emulated else ""
    value = f"{found.gigabytes_per_second:.1f} GB/s"
    return KeyNumber(label=label, value=value, note=f"by {found.device}{emulated}", at=found.at)


def _unknown_since(whole: SiteMap) -> float | None:
    """The time since which a layer or a switch controller cannot be read, by the findings."""
    lost = (finding for finding in whole.findings or () if finding.check in (Check.LAYER, Check.CONTROLLER))
    return min((finding.since for finding in lost if finding.since is not None), default=None)
