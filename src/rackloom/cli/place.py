"""`rackloom place`: find trays for whole jobs, or report why they do not fit. Nothing is changed.

This module contains the command, and `place_options` its options and their help. `place_site` reads the site.
`place_plan` reads the jobs, calls the planner and prints the report. Both are imported when the command runs.
"""

from typing import Literal

from rackloom.cli.common import (
    Files,
    Output,
    with_common_flags,
)
from rackloom.cli.place_options import PlacementParameters, SiteParameters, WhatIfParameters

RenderTarget = Literal["affinity", "kueue", "kai", "lws", "podgroup", "slurm"]


@with_common_flags
def place(
    file: Files | None = None,
    *,
    site: SiteParameters = SiteParameters(),  # noqa: B008 (a frozen value)
    how: PlacementParameters = PlacementParameters(),  # noqa: B008 (a frozen value)
    what_if: WhatIfParameters = WhatIfParameters(),  # noqa: B008 (a frozen value)
    render: RenderTarget | None = None,
    output: Output = "table",
) -> int:
    """Choose the clique and the trays of whole jobs before their pods exist. Nothing is changed.

    A job that does not fit is refused, with the blockers and the nearest fix, which was checked with a plan.

    Parameters
    ----------
    file
        Manifests with jobs of any kind that has pod templates (docs/placement.md), or pods, their
        ComputeDomain and claim templates. Several jobs are placed together: as many GPUs as possible
        for the highest priority, then for the next.
    site
        The site to plan for.
    how
        How jobs are placed.
    what_if
        Changes to the site to plan with.
    render
        Print the job for a scheduler and the other objects of its files. The assumptions go to stderr.
    """
    # The allocator and its CEL library take longer to load than help may take to print.
    from rackloom.cli import place_plan
    from rackloom.core.cluster.names import SchedulerLabels
    from rackloom.core.place.site_planner import PlanRequest

    request = PlanRequest(
        labels=SchedulerLabels().changed(site.label or []),
        segment=how.segment,
        spares=how.spares,
        apart=how.apart,
        exclusive=how.exclusive,
        exclusive_topology=render == "lws",
        without_trays=tuple(what_if.without_tray or ()),
        drain=tuple(what_if.drain or ()),
        defrag=what_if.defrag,
        down=what_if.down,
    )
    return place_plan.answer_placement(file or [], site, request, render, output)
