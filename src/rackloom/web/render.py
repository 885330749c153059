"""Markup, by templates that escape whatever they are given."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rackloom.prove.doctor.findings import Finding
from rackloom.prove.doctor.page import by_check
from rackloom.prove.picture.values import Layer
from rackloom.web.colouring import COLOURS, Mode
from rackloom.web.details import Said
from rackloom.web.live import Now
from rackloom.web.locating import Locations, Places, locations
from rackloom.web.racks import Entry, Rack
from rackloom.web.room_left import RoomLeft
from rackloom.web.scene import Scene, Seat
from rackloom.web.shapes import CELL, LEFT, drawing

HAPPENINGS = 30
"""Lines of the timeline; the audit has them all."""


def moment(at: float | None) -> Markup:
    """A time as people and scripts read it, in UTC."""
    if at is None:
        return Markup("never")
    when = datetime.fromtimestamp(at, UTC)
    return Markup('<time datetime="{}">{} UTC</time>').format(
        when.strftime("%Y-%m-%dT%H:%M:%SZ"), when.strftime("%H:%M:%S")
    )


def day(at: float) -> Markup:
    """A date and time, in UTC."""
    when = datetime.fromtimestamp(at, UTC)
    return Markup('<time datetime="{}">{} UTC</time>').format(
        when.strftime("%Y-%m-%dT%H:%M:%SZ"), when.strftime("%Y-%m-%d %H:%M:%S")
    )


def lasted(seconds: float) -> str:
    """How long something took, to the digits that matter."""
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def short(text: str) -> Markup:
    """Words in which only the first eight digits of each UUID are seen; all are in its title."""
    parts = _UUID.split(text)
    found = (
        Markup('<abbr title="{}">{}</abbr>').format(part, part[:8]) if number % 2 else escape(part)
        for number, part in enumerate(parts)
    )
    return Markup("").join(found)


_UUID = re.compile("([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")


@cache
def _templates() -> Environment:
    found = Environment(
        loader=PackageLoader("rackloom.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.filters.update(moment=moment, day=day, lasted=lasted, short=short, by_check=by_check)
    found.globals.update(LEFT=LEFT, CELL=CELL, COLOURS=COLOURS, modes=tuple(Mode), layers=tuple(Layer))
    return found


def _written(name: str, **values: object) -> Markup:
    return Markup(_templates().get_template(name).render(**values))  # noqa: S704 - escaped by the template


def rack(value: Rack, switch_trays: int) -> str:
    """One rack."""
    return _written("rack.svg", drawing=drawing(value, switch_trays))


def all_racks(drawn: Iterable[str]) -> str:
    """The element with all racks."""
    return _written("racks.html", racks=[Markup(one) for one in drawn])  # noqa: S704 - written by `rack`


def reading(now: Now) -> str:
    """When what is shown was read, layer by layer."""
    return _written("reading.html", now=now, operator=now.whole.operator)


def legend(mode: Mode, groups: Sequence[Entry], badges: Sequence[Entry], *, operator: bool) -> str:
    """What the colours, letters and numbers mean."""
    return _written("legend.html", mode=mode, groups=groups, badges=badges, operator=operator)


def room(left: RoomLeft) -> str:
    """What is free."""
    return _written("room.html", left=left)


def findings(whole: Scene, places: Places) -> str:
    """What the doctor objects to, and where that is."""
    found = None if whole.findings is None else _listed(whole.findings, places)
    return _written("findings.html", operator=whole.operator, findings=found, examined_at=whole.examined_at)


def timeline(whole: Scene, places: Places) -> str:
    """What was lately asked of the fabrics, and where that is."""
    told = whole.happenings[:HAPPENINGS]
    return _written("timeline.html", happenings=[(one, locations(one.places, places)) for one in told])


def chain(seat: Seat | None, said: Sequence[Said], objections: Sequence[Finding] = ()) -> str:
    """One GPU through all layers, and what the doctor objects to there."""
    return _written("chain.html", seat=seat, said=said, objections=_listed(objections, {}))


def _listed(found: Sequence[Finding], places: Places) -> list[tuple[Finding, Locations]]:
    return [(one, locations(one.where, places)) for one in found]


def page(org: str, mode: Mode, position: str, parts: Mapping[str, str]) -> str:
    """The whole page, of the elements above by id. `position` is what the stream of changes goes on from."""
    written = {name: Markup(markup) for name, markup in parts.items()}  # noqa: S704 - by the functions above
    return _written("page.html", org=org, mode=mode, position=position, parts=written)


def changes(parts: Iterable[tuple[str, str]]) -> str:
    """Elements that take the place of those with the same id, in the words of htmx."""
    return "".join(
        f'<hx-partial hx-target="#{id_}" hx-swap="outerMorph">{markup}</hx-partial>' for id_, markup in parts
    )


def login(trouble: str) -> str:
    """The page that asks for a token."""
    return _written("login.html", trouble=trouble)
