"""Markup of the page and of its parts, from templates that escape all values.

Each function renders one element that has an id. `render_changes` wraps changed elements as
htmx partials: each takes the place of the element with the same id.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from shlex import quote
from types import MappingProxyType
from typing import Protocol

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rackloom.core.diagnosis.catalogue import runbook_name
from rackloom.core.diagnosis.findings import Finding, first_few
from rackloom.core.diagnosis.repair_steps import repair_advice, repair_steps
from rackloom.core.diagnosis.report import consequences_by_check
from rackloom.core.diagnosis.runbooks import Runbook, runbooks
from rackloom.core.diagnosis.snapshot import Layer
from rackloom.web.chain import LayerReport
from rackloom.web.changes import SiteChanges
from rackloom.web.frames import ColourMode
from rackloom.web.highlight import FilterChoice
from rackloom.web.history import Gap, PastTime
from rackloom.web.live import LiveReading
from rackloom.web.make_room import MOST_TRAYS, RoomPlan
from rackloom.web.model import MapGpu, SiteMap, rack_id
from rackloom.web.overview import OverviewCell, SiteSummary, cell_id
from rackloom.web.panels import FreeCapacity
from rackloom.web.places import FoundLocations, PlaceLink, PlacesByName, locate
from rackloom.web.racks import CELL, LEFT, DrawnRack, LegendEntry, drawing
from rackloom.web.search import LONGEST_QUERY, SearchResult
from rackloom.web.trends import HEIGHT, WIDTH, TrendPoint, trend_charts
from rackloom.web.view import PageView, gpu_address, gpu_link, path_below, rack_link

TRAY_CELLS = 100
"""The most racks for which an overview has room for single trays."""
TIMELINE_LINES = 30
"""Lines of the timeline. The audit log has all operations."""


def time_markup(at: float | None) -> Markup:
    """A time of day in UTC, machine-readable too, or "never" for None."""
    if at is None:
        return Markup("never")
    return _time_element(at, "%H:%M:%S")


def date_markup(at: float) -> Markup:
    """A date and time, in UTC."""
    return _time_element(at, "%Y-%m-%d %H:%M:%S")


def _time_element(at: float, shown: str) -> Markup:
    when = datetime.fromtimestamp(at, UTC)
    return Markup('<time datetime="{}">{} UTC</time>').format(
        when.strftime("%Y-%m-%dT%H:%M:%SZ"), when.strftime(shown)
    )


def duration_text(seconds: float) -> str:
    """A duration, to the digits that matter."""
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def shorten_uuids(text: str) -> Markup:
    """Text in which each UUID is shortened to eight digits, with the whole in its title."""
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
    found.filters.update(
        moment=time_markup,
        address_time=lambda at: datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        day=date_markup,
        lasted=duration_text,
        short=shorten_uuids,
        by_check=consequences_by_check,
        advice=repair_advice,
        steps=repair_steps,
        first_few=first_few,
        runbook=runbook_name,
    )
    found.filters.update(address=_address, cell_id=cell_id, gpu_link=lambda id_, mode: gpu_link(mode, id_))
    found.globals.update(LEFT=LEFT, CELL=CELL, modes=tuple(ColourMode), layers=tuple(Layer))
    return found


def render_template(name: str, **values: object) -> Markup:
    """The output of a template for these values. It escapes all values except markup."""
    return Markup(_templates().get_template(name).render(**values))  # noqa: S704 - escaped by the template


def render_rack(value: DrawnRack, switch_trays: int) -> str:
    """One rack, whole."""
    return render_template("rack.svg", drawing=drawing(value, switch_trays))


def render_racks(drawn: Iterable[str], in_all: int) -> str:
    """The element with the racks that are drawn whole, of `in_all` racks."""
    racks = [Markup(markup) for markup in drawn]  # noqa: S704 - by render_rack
    return render_template("racks.html", racks=racks, in_all=in_all)


def render_cell(cell: OverviewCell, mode: ColourMode, *, trays: bool) -> str:
    """One rack among all. If `trays` is set, it shows each of its trays."""
    return render_template("cell.html", cell=cell, link=rack_link(mode, cell.name), trays=trays)


def render_overview(cells: Iterable[str]) -> str:
    """The element with the cells of all racks. It is hidden if there are no cells."""
    written = [Markup(markup) for markup in cells]  # noqa: S704 - by render_cell
    return render_template("overview.html", cells=written, tray_cells=TRAY_CELLS)


def render_summary(summary: SiteSummary) -> str:
    """The summary that a viewer reads first."""
    return render_template("summary.html", summary=summary)


def _address(link: PlaceLink, mode: ColourMode) -> str:
    """The address of a link to a GPU or a rack."""
    return gpu_link(mode, link.id) if gpu_address(link.id) else rack_link(mode, link.words)


def render_reading(now: LiveReading) -> str:
    """When each layer was read."""
    return render_template("reading.html", now=now, operator=now.whole.operator)


def render_legend(
    mode: ColourMode, groups: Sequence[LegendEntry], badges: Sequence[LegendEntry], *, operator: bool
) -> str:
    """The meaning of the colours, letters and numbers."""
    return render_template("legend.html", mode=mode, groups=groups, badges=badges, operator=operator)


def render_capacity(left: FreeCapacity) -> str:
    """The free capacity."""
    return render_template("room.html", left=left)


def render_findings(whole: SiteMap, places: PlacesByName, mode: ColourMode = ColourMode.PARTITION) -> str:
    """The doctor's findings and their places on the map."""
    found = None if whole.findings is None else _with_locations(whole.findings, places)
    return render_template(
        "findings.html", operator=whole.operator, findings=found, examined_at=whole.examined_at, mode=mode
    )


