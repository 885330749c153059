"""Racks as they are drawn: values that are equal exactly when their drawings are, and geometry.

`drawn_rack` decides for each GPU its state, colour and letter, and for each tray its title, notes and whether
it is free as a whole. GPUs, NICs, trays and switches have the marks that findings leave (`places`). Of
several NICs of a GPU the worst is drawn. Switches stand between the trays: of 18 compute trays 10 stand
above them and 8 below.

`drawing` gives coordinates for the SVG template: trays, letters, NIC marks, and an outline around trays
of one ComputeDomain that stand together. Each state of a NIC has its own shape, so that no reader needs the
colour. One text element carries the letters of all GPUs of a tone, and one path the NIC marks of a kind,
which keeps the markup of a large site small.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from rackloom.core.diagnosis.findings import Level
from rackloom.core.diagnosis.index import at_device
from rackloom.core.diagnosis.snapshot import GpuChain, Layer, grouped
from rackloom.web.frames import (
    GROUP_MODES,
    STATE_CLASSES,
    ColourGroup,
    ColourMode,
    GpuShade,
    GpuState,
    MapColours,
    Palette,
    RackFrame,
    gpu_shade,
    letter_of,
)
from rackloom.web.highlight import FilterChoice, gpu_mark, group_mark
from rackloom.web.model import MapGpu, SiteMap, rack_id, tray_free
from rackloom.web.places import GpuSpot

# Values.


class DrawnGpu(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One GPU."""

    part: str
    """Its name, as `rack-04/slot-2/gpu-2`."""
    state: GpuState
    hue: int = 0
    letter: str = ""
    name: str = ""
    """The name of its group, or its state without one."""
    level: Level | None = None
    """The level of the worst finding that names it."""
    busy: bool = False
    """Whether a pod uses it."""
    mark: str = ""
    """The mark by which a filter finds its group: see `highlight`."""
    nic: str = ""
    """The level of the worst finding that names a NIC of it, `well`, or `none`. Empty if it is not shown."""

    @property
    def style(self) -> str:
        """The style classes of the drawing."""
        base = f"h{self.hue}" if self.state is GpuState.GROUP else STATE_CLASSES[self.state]
        mark = f" {self.mark}" if self.mark else ""
        level = "" if self.level is None else f" {LEVEL_CLASSES[self.level]}"
        return base + level + (" b" if self.busy else "") + mark

    @property
    def words(self) -> str:
        """The drawing in words, for screen readers."""
        state = _STATE_WORDS.get(self.state) or self.name or "free"
        if self.state is GpuState.UNKNOWN and self.name:
            state += f", last known {self.name}"
        notes = [] if self.level is None else [self.level.value]
        notes += ["used by a pod"] * self.busy
        return ", ".join([state, *notes, *([f"NIC {self.nic}"] if self.nic else [])])


_STATE_WORDS = {
    GpuState.OTHERS: "in use by somebody else",
    GpuState.UNKNOWN: "unknown",
    GpuState.USED: "in use",
    GpuState.STRANDED: "free, in a tray that is partly taken",
    GpuState.HEALTHY: "healthy",
    GpuState.CRITICAL: "a problem",
    GpuState.DEGRADED: "a problem",
}
LEVEL_CLASSES = {Level.CRITICAL: "s", Level.DEGRADED: "d", Level.UNKNOWN: "v"}
"""The style class of each level."""


