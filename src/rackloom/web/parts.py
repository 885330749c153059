"""The parts of a page that change by themselves, each with the reading in which it last changed.

A rack is drawn again only when its value differs; panels are small and are compared as text.
"""

from collections.abc import Iterator, Mapping

import msgspec

from rackloom.web import render
from rackloom.web.colouring import Colours, Mode
from rackloom.web.live import Now
from rackloom.web.racks import Rack, badges, legend, racks
from rackloom.web.room_left import room_left
from rackloom.web.scene import Scene
from rackloom.web.tenancy import seen_by

RACKS = "racks"
"""The id of the element that holds all racks."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One element of the page."""

    markup: str
    changed: int
    """Number of the reading that brought it."""
    rack: Rack | None = None
    """What is drawn; None: it is a panel."""


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """All parts, as of one reading."""

    number: int = 0
    whole: Scene = Scene(at=0.0)
    racks: Mapping[str, Part] = msgspec.field(default_factory=dict)
    panels: Mapping[str, Part] = msgspec.field(default_factory=dict)
    regrouped: int = 0
    """The reading in which racks came or went."""

    def all(self) -> Iterator[tuple[str, str]]:
        """Id and markup of everything."""
        yield RACKS, render.all_racks(one.markup for one in self.racks.values())
        yield from ((id_, one.markup) for id_, one in self.panels.items())

    def since(self, number: int) -> Iterator[tuple[str, str]]:
        """Id and markup of every part that changed after reading `number`."""
        if self.regrouped > number:
            yield RACKS, render.all_racks(one.markup for one in self.racks.values())
            changing = self.panels
        else:
            changing = {**self.racks, **self.panels}
        yield from ((id_, one.markup) for id_, one in changing.items() if one.changed > number)


class Painter:
    """Draws what one kind of viewer sees in one mode; `org` None sees everything."""

    def __init__(self, org: str | None, mode: Mode, switch_trays: int) -> None:
        self._org = org
        self._mode = mode
        self._switch_trays = switch_trays
        # Of this kind of viewer alone: letters that skip some would tell how many groups others have.
        self._colours = Colours()
        self.sheet = Sheet()

    def follow(self, now: Now) -> Sheet:
        """The parts as of a reading; of an older one than is drawn already, those that are drawn."""
        before = self.sheet
        if now.number > before.number:
            whole = now.whole if self._org is None else seen_by(now.whole, self._org)
            drawn = {one.id: self._rack(one, now.number) for one in racks(whole, self._mode, self._colours)}
            same = list(drawn) == list(before.racks)
            self.sheet = Sheet(
                number=now.number,
                whole=whole,
                racks=drawn,
                panels={id_: self._panel(id_, text, now.number) for id_, text in self._texts(now, whole)},
                regrouped=before.regrouped if same else now.number,
            )
        return self.sheet

    def _rack(self, drawn: Rack, number: int) -> Part:
        before = self.sheet.racks.get(drawn.id)
        if before is not None and before.rack == drawn:
            return before
        return Part(markup=render.rack(drawn, self._switch_trays), changed=number, rack=drawn)

    def _panel(self, id_: str, markup: str, number: int) -> Part:
        before = self.sheet.panels.get(id_)
        if before is not None and before.markup == markup:
            return before
        return Part(markup=markup, changed=number)

    def _texts(self, now: Now, whole: Scene) -> Iterator[tuple[str, str]]:
        groups, domains = legend(whole, self._mode, self._colours), badges(whole, self._colours)
        yield "reading", render.reading(msgspec.structs.replace(now, whole=whole))
        yield "legend", render.legend(self._mode, groups, domains)
        yield "room", render.room(room_left(whole))
        yield "findings", render.findings(whole)
        yield "timeline", render.timeline(whole)