def render_timeline(whole: SiteMap, places: PlacesByName, mode: ColourMode) -> str:
    """The latest operations on fabrics and their places on the map."""
    entries = [(entry, locate(entry.places, places)) for entry in whole.happenings[:TIMELINE_LINES]]
    return render_template("timeline.html", happenings=entries, mode=mode)


def render_chain(gpu: MapGpu | None, reports: Sequence[LayerReport], findings: Sequence[Finding] = ()) -> str:
    """One GPU through all layers, and the findings that concern it."""
    located = _with_locations(findings, {})
    return render_template(
        "chain.html", gpu=gpu, reports=reports, findings=located, mode=ColourMode.PARTITION
    )


def render_no_choice() -> str:
    """The element in place of a GPU while none is chosen."""
    return render_template("no_choice.html")


def _with_locations(found: Sequence[Finding], places: PlacesByName) -> list[tuple[Finding, FoundLocations]]:
    return [(finding, locate(finding.where, places)) for finding in found]


def render_found(mode: ColourMode, query: str, results: Sequence[SearchResult]) -> str:
    """The results of a search, empty without a query."""
    entries = [
        (result, result.gpu or rack_id(result.rack), _result_address(result, mode)) for result in results
    ]
    return render_template("found.html", query=query.strip(), results=entries, longest=LONGEST_QUERY)


def _result_address(result: SearchResult, mode: ColourMode) -> str:
    return gpu_link(mode, result.gpu) if result.gpu else rack_link(mode, result.rack)


