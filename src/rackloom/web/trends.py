"""The numbers of one viewer over the last day, as small charts.

`Trend` counts the maps of the history (`history`) as the summary of the page counts the present: as the
viewer's part of the site, rack by rack, and only racks that changed. At most 120 maps are counted, the
first of each span of time. The spans are ten seconds times a power of two and begin at multiples of
their length, so that a later request counts only the new maps.

`trend_charts` makes step lines of the points: a number stays as it is until the next reading. A number that
is unknown for some GPUs has a band from the lowest to the highest value that it may have. While the site
was not read, the line is interrupted.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import msgspec

from rackloom.core.diagnosis.findings import needs_attention
from rackloom.core.diagnosis.incremental import Memo, recompute_changed
from rackloom.web.frames import RackFrame, RackFrames, update_rack_frames
from rackloom.web.history import CLOSEST_SECONDS, gap_after
from rackloom.web.model import SiteMap
from rackloom.web.overview import RackCounts, rack_counts, site_counts
from rackloom.web.serial_thread import SerialThread

MOST_POINTS = 120
WIDTH, HEIGHT, MARGIN = 300.0, 36.0, 2.0
"""The size of a chart in its own units, and the margin above and below the lines."""


class TrendPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one reading."""

    at: float
    gpus: int
    used: int
    use_unknown: int
    problems: int
    health_unknown: int
    attention: int | None
    """Findings that need attention, or None if the site was not examined or they are hidden."""
    after_gap: bool = False
    """Whether the site was not read for some time before."""


class Trend:
    """The numbers of one kind of viewer. If `org` is None, it sees everything."""

    def __init__(self, org: str | None) -> None:
        self._org = org
        self._frames = RackFrames()
        self._counts: Memo[str, RackFrame, RackCounts] = {}
        self._points: dict[float, TrendPoint] = {}

    def follow(self, maps: Sequence[SiteMap]) -> tuple[TrendPoint, ...]:
        """The points of some maps, the oldest first."""
        shown = list(_first_of_each_span(maps))
        self._points = {whole.at: self._points.get(whole.at) or self._point(whole) for whole in shown}
        gaps = [b.at for a, b in pairwise(maps) if gap_after(a, b, maps[-1].at)]
        return tuple(_with_gaps(list(self._points.values()), gaps))

    def _point(self, whole: SiteMap) -> TrendPoint:
        self._frames = update_rack_frames(whole, self._org, self._frames)
        self._counts = recompute_changed(self._counts, self._frames.frames, rack_counts)
        counts = site_counts([counts for _, counts in self._counts.values()])
        return TrendPoint(
            at=whole.at,
            gpus=counts.gpus,
            used=counts.used,
            use_unknown=counts.use_unknown,
            problems=counts.problems,
            health_unknown=counts.health_unknown,
            attention=None if whole.findings is None else len(needs_attention(whole.findings)),
        )


def _with_gaps(points: Sequence[TrendPoint], gaps: Sequence[float]) -> Iterator[TrendPoint]:
    """The points, each marked if a gap ends between the previous point and it."""
    for number, point in enumerate(points):
        since = points[number - 1].at if number else point.at
        after_gap = bisect_right(gaps, since) < bisect_right(gaps, point.at)
        yield msgspec.structs.replace(point, after_gap=after_gap)


def _first_of_each_span(maps: Sequence[SiteMap]) -> Iterator[SiteMap]:
    """The first map of each span of time, and the newest map: spans as short as `MOST_POINTS` allows."""
    if not maps:
        return
    span = CLOSEST_SECONDS
    while (maps[-1].at - maps[0].at) / span > MOST_POINTS - 2:
        span *= 2
    last = None
    for whole in maps[:-1]:
        if whole.at // span != last:
            last = whole.at // span
            yield whole
    yield maps[-1]


TRENDS_KEPT = 16


