"""What each kind of viewer sees: parts of the page, each with the reading that last changed it.

A kind of viewer is an organisation (none: it sees everything) and a colour mode. Its `Painter` draws a
rack again only when its frame differs from the last one, and compares panels as text. `PageSheet.since`
gives the parts that changed after a reading, which is what a stream sends.

Each kind has colours of its own: letters that skip some would tell a tenant how many groups others have.
A painter is kept while a stream is drawn by it, because a new one would give other colours and send every
rack again; of idle painters the 32 that were used last are kept.

Drawing runs in a thread, one at a time. When a client goes away its thread still ends before the next one
starts.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

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
from rackloom.web.live import LiveReading
from rackloom.web.model import SiteMap
from rackloom.web.panels import (
    FreeCapacity,
    PlacesByName,
    RackCapacity,
    places_named,
    rack_capacity,
    rack_places,
    site_capacity,
)
from rackloom.web.racks import DrawnRack, colour_groups, domain_badges, drawn_rack, legend_entries
from rackloom.web.tenancy import TenantRacks, tenant_map

# One kind of viewer.


RACKS_ID = "racks"
"""The id of the element that holds all racks."""


class PagePart(msgspec.Struct, frozen=True, kw_only=True):
    """One element of the page."""

    markup: str
    changed: int
    """Number of the reading that brought it."""
    rack: DrawnRack | None = None
    """The drawn rack; None: the part is a panel."""


class PageSheet(msgspec.Struct, frozen=True, kw_only=True):
    """All parts, as of one reading."""

    number: int = 0
    whole: SiteMap = SiteMap(at=0.0)
    racks: Mapping[str, PagePart] = msgspec.field(default_factory=dict)
    panels: Mapping[str, PagePart] = msgspec.field(default_factory=dict)
    regrouped: int = 0
    """The reading in which racks came or went."""

    def all(self) -> Iterator[tuple[str, str]]:
        """Id and markup of everything."""
        yield RACKS_ID, render.render_racks(rack.markup for rack in self.racks.values())
        yield from ((id_, panel.markup) for id_, panel in self.panels.items())

    def since(self, number: int) -> Iterator[tuple[str, str]]:
        """Id and markup of every part that changed after reading `number`."""
        if self.regrouped > number:
            yield RACKS_ID, render.render_racks(rack.markup for rack in self.racks.values())
            changing = self.panels
        else:
            changing = {**self.racks, **self.panels}
        yield from ((id_, part.markup) for id_, part in changing.items() if part.changed > number)


class FrameResult(msgspec.Struct, frozen=True):
    """What is derived from one frame."""

    rack: DrawnRack
    groups: Counter[ColourGroup]
    room: RackCapacity
    places: PlacesByName


class PainterMemory(msgspec.Struct, kw_only=True):
    """What a painter compares the next reading with; without it everything is made again."""

    own: TenantRacks = TenantRacks()
    frames: RackFrames = RackFrames()
    drawn: Memo[str, RackFrame, FrameResult] = msgspec.field(default_factory=dict)
    groups: Counter[ColourGroup] = msgspec.field(default_factory=Counter)
    """GPUs of each group in all racks that are drawn."""
    room: FreeCapacity = msgspec.field(default_factory=lambda: site_capacity([]))


class Painter:
    """Draws what one kind of viewer sees in one mode; `org` None sees everything."""

    def __init__(self, org: str | None, mode: ColourMode, switch_trays: int) -> None:
        self._org = org
        self._mode = mode
        self._switch_trays = switch_trays
        # One palette per kind of viewer: gaps in the letters would reveal how many groups others have.
        self._colours = MapColours()
        self.memory = PainterMemory()
        self.sheet = PageSheet()

    def follow(self, now: LiveReading) -> PageSheet:
        """The parts as of a reading; for an older reading, those that are drawn already."""
        if now.number > self.sheet.number:
            whole = now.whole
            if self._org is not None:
                whole, self.memory.own = tenant_map(whole, self._org, self.memory.own)
            drawn = self._follow_racks(whole)
            racks = {result.rack.id: self._rack(result.rack, now.number) for result in drawn}
            texts = self._texts(now, whole, drawn)
            same = list(racks) == list(self.sheet.racks)
            self.sheet = PageSheet(
                number=now.number,
                whole=whole,
                racks=racks,
                panels={id_: self._panel(id_, text, now.number) for id_, text in texts},
                regrouped=self.sheet.regrouped if same else now.number,
            )
        return self.sheet

    def _follow_racks(self, whole: SiteMap) -> list[FrameResult]:
        """Draw the racks that changed; the sums over all racks follow from these."""
        memory = self.memory
        memory.frames = update_rack_frames(whole, memory.frames)
        before, memory.drawn = (
            memory.drawn,
            recompute_changed(memory.drawn, memory.frames.frames, self._draw),
        )
        gone = [old for name, (_, old) in before.items() if not _keeps(memory.drawn.get(name), old)]
        come = [new for name, (_, new) in memory.drawn.items() if not _keeps(before.get(name), new)]
        for result in gone:
            memory.groups.subtract(result.groups)
        for result in come:
            memory.groups.update(result.groups)
        # Without the groups of which no GPU is left.
        memory.groups = +memory.groups
        drawn = [result for _, result in memory.drawn.values()]
        if [result.room for result in gone] != [result.room for result in come]:
            memory.room = site_capacity([result.room for result in drawn])
        return drawn

    def _draw(self, frame: RackFrame) -> FrameResult:
        rack = drawn_rack(frame, self._mode, self._colours)
        groups = colour_groups(frame, self._mode)
        return FrameResult(rack, groups, rack_capacity(frame.rack), rack_places(frame.rack))

    def _rack(self, drawn: DrawnRack, number: int) -> PagePart:
        before = self.sheet.racks.get(drawn.id)
        if before is not None and before.rack == drawn:
            return before
        return PagePart(markup=render.render_rack(drawn, self._switch_trays), changed=number, rack=drawn)

    def _panel(self, id_: str, markup: str, number: int) -> PagePart:
        before = self.sheet.panels.get(id_)
        if before is not None and before.markup == markup:
            return before
        return PagePart(markup=markup, changed=number)

    def _texts(
        self, now: LiveReading, whole: SiteMap, drawn: Sequence[FrameResult]
    ) -> Iterator[tuple[str, str]]:
        entries = legend_entries(self.memory.groups, self._colours)
        badges = domain_badges(whole, self._colours)
        yield "reading", render.render_reading(msgspec.structs.replace(now, whole=whole))
        yield "legend", render.render_legend(self._mode, entries, badges, operator=whole.operator)
        yield "room", render.render_capacity(self.memory.room)
        places = places_named([result.places for result in drawn], _names_wanted(whole))
        yield "findings", render.render_findings(whole, places)
        yield "timeline", render.render_timeline(whole, places)


def _keeps(entry: tuple[RackFrame, FrameResult] | None, result: FrameResult) -> bool:
    return entry is not None and entry[1] is result


def _names_wanted(whole: SiteMap) -> set[str]:
    """Everything that findings and operations name."""
    findings = (place for finding in whole.findings or () for place in finding.where)
    return {*findings, *(place for happening in whole.happenings for place in happening.places)}


# All kinds.


KINDS_KEPT = 32
"""Painters without a stream that are kept."""

ViewerKind = tuple[str | None, ColourMode]
"""Organisation (None: it sees everything) and mode."""


class Painters:
    """The painters of one site; `switch_trays` is the number of switch trays in a rack, if known."""

    def __init__(self, switch_trays: int) -> None:
        self._switch_trays = switch_trays
        self._painters: OrderedDict[ViewerKind, Painter] = OrderedDict()
        self._streams: Counter[ViewerKind] = Counter()
        self._painting = asyncio.Lock()

    @contextmanager
    def held(self, kind: ViewerKind) -> Iterator[None]:
        """Keep the painter of a kind: a new one would use other colours and send every rack again."""
        self._streams[kind] += 1
        try:
            yield
        finally:
            self._streams[kind] -= 1
            self._streams += Counter()

    async def sheet(self, kind: ViewerKind, now: LiveReading) -> PageSheet:
        """What a kind of viewer sees of a reading."""
        await self._painting.acquire()
        # In a thread: drawing a hundred racks would block other requests.
        painting = asyncio.get_running_loop().run_in_executor(None, self._painter(kind).follow, now)
        # The thread continues when its client disconnects, and painters are not thread-safe: only its end
        # releases the lock.
        painting.add_done_callback(lambda _: self._painting.release())
        return await asyncio.shield(painting)

    def _painter(self, kind: ViewerKind) -> Painter:
        painter = self._painters.setdefault(kind, Painter(*kind, self._switch_trays))
        self._painters.move_to_end(kind)
        idle = [known for known in self._painters if known not in self._streams]
        for least_recent in idle[: max(0, len(idle) - KINDS_KEPT)]:
            del self._painters[least_recent]
        return painter
