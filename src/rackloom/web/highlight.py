"""The filter of the legend: one entry keeps its colours, and everything else gives them up.

Racks, cells and legend are drawn once for all viewers of a kind, and a filter belongs to one viewer. So it is
not part of the drawing. Each GPU carries the class of its group or state, each cell of the overview the
classes of its whole rack, and each entry of the legend the same as its value: its *mark*. The page of a
viewer with a filter links a style sheet of a few lines (`filter_style`), which takes the colours of elements
without the mark. Changes that arrive later are filtered by it too, and the content policy, which forbids
styles within a page, stays as it is.

The mark of a group is a digest of its key, the same in every process, so that the address of a page may name
it. It names no group to a viewer who does not see that group.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from hashlib import sha256

import msgspec

from rackloom.web.frames import COLOURS, GROUP_MODES, STATE_CLASSES, ColourMode, GpuShade, GpuState

MARK = re.compile(r"k[0-9a-f]{8}|[fgpuw]")
"""The marks that an address may name: a group, or a state in a legend."""
HUE = re.compile(f"[0-{COLOURS - 1}]")
IN_RACK = "x"
"""Begins the class of a rack that holds a state. Single letters are colours of cells."""


@lru_cache(maxsize=1 << 16)
def group_mark(key: str) -> str:
    """The mark of a group."""
    return "k" + sha256(key.encode()).hexdigest()[:8]


def gpu_mark(shade: GpuShade) -> str:
    """The class of a GPU's group, even if only last known. Empty without one: the state has a class."""
    return "" if shade.group is None else group_mark(shade.group.key)


def rack_marks(shades: Iterable[GpuShade]) -> str:
    """The classes of everything in a rack."""
    # Shades of a state are the same object in all GPUs. Comparing them by value costs more than drawing.
    different = {id(shade): shade for shade in shades}.values()
    groups = {gpu_mark(shade) for shade in different if shade.group is not None}
    states = {IN_RACK + STATE_CLASSES[shade.state] for shade in different if shade.state in STATE_CLASSES}
    return " ".join([*sorted(groups), *sorted(states)])


class FilterChoice(msgspec.Struct, frozen=True):
    """The group or state that a filter leaves in colour."""

    mark: str
    name: str
    hue: int | None = None
    """The hue of a group. Cells of racks are drawn in it, even if another group has more of their GPUs."""

    @property
    def path(self) -> str:
        """The address of its style sheet."""
        return f"/map/only/{self.mark}.css" + ("" if self.hue is None else f"?hue={self.hue}")


def state_choices(mode: ColourMode) -> Iterator[FilterChoice]:
    """The states that the legend of a mode has."""
    states = {GpuState.FREE: f"no {mode}"} if mode in GROUP_MODES else _STATES_OF_LEGEND[mode]
    for state, name in states.items():
        yield FilterChoice(STATE_CLASSES[state], name)


_STATES_OF_LEGEND = {
    ColourMode.USE: {GpuState.USED: "in use", GpuState.FREE: "free"},
    ColourMode.HEALTH: {
        GpuState.CRITICAL: "critical",
        GpuState.DEGRADED: "degraded",
        GpuState.HEALTHY: "healthy",
    },
    ColourMode.FRAGMENTATION: {
        GpuState.STRANDED: "stranded",
        GpuState.USED: "in use",
        GpuState.FREE: "free",
    },
}


def filter_style(mark: str, hue: int | None = None) -> str:
    """The style sheet that leaves colours only to elements with this mark. Problems stay marked.

    A group has a hue, in which the cells of all racks with a GPU of it are drawn.
    """
    in_rack = mark if mark.startswith("k") else IN_RACK + mark
    return f"""\
#overview a:not(.{in_rack}) {{ background: var(--ground); border-color: var(--ground); }}
#overview a:not(.{in_rack}).s {{ border-color: var(--bad); }}
#overview a:not(.{in_rack}).d {{ border-color: var(--warn); }}
#overview a:not(.{in_rack}) > i {{ background: var(--ground); }}
#overview a:not(.{in_rack}):not(.s, .d) > b {{ visibility: hidden; }}
{_cells_of_group(mark, hue)}.rack rect[role="gridcell"]:not(.{mark}) {{ fill: var(--ground); }}
.rack rect[role="gridcell"]:not(.{mark}):not(.s, .d) {{ stroke-opacity: .25; }}
#legend button[value="{mark}"] {{ box-shadow: inset 3px 0 var(--ink); }}
"""


def _cells_of_group(mark: str, hue: int | None) -> str:
    """Cells of the overview show their largest group, or the chosen group under a filter."""
    if hue is None:
        return ""
    return f"""\
#overview:not(.trays) a.{mark}, #overview i.{mark} {{ background: var(--h{hue}); }}
#overview i:not(.{mark}) {{ background: var(--ground); }}
#overview a:not(.s, .d) > b {{ visibility: hidden; }}
"""
