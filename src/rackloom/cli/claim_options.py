"""Options that commands of `rackloom claim` share: the hardware, and the request of a claim.

The hardware comes from a profile, from ResourceSlices, or from both: then the profile adds the topology
that the slices leave out.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rackloom.cli.common import Flag, KubeContext, Kubectl
from rackloom.cli.kubectl_plugin import is_kubectl_plugin

Slices = Annotated[list[Path] | None, Parameter(negative="", consume_multiple=True)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class HardwareParameters:
    """The hardware that a claim is for."""

    profile: str | None = None
    (
        "A machine or rack of `rackloom topology list`: its devices as the drivers would publish them, and "
        "the classes gpu.nvidia.com and dranet.net. For `template`, with slices: what is known of the "
        "topology of the devices that they publish."
    )
    slices: Slices = None
    "ResourceSlices of a cluster (`kubectl get resourceslices,deviceclasses -o yaml`)."
    cluster: Flag = False
    "Ask the cluster of the kubeconfig for its slices, classes and nodes, and for what claims hold there."
    kubeconfig: Kubectl = None
    context: KubeContext = None

    @property
    def is_live(self) -> bool:
        """Whether the slices are those of a live cluster."""
        if self.cluster or self.kubeconfig is not None or self.context is not None:
            return True
        return is_kubectl_plugin() and self.profile is None and not self.slices


Rails = Annotated[list[int] | None, Parameter(negative="", consume_multiple=True)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TemplateParameters:
    """What a claim asks for."""

    gpus: int
    "GPUs of a claim."
    nics: int
    "NICs of a claim."
    align: Literal["numa", "pcie", "rail"]
    (
        "What they have in common: one NUMA node, one PCIe switch or root, or the rail (the same NICs on "
        "every node, each near a GPU)."
    )
    pairs: Flag = False
    "A pair of requests (gpu-0/nic-0, ...) for each unit of the ratio of GPUs to NICs, aligned by itself."
    unaligned: Flag = False
    "NICs that are far from the GPUs instead: the other arm of a comparison."
    rail: Rails = None
    "The rails, as positions of the NICs on a node from 0. Without it: the first that fit."
    name: str | None = None
    "Name of the template."
