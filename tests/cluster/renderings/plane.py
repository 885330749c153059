"""A control plane with the groups of pods of Kubernetes 1.36, which are behind feature gates there."""

from tests.cluster.control_plane import ControlPlane

_GATES = "--feature-gates=" + ",".join(
    f"{gate}=true" for gate in ("GenericWorkload", "GangScheduling", "TopologyAwareWorkloadScheduling")
)


class GatedPlane(ControlPlane):
    """It serves `scheduling.k8s.io/v1alpha2`, and its scheduler places PodGroups by topology."""

    def _apiserver(self) -> list[str]:
        return [*super()._apiserver(), _GATES, "--runtime-config=scheduling.k8s.io/v1alpha2=true"]

    def _scheduler(self) -> list[str]:
        return [*super()._scheduler(), _GATES]
