"""Options that commands of `rackloom claim` share: the hardware, and the request of a claim.

The hardware comes from a profile, from ResourceSlices, or from both. If both are given, the profile adds the
topology that the slices leave out.
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
    """The hardware for a claim."""

    profile: str | None = None
    (
        "A machine or rack of `rackloom topology list`: the devices that its drivers would publish, and "
        "the classes gpu.nvidia.com and dranet.net. For `template` with slices, it adds the known topology "
        "of their devices."
    )
    slices: Slices = None
    "ResourceSlices of a cluster (`kubectl get resourceslices,deviceclasses -o yaml`)."
    cluster: Flag = False
    "Read slices, classes, nodes and the devices held by claims from the cluster of the kubeconfig."
    kubeconfig: Kubectl = None
    context: KubeContext = None

    @property
    def is_live(self) -> bool:
        """True if the slices are those of a live cluster."""
        if self.cluster or self.kubeconfig is not None or self.context is not None:
            return True
        return is_kubectl_plugin() and self.profile is None and not self.slices


Rails = Annotated[list[int] | None, Parameter(negative="", consume_multiple=True)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TemplateParameters:
    """The request of a claim."""

    gpus: int
    "GPUs of a claim."
    nics: int
    "NICs of a claim."
    align: Literal["numa", "pcie", "rail"]
    (
        "The level at which they are aligned: one NUMA node, one PCIe switch or root, or the rail (the same "
        "NICs on every node, each near a GPU)."
    )
    pairs: Flag = False
    "A pair of requests (gpu-0/nic-0, ...) for each unit of the GPU to NIC ratio. Each pair is aligned alone."
    unaligned: Flag = False
    "Take NICs that are far from the GPUs, for the other arm of a comparison."
    rail: Rails = None
    "The rails, as positions of the NICs on a node from 0. Default: the first that fit."
    name: str | None = None
    "Name of the template."