class Trends:
    """The trend of each organisation that has looked, with None for operators."""

    def __init__(self) -> None:
        self._trends: OrderedDict[str | None, Trend] = OrderedDict()
        self._thread = SerialThread()

    async def follow(self, org: str | None, maps: Sequence[SiteMap]) -> tuple[TrendPoint, ...]:
        """The points of some maps for a viewer, one viewer at a time."""
        return await self._thread.run(self._follow, org, maps)

    def _follow(self, org: str | None, maps: Sequence[SiteMap]) -> tuple[TrendPoint, ...]:
        trend = self._trends.setdefault(org, Trend(org))
        self._trends.move_to_end(org)
        while len(self._trends) > TRENDS_KEPT:
            self._trends.popitem(last=False)
        return trend.follow(maps)


class TrendChart(msgspec.Struct, frozen=True, kw_only=True):
    """One number over time, as paths in a box of `WIDTH` by `HEIGHT`."""

    label: str
    words: str
    """The content of the chart, for screen readers."""
    line: str
    band: str
    """The area between the lowest and the highest possible value. Empty if everything is known."""
    tone: str = ""


def trend_charts(points: Sequence[TrendPoint], *, operator: bool) -> tuple[TrendChart, ...]:
    """The charts of some points: of the whole site for an operator, else of a tenant's own GPUs."""
    used = _chart(
        "GPUs in use" if operator else "Your GPUs used by pods",
        points,
        lambda point: (point.used, point.used + point.use_unknown),
        top=max((point.gpus for point in points), default=0),
    )
    problems = _chart(
        "GPUs with a problem" if operator else "Your GPUs with a problem",
        points,
        lambda point: (point.problems, point.problems + point.health_unknown),
        tone="bad",
    )
    if not operator:
        return used, problems
    attention = _chart(
        "Findings that need attention",
        points,
        lambda point: None if point.attention is None else (point.attention, point.attention),
        tone="bad",
    )
    return used, problems, attention


Bounds = tuple[int, int]
"""The lowest and the highest value that a number may have."""


def _chart(
    label: str,
    points: Sequence[TrendPoint],
    bounds: Callable[[TrendPoint], Bounds | None],
    *,
    top: int = 0,
    tone: str = "",
) -> TrendChart:
    """A chart from 0 to `top`, or to the highest value if that is more."""
    runs = list(_runs(points, bounds))
    highest = max((high for run in runs for _, (_, high) in run), default=0)
    scale = (HEIGHT - 2 * MARGIN) / max(top, highest, 1)
    line, band = [], []
    for run in runs:
        lower = [(x, round(HEIGHT - MARGIN - scale * low, 1)) for x, (low, _) in run]
        upper = [(x, round(HEIGHT - MARGIN - scale * high, 1)) for x, (_, high) in run]
        line.append(_path(_steps(lower)))
        if lower != upper:
            band.append(_path(_steps(lower) + _steps(upper)[::-1]) + "Z")
    values = [low for run in runs for _, (low, _) in run]
    return TrendChart(label=label, words=_words(values), line="".join(line), band="".join(band), tone=tone)


def _words(values: Sequence[int]) -> str:
    if not values:
        return "unknown"
    least, most = min(values), max(values)
    return f"{most:,} all the time" if least == most else f"{least:,} to {most:,}, last {values[-1]:,}"


Run = list[tuple[float, Bounds]]
"""Horizontal position and value of points without a gap between them."""


def _runs(points: Sequence[TrendPoint], bounds: Callable[[TrendPoint], Bounds | None]) -> Iterator[Run]:
    if not points:
        return
    first, last = points[0].at, points[-1].at
    run: Run = []
    for point in points:
        value = bounds(point)
        if run and (point.after_gap or value is None):
            yield run
            run = []
        if value is not None:
            run.append((round(WIDTH * (point.at - first) / ((last - first) or 1.0), 1), value))
    if run:
        yield run


def _steps(corners: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of a line in steps: each value is kept to the place of the next."""
    path = list(corners[:1])
    for x, y in corners[1:]:
        path += [(x, path[-1][1]), (x, y)]
    return path


def _path(corners: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in corners)
