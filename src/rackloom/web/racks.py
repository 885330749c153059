"""Racks as they are drawn: values that are equal exactly when their drawings are, and geometry.

`drawn_rack` decides for each GPU its state, colour, letter, health and NIC mark, and for each tray its
title, notes and whether it is free as a whole. Of several NIC links the worst is drawn. Switches stand
between the trays: of 18 compute trays 10 stand above them and 8 below.

`drawing` gives coordinates for the SVG template: trays, letters, NIC marks, and an outline around trays
of one ComputeDomain that stand together. Each state of a NIC has its own shape, so that nobody needs the
colour. One text element carries the letters of all GPUs of a tone, and one path the NIC marks of a kind,
which keeps the markup of a large site small.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import groupby

import msgspec

from rackloom.core.diagnosis.checks.nics import is_link_unknown, link_problem
from rackloom.core.diagnosis.snapshot import GpuChain, Layer, grouped
from rackloom.web.chain import Wiring, fastest_rate, nearest_wiring
from rackloom.web.frames import (
    GROUP_MODES,
    STATE_CLASSES,
    ColourGroup,
    ColourMode,
    FabricState,
    GpuShade,
    GpuState,
    MapColours,
    Palette,
    RackFrame,
    gpu_shade,
    is_node_lost,
    is_sick,
    letter_of,
)
from rackloom.web.highlight import FilterChoice, gpu_mark, group_mark
from rackloom.web.model import MapGpu, MapTray, SiteMap, tray_free

# Values.


class DrawnGpu(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One GPU."""

    state: GpuState
    hue: int = 0
    letter: str = ""
    name: str = ""
    """Of its group, or what it is without one."""
    sick: bool = False
    busy: bool = False
    """Whether a pod uses it."""
    mark: str = ""
    """By which a filter finds its group: see `highlight`."""
    nic: str = "unknown"
    """aligned, astray (at another NUMA node), down, slow, none, unknown; empty: not shown."""

    @property
    def style(self) -> str:
        """The style classes of the drawing."""
        base = f"h{self.hue}" if self.state is GpuState.GROUP else STATE_CLASSES[self.state]
        mark = f" {self.mark}" if self.mark else ""
        return base + (" s" if self.sick else "") + (" b" if self.busy else "") + mark

    @property
    def words(self) -> str:
        """The drawing in words, for screen readers."""
        state = _STATE_WORDS.get(self.state) or self.name or "free"
        if self.state is GpuState.UNKNOWN and self.name:
            state += f", last known {self.name}"
        notes = ["unhealthy"] * self.sick + ["used by a pod"] * self.busy
        return ", ".join([state, *notes, *([f"NIC {self.nic}"] if self.nic else [])])


_STATE_WORDS = {
    GpuState.OTHERS: "in use by somebody else",
    GpuState.UNKNOWN: "unknown",
    GpuState.USED: "in use",
    GpuState.STRANDED: "free, in a tray that is partly taken",
    GpuState.HEALTHY: "healthy",
    GpuState.PROBLEM: "a problem",
}


