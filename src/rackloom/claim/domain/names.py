"""Names, labels and numbers of the ComputeDomain API, exactly as manifests written for it expect them.

Source: NVIDIA's DRA driver for GPUs (`resource.nvidia.com/v1beta1`), version 0.5.
"""

GROUP = "resource.nvidia.com"
API_VERSION = f"{GROUP}/v1beta1"

COMPUTE_DOMAIN_LABEL = f"{GROUP}/computeDomain"
"""On nodes, daemon pods, templates and DaemonSets; its value is the ComputeDomain's UID."""
FINALIZER = COMPUTE_DOMAIN_LABEL
CLIQUE_ID_LABEL = f"{GROUP}/computeDomain.cliqueID"
TARGET_LABEL = f"{GROUP}/computeDomainTarget"
TARGET_DAEMON = "Daemon"
TARGET_WORKLOAD = "Workload"
GPU_CLIQUE_LABEL = "nvidia.com/gpu.clique"
"""On nodes: `<clusterUUID>.<cliqueId>`, the topology key of seed manifests."""

IMEX_DRIVER = "compute-domain.nvidia.com"
GPU_DRIVER = "gpu.nvidia.com"
CHANNEL_CLASS = "compute-domain-default-channel.nvidia.com"
DAEMON_CLASS = "compute-domain-daemon.nvidia.com"
CHANNEL_REQUEST = "channel"
DAEMON_REQUEST = "daemon"
CHANNEL_DEVICE = "channel-0"
DAEMON_DEVICE = "daemon-0"

CHANNELS_PER_NODE = 2048
"""The driver's IMEX channel device nodes are 0 to 2047."""
MAX_NODES_PER_IMEX_DOMAIN = 18
"""Trays of one NVL72 rack; a setting, since other racks differ."""


def daemon_name(compute_domain_uid: str) -> str:
    """The name of a ComputeDomain's DaemonSet and of its daemon claim template."""
    return f"computedomain-daemon-{compute_domain_uid}"


def clique_object_name(compute_domain_uid: str, clique_id: str) -> str:
    """The name of the ComputeDomainClique that one ComputeDomain has for one clique."""
    return f"{compute_domain_uid}.{clique_id}"
