"""`rackloom place`: where whole jobs would go, or what blocks them; nothing is changed.

This module holds the options and their help. `place_site` reads the site, `place_plan` places the jobs,
and `place_page` prints the result. They are imported when the command runs.
"""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from rackloom.cli.common import Output

SiteFiles = Annotated[list[Path] | None, Parameter(negative="", consume_multiple=True)]
NameList = Annotated[list[str] | None, Parameter(negative="", consume_multiple=True)]
PlainFlag = Annotated[bool, Parameter(negative="")]
RenderTarget = Literal["affinity", "kueue", "kai", "lws", "podgroup", "slurm"]


def place(
    *jobs: Path,
    profile: str | None = None,
    racks: Annotated[int, Parameter(validator=Number(lte=10_000))] = 1,
    site: SiteFiles = None,
    cluster: PlainFlag = False,
    context: str | None = None,
    segment: int | None = None,
    spares: int = 0,
    apart: PlainFlag = False,
    exclusive: PlainFlag = False,
    without_tray: NameList = None,
    drain: NameList = None,
    defrag: PlainFlag = False,
    down: float | None = None,
    label: NameList = None,
    render: RenderTarget | None = None,
    output: Output = "table",
) -> int:
    """Choose the clique and the trays of whole jobs before their pods exist; nothing is changed.

    What does not fit is refused with what blocks it and the nearest fix, which was planned before.

    Parameters
    ----------
    jobs
        Manifests with an MPIJob (v2beta1), Job, JobSet, LeaderWorkerSet or pods, their ComputeDomain and
        claim templates. Several jobs are placed beside each other: as many GPUs as can be for the highest
        priority, then for the next.
    profile
        A rack or machine of `rackloom topology list` to plan for.
    racks
        How many racks (or machines) of the profile there are.
    site
        A saved cluster (`kubectl get nodes,pods,resourceslices,deviceclasses,resourceclaims,priorityclasses
        -A -o yaml`).
    cluster
        Ask the cluster that kubectl talks to.
    context
        Another of kubectl's contexts.
    segment
        Members that must share a clique, instead of all: 16 of an NVL72's 18 trays is the usual largest.
    spares
        Trays to keep free in each clique that is used, for a member whose tray is lost.
    apart
        Let each group of a job have a clique of its own (prefill here, decode there).
    exclusive
        Take only empty trays, and those whole.
    without_tray
        Plan as if these trays were gone.
    drain
        Empty these trays first, and print what has to move and its cost.
    defrag
        Move what may move first, so that larger holes open, and print the cost.
    down
        Share of trays that are down (0.01), for the price of a segment size; without --segment, of all
        sizes.
    label
        A name that differs here, such as clique=accelerator.topograph.run/domain.
    render
        Print the job for a scheduler, with what else its files have, and on stderr what the plan rests on.
    output
        How to print.
    """
    # The allocator and its CEL library take longer to load than help may take to print.
    from rackloom.cli import place_plan
    from rackloom.cli.place_site import SiteOptions
    from rackloom.core.place.placement_values import SchedulerLabels

    asked = place_plan.PlacementRequest(
        labels=SchedulerLabels().changed(label or []),
        segment=segment,
        spares=spares,
        apart=apart,
        exclusive=exclusive,
        without=tuple(without_tray or ()),
        drain=tuple(drain or ()),
        defrag=defrag,
        down=down,
        alone=render == "lws",
    )
    source = SiteOptions(
        profile=profile,
        racks=racks,
        files=tuple(site or ()),
        cluster=cluster or context is not None,
        context=context,
    )
    return place_plan.answer_placement(jobs, source, asked, render, output)