class DrawnTray(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One compute tray."""

    slot: int
    title: str
    cells: tuple[DrawnGpu, ...]
    free: bool | None
    """Whether the whole tray is free."""
    notes: tuple[str, ...] = ()
    """Notes such as cordoned, and the titles of findings."""
    level: Level | None = None
    """The level of the worst finding that names the tray, or its node or machine."""
    laid_over: str = ""
    """The ComputeDomain that it is a member of."""
    badge: int | None = None
    """Number of that ComputeDomain on the map."""
    badge_hue: int = 0


class DrawnRack(msgspec.Struct, frozen=True, kw_only=True):
    """One rack: compute trays, the switches between them, and its free trays."""

    mode: ColourMode
    id: str
    name: str
    domains: tuple[str, ...]
    """UUIDs of its NVLink domains, for operators."""
    above: tuple[DrawnTray, ...]
    """Above the switches, top first."""
    below: tuple[DrawnTray, ...]
    switches: Level | None
    """The level of the worst finding that names an NVLink domain of it."""
    problems: tuple[str, ...]
    """The titles of the findings about these domains."""
    free: int | None
    """Whole trays that are free, or None if that is unknown."""

    @property
    def trays(self) -> tuple[DrawnTray, ...]:
        """All trays, top first."""
        return self.above + self.below


GpuAddress = tuple[str, int, int]
"""Rack id, tray from the top, GPU from the left: how the page names a GPU."""


def find_gpu(whole: SiteMap, spot: GpuAddress) -> MapGpu | None:
    """The GPU at an address of the page."""
    id_, tray, gpu = spot
    rack = next((rack for rack in whole.racks if rack_id(rack.name) == id_), None)
    if rack is None or tray >= len(rack.trays) or gpu >= len(rack.trays[tray]):
        return None
    return rack.trays[tray][gpu]


def drawn_rack(frame: RackFrame, mode: ColourMode, colours: MapColours) -> DrawnRack:
    """One rack. New groups in it are given colours."""
    drawn = tuple(_drawn_tray(frame, mode, colours, tray) for tray in range(len(frame.rack.trays)))
    switches = frame.marks.switches if frame.marks is not None else []
    # As racks are built: of 18 compute trays 10 stand above the switches and 8 below.
    lower = len(drawn) * 4 // 9
    frees = [tray.free for tray in drawn]
    return DrawnRack(
        mode=mode,
        id=rack_id(frame.rack.name),
        name=frame.rack.name,
        domains=frame.named,
        above=drawn[: len(drawn) - lower],
        below=drawn[len(drawn) - lower :],
        switches=switches[0].level if switches else None,
        problems=tuple(mark.title for mark in switches),
        free=None if None in frees else sum(free is True for free in frees),
    )


def _drawn_tray(frame: RackFrame, mode: ColourMode, colours: MapColours, tray: int) -> DrawnTray:
    gpus = frame.rack.trays[tray]
    chain = next((gpu.chain for gpu in gpus if gpu.chain is not None), None)
    laid = frame.over.get(chain.node.name) if chain is not None and chain.node is not None else None
    mark = None if frame.marks is None else frame.marks.trays.get(tray)
    names = [str(gpus[0].place.name.tray)]
    if chain is not None and chain.machine is not None:
        names.append(f"machine {chain.machine.id}")
    if chain is not None and chain.node is not None:
        names.append(f"node {chain.node.name}")
    return DrawnTray(
        slot=gpus[0].place.name.slot or 0,
        title=", ".join(names),
        cells=tuple(_drawn_gpu(frame, mode, colours, (tray, number)) for number in range(len(gpus))),
        free=tray_free(gpus),
        notes=(*_tray_notes(chain), *([mark.title] if mark else [])),
        level=mark.level if mark else None,
        laid_over=laid[1] if laid else "",
        badge=None if laid is None else colours.badges.number(ColourGroup(*laid)),
        badge_hue=0 if laid is None else colours.badges.hue(ColourGroup(*laid)),
    )


def _tray_notes(chain: GpuChain | None) -> Iterator[str]:
    """Decisions that keep new work away."""
    machine, node = (chain.machine, chain.node) if chain is not None else (None, None)
    if machine is not None and machine.cordoned:
        yield "cordoned"
    if machine is not None and machine.reservation:
        yield machine.reservation
    if node is not None and node.unschedulable:
        yield "unschedulable"


def _drawn_gpu(frame: RackFrame, mode: ColourMode, colours: MapColours, spot: GpuSpot) -> DrawnGpu:
    gpu = frame.rack.trays[spot[0]][spot[1]]
    chain, part = gpu.chain, str(gpu.place.name)
    found: GpuShade = gpu_shade(frame, mode, spot)
    if chain is None:
        return DrawnGpu(part=part, state=found.state, name="free" if found.state is GpuState.FREE else "")
    number = None if found.group is None else colours.groups.number(found.group)
    return DrawnGpu(
        part=part,
        state=found.state,
        hue=0 if found.group is None else colours.groups.hue(found.group),
        letter="" if number is None else letter_of(number),
        name=_group_name(found, mode),
        mark=gpu_mark(found),
        level=frame.level(spot),
        busy=chain.use is not None,
        nic=_nic_mark(frame, chain),
    )


def _group_name(found: GpuShade, mode: ColourMode) -> str:
    """The name of its group. A GPU without a group may be in use nevertheless."""
    if found.group is not None:
        return found.group.name
    return f"no {mode}" if found.state is GpuState.FREE and mode in GROUP_MODES else ""


def _nic_mark(frame: RackFrame, chain: GpuChain) -> str:
    """The mark of the NICs of a GPU: that of the worst NIC."""
    if chain.device is None or Layer.CLUSTER not in frame.known or frame.marks is None:
        return ""
    if not chain.nics:
        return "none"
    devices = frame.marks.devices
    marks = [devices[name].level for nic in chain.nics if (name := at_device(nic)) in devices]
    return next((level.value for level in Level if level in marks), "well")


class LegendEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the legend."""

    hue: int
    letter: str
    name: str
    count: int
    choice: FilterChoice
    """The choice of a filter for this entry."""


def domain_badges(whole: SiteMap, colours: MapColours) -> tuple[LegendEntry, ...]:
    """The ComputeDomains that are laid over the racks, with the number of nodes of each."""
    nodes = {
        ColourGroup(domain.uid, domain.key): len(domain.status.nodes) for domain in whole.compute_domains
    }
    return _legend(nodes, colours.badges, lambda number: str(number + 1))


def colour_groups(frame: RackFrame, mode: ColourMode) -> Counter[ColourGroup]:
    """The groups in one rack, with the number of GPUs of each."""
    if mode not in GROUP_MODES:
        return Counter()
    shades = (gpu_shade(frame, mode, spot) for spot in frame.rack.spots)
    return Counter(shade.group for shade in shades if shade.group is not None)


def legend_entries(counts: Counter[ColourGroup], colours: MapColours) -> tuple[LegendEntry, ...]:
    """The groups that are drawn in any rack. `counts` has the number of GPUs of each."""
    return _legend(counts, colours.groups, letter_of)


def _legend(
    counts: Mapping[ColourGroup, int], palette: Palette, letter: Callable[[int], str]
) -> tuple[LegendEntry, ...]:
    numbered = sorted((palette.number(group), group, count) for group, count in counts.items())
    return tuple(
        LegendEntry(
            hue=palette.hue(group),
            letter=letter(number),
            name=group.name,
            count=count,
            choice=FilterChoice(group_mark(group.key), group.name, palette.hue(group)),
        )
        for number, group, count in numbered
    )


# Geometry.


ROW = 20
"""From one compute tray to the next."""
CELL = 27
"""From one GPU to the next."""
LEFT = 26
"""The x of the first GPU. Slots are written left of it."""
NIC = 8
SWITCH = 7
BADGE = 16


class TrayLine(msgspec.Struct, frozen=True, kw_only=True):
    """One tray and its height in the drawing."""

    y: int
    index: int
    tray: DrawnTray
    letters: tuple[tuple[str, str, str], ...]
    """Tone, the x of each letter, and the letters: one text element carries those of all GPUs of a tone."""
    nics: tuple[tuple[str, str], ...]
    """The state of NICs, and the path that marks all NICs of the tray in that state."""


class DomainOutline(msgspec.Struct, frozen=True):
    """The outline of a ComputeDomain around adjacent trays."""

    y: int
    height: int
    badge: int
    hue: int
    name: str


class RackDrawing(msgspec.Struct, frozen=True, kw_only=True):
    """One rack, ready to be written down."""

    rack: DrawnRack
    lines: tuple[TrayLine, ...]
    outlines: tuple[DomainOutline, ...]
    switches: tuple[int, ...]
    """The y of each switch tray."""
    width: int
    height: int
    nics_at: int


def drawing(rack: DrawnRack, switch_trays: int) -> RackDrawing:
    """The coordinates of a rack. If the number of switch trays is not known, one is drawn."""
    widest = max((len(tray.cells) for tray in rack.trays), default=1)
    middle = ROW * len(rack.above) + 2
    switches = tuple(middle + SWITCH * number for number in range(max(1, switch_trays)))
    under = switches[-1] + SWITCH + 3
    nics_at = LEFT + CELL * widest + 3
    heights = [2 + ROW * n for n in range(len(rack.above))] + [
        under + ROW * n for n in range(len(rack.below))
    ]
    lines = tuple(
        _tray_line(y, n, tray, nics_at) for n, (y, tray) in enumerate(zip(heights, rack.trays, strict=True))
    )
    # One frame for trays of one ComputeDomain that follow one another, across the switches too.
    found = []
    for badge, run in groupby(lines, key=lambda line: line.tray.badge):
        if badge is not None:
            rows = list(run)
            first = rows[0].tray
            height = rows[-1].y - rows[0].y + ROW - 1
            found.append(DomainOutline(rows[0].y - 1, height, badge, first.badge_hue, first.laid_over))
    return RackDrawing(
        rack=rack,
        lines=lines,
        outlines=tuple(found),
        switches=switches,
        width=nics_at + NIC * widest + BADGE,
        height=under + ROW * len(rack.below) + 2,
        nics_at=nics_at,
    )


def _tray_line(y: int, index: int, tray: DrawnTray, nics_at: int) -> TrayLine:
    found: dict[str, str] = {}
    for number, cell in enumerate(tray.cells):
        if stroke := _STROKES.get(cell.nic):
            x = nics_at + NIC * number + 3
            found[cell.nic] = found.get(cell.nic, "") + stroke.format(x=x, left=x - 3)
    letters, nics = _letter_runs(tray.cells), tuple(found.items())
    return TrayLine(y=y, index=index, tray=tray, letters=letters, nics=nics)


def _letter_runs(cells: Sequence[DrawnGpu]) -> tuple[tuple[str, str, str], ...]:
    tones = grouped(
        (_letter_tone(cell), (str(LEFT + CELL * number + 12), mark))
        for number, cell in enumerate(cells)
        if (mark := "!" if cell.level in (Level.CRITICAL, Level.DEGRADED) else cell.letter)
    )
    return tuple(
        (tone, " ".join(x for x, _ in marks), "".join(mark for _, mark in marks))
        for tone, marks in tones.items()
    )


def _letter_tone(cell: DrawnGpu) -> str:
    """The style of a letter: readable on a colour, else dimmed, or red for a GPU with a problem."""
    if cell.state in (GpuState.GROUP, GpuState.CRITICAL, GpuState.DEGRADED):
        return "on"
    return {Level.CRITICAL: "bad", Level.DEGRADED: "warn"}.get(cell.level or Level.UNKNOWN, "dim")


_STROKES = {
    "well": "M{x} 5v7",
    "critical": "M{left} 5.5l6 6m0 -6l-6 6",
    "degraded": "M{x} 5l3 3.5l-3 3.5l-3 -3.5z",
    "unknown": "M{left} 8.5h5",
    "none": "M{left} 11.5h5",
}
"""A distinct shape for each state of a NIC, so that colour is not needed."""
