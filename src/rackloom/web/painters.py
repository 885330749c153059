"""The page of each kind of viewer: its parts, each with the reading that last changed it.

A kind of viewer is an organisation (none: it sees everything) and a colour mode. Its `Painter` redraws the
cell of a rack in the overview only if the frame of the rack differs from the last one, and compares
panels as text. A rack is drawn whole on demand: when a viewer has opened it, and on a site of few racks
always. `PageSheet.since` gives the parts that changed after a reading, for a stream to send: cells, panels,
and the racks that this viewer has opened.

Each kind has separate colours: gaps in the letters would reveal to a tenant how many groups others have.
A painter is kept while a stream is drawn by it, because a new one would give other colours and send every
rack again. Of the idle painters, the 32 that were used last are kept. Racks in which an organisation holds
nothing look alike to all organisations: they are drawn once in each mode, by a painter that all share.

A page that shows the past is drawn by a second painter, beside the one of the present and in its colours:
moving on through the history costs only the differences between two times.

Drawing runs in a thread, one page at a time (`serial_thread`).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from rackloom.core.diagnosis.incremental import Memo, recompute_changed
from rackloom.web import render
from rackloom.web.frames import (
    ColourGroup,
    ColourMode,
    MapColours,
    RackFrame,
    RackFrames,
    update_rack_frames,
)
from rackloom.web.highlight import FilterChoice, state_choices
from rackloom.web.live import LiveReading
from rackloom.web.model import SiteMap, rack_id
from rackloom.web.overview import (
    OverviewCell,
    RackCounts,
    overview_cell,
    rack_counts,
    site_counts,
    site_summary,
)
from rackloom.web.panels import FreeCapacity, RackCapacity, rack_capacity, site_capacity
from rackloom.web.places import PlacesByName
from rackloom.web.racks import (
    DrawnRack,
    LegendEntry,
    colour_groups,
    domain_badges,
    drawn_rack,
    legend_entries,
)
from rackloom.web.serial_thread import SerialThread
from rackloom.web.tenancy import NOBODY
from rackloom.web.view import WHOLE_RACKS

# One kind of viewer.


RACKS_ID = "racks"
"""The id of the element that holds the racks that are drawn whole."""
OVERVIEW_ID = "overview"
"""The id of the element that holds the cells of all racks."""
CELLS_AT_ONCE = 4
"""The overview is sent as a whole if more than one cell in this number changed."""


class PagePart(msgspec.Struct, frozen=True, kw_only=True):
    """One element of the page."""

    markup: str
    changed: int
    """Number of the reading that brought it."""
    drawn: object = None
    """The rack, the cell or the values that the markup shows. If None, it is rewritten for comparison."""


class PageSheet(msgspec.Struct, frozen=True, kw_only=True):
    """All parts that a viewer has on the screen, as of one reading."""

    number: int = 0
    whole: SiteMap = SiteMap(at=0.0)
    places: PlacesByName = msgspec.field(default_factory=dict)
    """The places of all objects that its findings and operations name."""
    racks: Mapping[str, PagePart] = msgspec.field(default_factory=dict)
    """Racks that are drawn whole, by id."""
    cells: Mapping[str, PagePart] = msgspec.field(default_factory=dict)
    """The cells of all racks, by id. Empty on a site that is drawn whole."""
    panels: Mapping[str, PagePart] = msgspec.field(default_factory=dict)
    choices: Mapping[str, FilterChoice] = msgspec.field(default_factory=dict)
    """The choices of a filter, by mark."""
    regrouped: int = 0
    """The reading in which racks came or went."""

    def all(self) -> Iterator[tuple[str, str]]:
        """Id and markup of everything."""
        yield from self._all_racks()
        yield from ((id_, panel.markup) for id_, panel in self.panels.items())

    def since(self, number: int) -> Iterator[tuple[str, str]]:
        """Id and markup of every part that changed after reading `number`."""
        if self.regrouped > number:
            yield from self._all_racks()
        else:
            yield from _changed(self.racks, number)
            cells = list(_changed(self.cells, number))
            yield from cells if len(cells) * CELLS_AT_ONCE <= len(self.cells) else [self._overview()]
        yield from _changed(self.panels, number)

    def _all_racks(self) -> Iterator[tuple[str, str]]:
        yield self._overview()
        markup = [rack.markup for rack in self.racks.values()]
        yield RACKS_ID, render.render_racks(markup, len(self.whole.racks))

    def _overview(self) -> tuple[str, str]:
        return OVERVIEW_ID, render.render_overview([cell.markup for cell in self.cells.values()])


def _changed(parts: Mapping[str, PagePart], number: int) -> Iterator[tuple[str, str]]:
    return ((id_, part.markup) for id_, part in parts.items() if part.changed > number)


class FrameResult(msgspec.Struct, frozen=True):
    """The values that are derived from one frame."""

    cell: OverviewCell
    groups: Counter[ColourGroup]
    counts: RackCounts
    room: RackCapacity


class PainterMemory(msgspec.Struct, kw_only=True):
    """The values that a painter compares with the next reading. Without them it makes everything again."""

    frames: RackFrames = RackFrames()
    grouped: Memo[str, RackFrame, Counter[ColourGroup]] = msgspec.field(default_factory=dict)
    """The groups of each rack."""
    results: Memo[str, RackFrame, FrameResult] = msgspec.field(default_factory=dict)
    opened: Memo[str, RackFrame, DrawnRack] = msgspec.field(default_factory=dict)
    """Racks that are or were drawn whole, by id."""
    groups: Counter[ColourGroup] = msgspec.field(default_factory=Counter)
    """GPUs of each group in all racks."""
    counts: RackCounts = RackCounts()
    room: FreeCapacity = msgspec.field(default_factory=lambda: site_capacity([]))


class Painter:
    """Draws the page of one kind of viewer in one mode. If `org` is None, it shows everything.

    `nobodys` draws the same for `NOBODY`. It supplies the racks in which an organisation holds nothing.
    """

    def __init__(
        self,
        org: str | None,
        mode: ColourMode,
        switch_trays: int,
        colours: MapColours | None = None,
        nobodys: "Painter | None" = None,
    ) -> None:
        self._org = org
        if org and nobodys is None:
            nobodys = Painter(NOBODY, mode, switch_trays)
        self._nobodys = nobodys
        self._mode = mode
        self._switch_trays = switch_trays
        # One palette per kind of viewer: gaps in the letters would reveal how many groups others have.
        self._colours = colours or MapColours()
        self._past: Painter | None = None
        """Draws maps of the history."""
        self._past_maps = 0
        self.memory = PainterMemory()
        self._sheet = PageSheet()
        self._now = LiveReading(number=0, whole=SiteMap(at=0.0))
        self._names: dict[str, str] = {}
        """The racks of the site by id, in order."""
        self._parts: dict[str, PagePart] = {}
        """Racks as they were last drawn whole, by id. Those that were opened last come last."""

    def follow(self, now: LiveReading, opened: Collection[str] = ()) -> PageSheet:
        """The parts as of a reading, with these racks drawn whole, by id.

        For an older reading, the parts as of the newest.
        """
        self._follow(now)
        # The racks that this viewer sees whole, by id and in the order of the site.
        frames, names = self.memory.frames.frames, self._names
        wanted = names.keys() if len(names) <= WHOLE_RACKS else names.keys() & opened
        shown = {id_: frames[name] for id_, name in names.items() if id_ in wanted} if wanted else {}
        others = [id_ for id_ in self._parts if id_ in names and id_ not in shown]
        kept = others[max(0, len(others) - RACKS_KEPT) :]
        before = self.memory.opened
        drawn = recompute_changed(before, shown, lambda frame: drawn_rack(frame, self._mode, self._colours))
        self.memory.opened = {id_: before[id_] for id_ in kept if id_ in before} | drawn
        parts = {id_: self._rack(id_, rack) for id_, (_, rack) in drawn.items()}
        self._parts = {id_: self._parts[id_] for id_ in kept} | parts
        return msgspec.structs.replace(self._sheet, racks=parts)

    def follow_past(self, whole: SiteMap, opened: Collection[str] = ()) -> PageSheet:
        """The parts as of a map of the history, in the colours of the present."""
        if self._past is None:
            self._past = Painter(self._org, self._mode, self._switch_trays, self._colours)
        self._past_maps += 1
        return self._past.follow(LiveReading(number=self._past_maps, whole=whole), opened)

    def _follow(self, now: LiveReading) -> None:
        """Have the sheet of a reading, or of the newest that the painter of `NOBODY` has met."""
        if self._nobodys is not None:
            self._nobodys._follow(now)
            now = self._nobodys._now
        if now.number > self._now.number:
            self._now, self._sheet = now, self._next_sheet(now)

    def _next_sheet(self, now: LiveReading) -> PageSheet:
        before = self._sheet
        self._follow_racks(now.whole)
        whole, places = self.memory.frames.whole, self.memory.frames.places
        legend = legend_entries(self.memory.groups, self._colours)
        names = list(self.memory.frames.frames)
        same = names == list(self._names.values())
        if not same:
            self._names = {rack_id(name): name for name in names}
        return PageSheet(
            number=now.number,
            whole=whole,
            places=places,
            # The form of a cell depends on the number of cells.
            cells=self._cells(before.cells if same else {}, now.number),
            panels={
                id_: self._panel(before.panels.get(id_), shown, write, now.number)
                for id_, shown, write in self._panels(now, whole, places, legend)
            },
            choices={
                choice.mark: choice
                for choice in (*(entry.choice for entry in legend), *state_choices(self._mode))
            },
            regrouped=before.regrouped if same else now.number,
        )

    def _follow_racks(self, whole: SiteMap) -> None:
        """Update the racks that changed, and the sums over all racks."""
        memory, others = self.memory, None if self._nobodys is None else self._nobodys.memory
        shared = None if others is None else others.frames
        memory.frames = update_rack_frames(whole, self._org, memory.frames, shared)
        own = {name: frame for name, (_, frame) in memory.frames.memo.items()}
        memory.grouped = recompute_changed(
            memory.grouped, own, lambda frame: colour_groups(frame, self._mode)
        )
        # All groups at once, before a rack is drawn: those that are named after a colour choose first.
        groups = {group for _, counts in memory.grouped.values() for group in counts}
        self._colours.groups.give_hues(groups - memory.groups.keys())
        before, memory.results = memory.results, recompute_changed(memory.results, own, self._result)
        now = memory.results
        gone = [entry[1] for name, entry in before.items() if now.get(name) is not entry]
        come = [entry[1] for name, entry in now.items() if before.get(name) is not entry]
        for result in gone:
            memory.groups.subtract(result.groups)
        for result in come:
            memory.groups.update(result.groups)
        # Drop the groups without a GPU.
        memory.groups = +memory.groups
        results = [result for _, result in now.values()]
        if [result.counts for result in gone] != [result.counts for result in come]:
            # The numbers of a tenant do not count the GPUs of other tenants.
            memory.counts = site_counts([result.counts for result in results])
        if others is not None and all(others.results[name][1].room == now[name][1].room for name in now):
            memory.room = others.room
        elif others is not None or [result.room for result in gone] != [result.room for result in come]:
            every = {**({} if others is None else others.results), **now}
            memory.room = site_capacity([result.room for _, result in every.values()])

    def _result(self, frame: RackFrame) -> FrameResult:
        counts = rack_counts(frame)
        return FrameResult(
            overview_cell(frame, self._mode, self._colours, counts),
            self.memory.grouped[frame.rack.name][1],
            counts,
            rack_capacity(frame.rack),
        )

    def _rack(self, id_: str, drawn: DrawnRack) -> PagePart:
        before = self._parts.get(id_)
        if before is not None and before.drawn == drawn:
            return before
        markup = render.render_rack(drawn, self._switch_trays)
        return PagePart(markup=markup, changed=self._sheet.number, drawn=drawn)

    def _cells(self, known: Mapping[str, PagePart], number: int) -> dict[str, PagePart]:
        """The cells of all racks by id. Empty for a site that is drawn whole."""
        racks = len(self.memory.frames.frames)
        if racks <= WHOLE_RACKS:
            return {}
        trays = racks <= render.TRAY_CELLS
        parts = dict(self._nobodys._sheet.cells) if self._nobodys is not None else {}
        for _, result in self.memory.results.values():
            cell, before = result.cell, known.get(result.cell.id)
            if before is None or before.drawn != cell:
                markup = render.render_cell(cell, self._mode, trays=trays)
                before = PagePart(markup=markup, changed=number, drawn=cell)
            parts[cell.id] = before
        # A rack that the tenant gave back changed now, but not for tenants that held nothing in it.
        for id_, before in known.items():
            if (part := parts[id_]) is before or part.changed == number:
                continue
            same = part.drawn == before.drawn
            parts[id_] = before if same else msgspec.structs.replace(part, changed=number)
        return parts

    def _panel(
        self, before: PagePart | None, shown: object, write: Callable[[], str], number: int
    ) -> PagePart:
        # A reading reaches each viewer, and most panels of most viewers stay the same.
        if before is not None and shown is not None and before.drawn == shown:
            return before
        markup = write()
        changed = number if before is None or before.markup != markup else before.changed
        return PagePart(markup=markup, changed=changed, drawn=shown)

    def _panels(
        self, now: LiveReading, whole: SiteMap, places: PlacesByName, legend: Sequence[LegendEntry]
    ) -> Iterator[tuple[str, object, Callable[[], str]]]:
        """The id of each panel, the values that it shows, and the function that writes it."""
        mode, room, badges = self._mode, self.memory.room, domain_badges(whole, self._colours)
        summary = site_summary(now, whole, self.memory.counts, room)
        # The places of operations follow from the racks.
        racks = [rack for rack, _ in self.memory.frames.named.values()]
        happened = whole.happenings[: render.TIMELINE_LINES], racks
        legend_of = partial(render.render_legend, mode, legend, badges, operator=whole.operator)
        yield "summary", summary, lambda: render.render_summary(summary)
        yield "reading", None, lambda: render.render_reading(msgspec.structs.replace(now, whole=whole))
        yield "legend", (legend, badges), legend_of
        yield "room", room, lambda: render.render_capacity(room)
        yield "findings", None, lambda: render.render_findings(whole, places, mode)
        yield "timeline", happened, lambda: render.render_timeline(whole, places, mode)


# All kinds.


KINDS_KEPT = 32
"""Painters without a stream that are kept."""
RACKS_KEPT = 256
"""Racks that a painter keeps drawn whole, besides the requested ones."""

ViewerKind = tuple[str | None, ColourMode]
"""Organisation, or None if it sees everything, and mode."""


class Painters:
    """The painters of one site. `switch_trays` is the number of switch trays in a rack, if known."""

    def __init__(self, switch_trays: int) -> None:
        self._switch_trays = switch_trays
        self._painters: OrderedDict[ViewerKind, Painter] = OrderedDict()
        self._nobodys = {mode: Painter(NOBODY, mode, switch_trays) for mode in ColourMode}
        self._streams: Counter[ViewerKind] = Counter()
        self._thread = SerialThread()

    @contextmanager
    def held(self, kind: ViewerKind) -> Iterator[None]:
        """Keep the painter of a kind: a new one would use other colours and send every rack again."""
        self._streams[kind] += 1
        try:
            yield
        finally:
            self._streams[kind] -= 1
            self._streams += Counter()

    async def sheet(self, kind: ViewerKind, now: LiveReading, opened: Collection[str] = ()) -> PageSheet:
        """The page of a kind of viewer for a reading, with these racks drawn whole, by id."""
        return await self._thread.run(lambda: self._painter(kind).follow(now, opened))

    async def past_sheet(self, kind: ViewerKind, whole: SiteMap, opened: Collection[str] = ()) -> PageSheet:
        """The page of a kind of viewer for a map of the history, with these racks drawn whole, by id."""
        return await self._thread.run(lambda: self._painter(kind).follow_past(whole, opened))

    def _painter(self, kind: ViewerKind) -> Painter:
        org, mode = kind
        nobodys = self._nobodys[mode] if org else None
        painter = self._painters.get(kind) or Painter(org, mode, self._switch_trays, nobodys=nobodys)
        self._painters[kind] = painter
        self._painters.move_to_end(kind)
        idle = [known for known in self._painters if known not in self._streams]
        for least_recent in idle[: max(0, len(idle) - KINDS_KEPT)]:
            del self._painters[least_recent]
        return painter
