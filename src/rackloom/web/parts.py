"""The parts of a page that change by themselves, each with the reading in which it last changed.

A rack is drawn again only when its value differs; panels are small and are compared as text.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rackloom.prove.picture.kept import Kept, again
from rackloom.web import render
from rackloom.web.colouring import Colours, Group, Mode
from rackloom.web.frames import Frame, frames
from rackloom.web.live import Now
from rackloom.web.locating import Places, among, rack_places
from rackloom.web.racks import Rack, badges, drawn_rack, groups, legend
from rackloom.web.room_left import RackRoom, rack_room, room_left
from rackloom.web.scene import Scene
from rackloom.web.tenancy import Own, next_own

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


class Drawn(msgspec.Struct, frozen=True):
    """What was made of one frame."""

    rack: Rack
    groups: Counter[Group]
    room: RackRoom
    places: Places


class Painter:
    """Draws what one kind of viewer sees in one mode; `org` None sees everything."""

    def __init__(self, org: str | None, mode: Mode, switch_trays: int) -> None:
        self._org = org
        self._mode = mode
        self._switch_trays = switch_trays
        # Of this kind of viewer alone: letters that skip some would tell how many groups others have.
        self._colours = Colours()
        self._own: Own = {}
        self._drawn: Kept[str, Frame, Drawn] = {}
        self.sheet = Sheet()

    def follow(self, now: Now) -> Sheet:
        """The parts as of a reading; of an older one than is drawn already, those that are drawn."""
        if now.number > self.sheet.number:
            whole = self._seen(now.whole)
            self._drawn = again(self._drawn, frames(whole), self._draw)
            drawn = [one for _, one in self._drawn.values()]
            racks = {one.rack.id: self._rack(one.rack, now.number) for one in drawn}
            texts = self._texts(now, whole, drawn)
            same = list(racks) == list(self.sheet.racks)
            self.sheet = Sheet(
                number=now.number,
                whole=whole,
                racks=racks,
                panels={id_: self._panel(id_, text, now.number) for id_, text in texts},
                regrouped=self.sheet.regrouped if same else now.number,
            )
        return self.sheet

    def _seen(self, whole: Scene) -> Scene:
        if self._org is None:
            return whole
        own, self._own = next_own(whole, self._org, self._own)
        return own

    def _draw(self, frame: Frame) -> Drawn:
        rack = drawn_rack(frame, self._mode, self._colours)
        return Drawn(rack, groups(frame, self._mode), rack_room(frame.rack), rack_places(frame.rack))

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

    def _texts(self, now: Now, whole: Scene, drawn: Sequence[Drawn]) -> Iterator[tuple[str, str]]:
        entries = legend((one.groups for one in drawn), self._colours)
        yield "reading", render.reading(msgspec.structs.replace(now, whole=whole))
        yield (
            "legend",
            render.legend(self._mode, entries, badges(whole, self._colours), operator=whole.operator),
        )
        yield "room", render.room(room_left([one.room for one in drawn]))
        places = among([one.places for one in drawn], _named(whole))
        yield "findings", render.findings(whole, places)
        yield "timeline", render.timeline(whole, places)


def _named(whole: Scene) -> set[str]:
    """All that findings and operations are about."""
    findings = (place for one in whole.findings or () for place in one.where)
    return {*findings, *(place for one in whole.happenings for place in one.places)}
