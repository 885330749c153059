"""A control plane with groups of pods, which are behind feature gates."""

import os

from tests.cluster.build import MINOR
from tests.cluster.control_plane import ControlPlane

POD_GROUPS = f"scheduling.k8s.io/{'v1beta1' if os.environ.get(MINOR) == '1.37' else 'v1alpha2'}"
"""The version of PodGroups that is switched on."""

_GATES = "--feature-gates=" + ",".join(
    f"{gate}=true" for gate in ("GenericWorkload", "GangScheduling", "TopologyAwareWorkloadScheduling")
)


class GatedPlane(ControlPlane):
    """It serves `POD_GROUPS`, and its scheduler places PodGroups by topology."""

    def _apiserver(self) -> list[str]:
        return [*super()._apiserver(), _GATES, f"--runtime-config={POD_GROUPS}=true"]

    def _scheduler(self) -> list[str]:
        return [*super()._scheduler(), _GATES]