def render_page(
    org: str,
    view: PageView,
    position: str,
    parts: Mapping[str, str],
    chain: str,
    racks: Collection[str],
    found: str = "",
    *,
    past: PastTime | None = None,
    changes: SiteChanges | None = None,
    operator: bool = True,
    room: RoomPlan | None = None,
    acting: bool = False,
    only: FilterChoice | None = None,
    dashboards: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The whole page with the elements above, by id. The stream of changes starts at `position`.

    `chain` is the chosen GPU, or the element in its place. `racks` are the names of all racks. `found` holds
    the results of the search that the address names. `past` is the time that is shown, if it is not the
    present, and `changes` are the changes since then. `room` is the plan for a job that the address names.
    `operator` is true for an operator, and `acting` if the viewer has the forms of a tenant. `only` is the
    filter of the view, and `dashboards` are addresses in Grafana by name.
    """
    written = {name: Markup(markup) for name, markup in parts.items()}  # noqa: S704 - by the functions above
    return render_template(
        "page.html",
        org=org,
        view=view,
        position=position,
        parts=written,
        chain=Markup(chain),  # noqa: S704 - by render_chain
        no_choice=Markup(render_no_choice()),  # noqa: S704 - by the function above
        missing=[name for name in view.racks if name not in racks],
        choosable="<a " in written["overview"],
        found=Markup(found),  # noqa: S704 - by render_found
        longest=LONGEST_QUERY,
        past=past,
        changes=changes,
        below=path_below(None if past is None else past.asked),
        operator=operator,
        room=room,
        acting=acting,
        only=only,
        dashboards=dashboards,
        reserve=_reserve_command(room),
        most_trays=MOST_TRAYS,
    )


def _reserve_command(room: RoomPlan | None) -> str:
    """The command that keeps the free trays of the nearest domain for one tenant. Empty if none is free."""
    if room is None or not room.domains or not room.domains[0].free:
        return ""
    nearest = room.domains[0]
    return (
        "rackloom admin reservation create --tenant ORG --instance-type ID --until TIME --reason 'a job'"
        f" --rack {quote(nearest.racks[0])} --count {nearest.free}"
    )


def render_history(
    points: Sequence[TrendPoint],
    *,
    operator: bool,
    past: PastTime | None,
    gaps: Sequence[Gap] = (),
    is_kept: bool = True,
    unkept_since: float | None = None,
) -> str:
    """The charts of the last day and the slider, which stands at the time that is shown.

    `gaps` are the times in which nothing was recorded. `is_kept` is whether the history has a file, and
    `unkept_since` the time since which it could not be written.
    """
    first, last = (points[0].at, points[-1].at) if points else (0.0, 0.0)
    shown = last if past is None else min(max(past.asked, first), last)
    mark = None if past is None else round(WIDTH * (shown - first) / ((last - first) or 1.0), 1)
    charts = trend_charts(points, operator=operator)
    box = f"0 0 {WIDTH:g} {HEIGHT:g}"
    return render_template(
        "history.html",
        charts=charts,
        first=first,
        last=last,
        shown=shown,
        mark=mark,
        box=box,
        height=HEIGHT,
        gaps=gaps,
        is_kept=is_kept,
        unkept_since=unkept_since,
    )


def render_no_such_time(oldest: float | None) -> str:
    """The page of a time that the history does not have."""
    return render_template("no_such_time.html", oldest=oldest)


def render_changes(parts: Iterable[tuple[str, str]]) -> str:
    """Elements that replace those with the same id, as htmx partials."""
    return "".join(
        f'<hx-partial hx-target="#{id_}" hx-swap="outerMorph">{markup}</hx-partial>' for id_, markup in parts
    )


def render_runbook(runbook: Runbook | None) -> str:
    """The page of a runbook. For None, it states that there is no such runbook and lists all runbooks."""
    return render_template("runbook.html", runbook=runbook, runbooks=tuple(runbooks().values()))


class LoginProvider(Protocol):
    """The part of an identity provider that the sign-in page shows."""

    title: str
    organisation: str | None


def render_login(trouble: str, providers: Sequence[LoginProvider] = (), target: str = "/") -> str:
    """The page for a token or the choice of an identity provider. After sign-in it leads to `target`."""
    return render_template(
        "login.html",
        trouble=trouble,
        providers=providers,
        target=target,
        asks_org=any(provider.organisation is None for provider in providers),
    )


def render_leading_on(address: str, text: str) -> str:
    """A page that leads a browser on: after a redirect from another site it would send no strict cookie."""
    return render_template("leading_on.html", address=address, text=text)
