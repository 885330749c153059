"""Options of `rackloom place`: the site, how jobs are placed, and changes to the site to plan with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from rackloom.cli.common import Flag, KubeContext, Kubectl
from rackloom.cli.kubectl_plugin import is_kubectl_plugin

SiteFiles = Annotated[list[Path] | None, Parameter(negative="", consume_multiple=True)]


NameList = Annotated[list[str] | None, Parameter(negative="", consume_multiple=True)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SiteParameters:
    """The site to plan for: a profile, a saved cluster, or the cluster that kubectl uses."""

    profile: str | None = None
    "A rack or machine of `rackloom topology list` to plan for."
    racks: Annotated[int, Parameter(validator=Number(lte=10_000))] = 1
    "The number of racks (or machines) of the profile."
    site: SiteFiles = None
    (
        "A saved cluster (`kubectl get nodes,pods,resourceslices,deviceclasses,resourceclaims,priorityclasses"
        " -A -o yaml`)."
    )
    cluster: Flag = False
    "Read the cluster of the kubeconfig."
    kubeconfig: Kubectl = None
    context: KubeContext = None
    label: NameList = None
    "A name that differs here, such as clique=accelerator.topograph.run/domain."

    @property
    def is_live(self) -> bool:
        """True if the site is read from a live cluster."""
        if self.cluster or self.kubeconfig is not None or self.context is not None:
            return True
        return is_kubectl_plugin() and self.profile is None and not self.site


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlacementParameters:
    """How jobs are placed."""

    segment: int | None = None
    "Members that must share a clique, instead of all. 16 of an NVL72's 18 trays is the usual largest."
    spares: int = 0
    "Trays to keep free in each used clique, for a member that loses its tray."
    apart: Flag = False
    "Let each group of a job use a separate clique (prefill here, decode there)."
    exclusive: Flag = False
    "Take only empty trays, and take them whole."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WhatIfParameters:
    """Changes to the site to plan with."""

    without_tray: NameList = None
    "Plan as if these trays were gone."
    drain: NameList = None
    "Empty these trays first, and print the necessary moves and their cost."
    defrag: Flag = False
    "First move jobs that may move, so that larger free regions open, and print the cost."
    down: float | None = None
    ("Share of trays that are down (0.01), for the cost of a segment size. Without --segment, of all sizes.")