class DrawnTray(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One compute tray."""

    slot: int
    title: str
    cells: tuple[DrawnGpu, ...]
    free: bool | None
    """Whether the whole tray is free."""
    notes: tuple[str, ...] = ()
    """Notes such as cordoned or not ready."""
    lost: bool = False
    """Whether its node is not known to be ready."""
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
    switches: FabricState
    problems: tuple[str, ...]
    """Why they are not known."""
    free: int | None
    """Whole trays that are free; None: unknown."""

    @property
    def trays(self) -> tuple[DrawnTray, ...]:
        """All trays, top first."""
        return self.above + self.below


GpuAddress = tuple[str, int, int]
"""Rack id, tray from the top, GPU from the left: how the page names a GPU."""


@lru_cache(maxsize=1 << 16)
def rack_id(name: str) -> str:
    """A name for a rack that any page element may have."""
    return "r" + sha256(name.encode()).hexdigest()[:12]


def find_gpu(whole: SiteMap, spot: GpuAddress) -> MapGpu | None:
    """The GPU that the page names so."""
    id_, tray, gpu = spot
    rack = next((rack for rack in whole.racks if rack_id(rack.name) == id_), None)
    if rack is None or tray >= len(rack.trays) or gpu >= len(rack.trays[tray]):
        return None
    return rack.trays[tray][gpu]


def drawn_rack(frame: RackFrame, mode: ColourMode, colours: MapColours) -> DrawnRack:
    """One rack. New groups in it are given colours."""
    drawn = tuple(_drawn_tray(frame, mode, colours, tray) for tray in frame.rack.trays)
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
        switches=frame.fabric,
        problems=frame.problems,
        free=None if None in frees else sum(free is True for free in frees),
    )


def _drawn_tray(frame: RackFrame, mode: ColourMode, colours: MapColours, gpus: MapTray) -> DrawnTray:
    chain = next((gpu.chain for gpu in gpus if gpu.chain is not None), None)
    siblings = fastest_rate(gpu.chain for gpu in gpus if gpu.chain is not None)
    laid = frame.over.get(chain.node.name) if chain is not None and chain.node is not None else None
    return DrawnTray(
        slot=gpus[0].place.slot,
        title=_tray_title(gpus[0], chain),
        cells=tuple(_drawn_gpu(frame, mode, colours, gpus, gpu, siblings) for gpu in gpus),
        free=tray_free(gpus),
        notes=_tray_notes(frame, chain) + _foreign_notes(gpus),
        lost=chain is not None and is_node_lost(frame, chain),
        laid_over=laid[1] if laid else "",
        badge=None if laid is None else colours.badges.number(ColourGroup(*laid)),
        badge_hue=0 if laid is None else colours.badges.hue(ColourGroup(*laid)),
    )


def _tray_title(gpu: MapGpu, chain: GpuChain | None) -> str:
    names = [f"slot {gpu.place.slot}"] if gpu.place.chassis or chain is None else []
    if chain is not None and chain.machine is not None:
        names.append(f"machine {chain.machine.id}")
    if chain is not None and chain.node is not None:
        names.append(f"node {chain.node.name}")
    return ", ".join(names)


def _tray_notes(frame: RackFrame, chain: GpuChain | None) -> tuple[str, ...]:
    found = []
    machine, node = (chain.machine, chain.node) if chain is not None else (None, None)
    if machine is not None and machine.cordoned:
        found.append("cordoned")
    if machine is not None and machine.reservation:
        found.append(machine.reservation)
    if machine is not None and machine.health:
        found.append("machine unhealthy")
    if chain is not None and node is not None and is_node_lost(frame, chain):
        found.append("node not ready" if node.ready is False else "node unknown")
    if node is not None and node.unschedulable:
        found.append("unschedulable")
    return tuple(found)


def _foreign_notes(gpus: tuple[MapGpu, ...]) -> tuple[str, ...]:
    """The partitions that the site did not make and that hold GPUs of the tray, where the viewer may know."""
    names = {
        gpu.chain.partition.name or str(gpu.chain.partition.id)
        for gpu in gpus
        if gpu.foreign and gpu.chain is not None and gpu.chain.partition is not None
    }
    return tuple(f"in foreign partition {name}" for name in sorted(names))


def _drawn_gpu(
    frame: RackFrame, mode: ColourMode, colours: MapColours, tray: MapTray, gpu: MapGpu, siblings: int
) -> DrawnGpu:
    """One GPU, in a tray whose fastest rail has so many Gb/s."""
    chain = gpu.chain
    found: GpuShade = gpu_shade(frame, mode, tray, gpu)
    if chain is None:
        return DrawnGpu(state=found.state, name="free" if found.state is GpuState.FREE else "", nic="")
    number = None if found.group is None else colours.groups.number(found.group)
    return DrawnGpu(
        state=found.state,
        hue=0 if found.group is None else colours.groups.hue(found.group),
        letter="" if number is None else letter_of(number),
        name=_group_name(found, mode),
        mark=gpu_mark(found),
        sick=is_sick(chain),
        busy=chain.use is not None,
        nic=_nic_mark(frame, chain, siblings),
    )


def _group_name(found: GpuShade, mode: ColourMode) -> str:
    """The name of its group. A GPU without a group may be in use nevertheless."""
    if found.group is not None:
        return found.group.name
    return f"no {mode}" if found.state is GpuState.FREE and mode in GROUP_MODES else ""


def _nic_mark(frame: RackFrame, chain: GpuChain, siblings: int) -> str:
    """How the NICs of a GPU are wired, as their plugins published it: of several links the worst is drawn."""
    if chain.device is None or Layer.CLUSTER not in frame.known:
        return "unknown"
    if not chain.nics:
        return "none"
    if any(link_problem(nic.link, None, 0) for nic in chain.nics):
        return "down"
    if any(link_problem(nic.link, nic.gbps, siblings) for nic in chain.nics):
        return "slow"
    if any(is_link_unknown(nic.link) for nic in chain.nics):
        return "unknown"
    return _WIRING_MARKS[nearest_wiring(chain.device, chain.nics)]


_WIRING_MARKS = {
    Wiring.ROOT: "aligned",
    Wiring.NUMA: "aligned",
    Wiring.APART: "astray",
    Wiring.UNKNOWN: "unknown",
}


class LegendEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the legend."""

    hue: int
    letter: str
    name: str
    count: int
    choice: FilterChoice
    """What a filter chooses by it."""


def domain_badges(whole: SiteMap, colours: MapColours) -> tuple[LegendEntry, ...]:
    """The ComputeDomains that are laid over the racks, and how many nodes each has."""
    nodes = {
        ColourGroup(domain.uid, domain.key): len(domain.status.nodes) for domain in whole.compute_domains
    }
    return _legend(nodes, colours.badges, lambda number: str(number + 1))


def colour_groups(frame: RackFrame, mode: ColourMode) -> Counter[ColourGroup]:
    """The groups in one rack, and how many GPUs each has there."""
    if mode not in GROUP_MODES:
        return Counter()
    shades = (gpu_shade(frame, mode, tray, gpu) for tray in frame.rack.trays for gpu in tray)
    return Counter(shade.group for shade in shades if shade.group is not None)


def legend_entries(counts: Counter[ColourGroup], colours: MapColours) -> tuple[LegendEntry, ...]:
    """The groups that are drawn in any rack; `counts`: how many GPUs each has."""
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
"""Where the first GPU stands: slots are written left of it."""
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
    """How NICs are wired, and the path that marks all NICs of a tray that are wired so."""


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
    return RackDrawing(
        rack=rack,
        lines=lines,
        outlines=_domain_outlines(lines),
        switches=switches,
        width=nics_at + NIC * widest + BADGE,
        height=under + ROW * len(rack.below) + 2,
        nics_at=nics_at,
    )


def _tray_line(y: int, index: int, tray: DrawnTray, nics_at: int) -> TrayLine:
    letters, nics = _letter_runs(tray.cells), _nic_paths(tray.cells, nics_at)
    return TrayLine(y=y, index=index, tray=tray, letters=letters, nics=nics)


def _letter_runs(cells: Sequence[DrawnGpu]) -> tuple[tuple[str, str, str], ...]:
    tones = grouped(
        (_letter_tone(cell), (str(LEFT + CELL * number + 12), mark))
        for number, cell in enumerate(cells)
        if (mark := "!" if cell.sick else cell.letter)
    )
    return tuple(
        (tone, " ".join(x for x, _ in marks), "".join(mark for _, mark in marks))
        for tone, marks in tones.items()
    )


def _letter_tone(cell: DrawnGpu) -> str:
    """The style of a letter: readable on a colour, else dimmed, or red for an unhealthy GPU."""
    if cell.state is GpuState.GROUP:
        return "on"
    return "bad" if cell.sick else "dim"


_STROKES = {
    "aligned": "M{x} 5v7",
    "astray": "M{x} 5l3 3.5l-3 3.5l-3 -3.5z",
    "down": "M{left} 5.5l6 6m0 -6l-6 6",
    "slow": "M{x} 9v3",
    "unknown": "M{left} 8.5h5",
    "none": "M{left} 11.5h5",
}
"""A distinct shape for each state of a NIC, so that colour is not needed."""


def _nic_paths(cells: Sequence[DrawnGpu], at: int) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for number, cell in enumerate(cells):
        if stroke := _STROKES.get(cell.nic):
            x = at + NIC * number + 3
            found[cell.nic] = found.get(cell.nic, "") + stroke.format(x=x, left=x - 3)
    return tuple(found.items())


def _domain_outlines(lines: Sequence[TrayLine]) -> tuple[DomainOutline, ...]:
    """One frame for trays of one ComputeDomain that follow one another, across the switches too."""
    found = []
    for badge, run in groupby(lines, key=lambda line: line.tray.badge):
        if badge is not None:
            rows = list(run)
            first = rows[0].tray
            height = rows[-1].y - rows[0].y + ROW - 1
            found.append(DomainOutline(rows[0].y - 1, height, badge, first.badge_hue, first.laid_over))
    return tuple(found)
