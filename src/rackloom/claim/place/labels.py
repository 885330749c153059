"""The names by which schedulers and drivers know things: a map, because vendors rename them."""

import msgspec

from rackloom.errors import Refused


class Labels(msgspec.Struct, frozen=True, kw_only=True):
    """Label keys, resource names and object names that the planner reads and renders."""

    clique: str = "nvidia.com/gpu.clique"
    host: str = "kubernetes.io/hostname"
    gpu: str = "nvidia.com/gpu"
    gpu_driver: str = "gpu.nvidia.com"
    gang: str = "rackloom.dev/gang"
    movable: str = "rackloom.dev/movable"
    """On pods: "true" where the job may be restarted elsewhere."""
    topology: str = "nvlink"
    """Name of the Topology object of Kueue and of KAI."""
    queue: str = "default"
    job: str = "rackloom.dev/job"
    """On pods of a rendered job: what keeps its affinity to itself."""
    pod_group_version: str = "scheduling.k8s.io/v1alpha2"
    """Of Kubernetes 1.36; 1.37 serves v1beta1."""

    def changed(self, pairs: list[str]) -> "Labels":
        """With `name=value` pairs of a command line. Refused for a name that there is not."""
        named: dict[str, str] = {}
        for pair in pairs:
            name, found, value = pair.partition("=")
            if not found or not value or name not in self.__struct_fields__:
                known = ", ".join(self.__struct_fields__)
                raise Refused(f"no such label: {pair!r}", nearest_fix=f"NAME=VALUE with NAME one of {known}")
            named[name] = value
        return msgspec.structs.replace(self, **named)
