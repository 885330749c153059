"""Names, labels, limits and modes of the ComputeDomain API, exactly as existing manifests expect them.

Source: NVIDIA's DRA driver for GPUs (`resource.nvidia.com/v1beta1`), version 0.5. Names below
`rackloom.dev` are additions of Rackloom. The limits are facts of the driver and of Kubernetes: 2048 IMEX
channel device nodes per host, 128 devices per ResourceSlice, 256 pods per claim.

`ImexMode` is the side that runs nvidia-imex. `ImexIsolation` is whether a ComputeDomain has the whole IMEX
domain of its nodes or one channel of a shared one. The label of a node or a ComputeDomain overrides the
default, which must be the same for the controller and the node plugins.

ComputeDomains need NVIDIA driver 570.158.01 or later: it is the first with an IMEX daemon that resolves the
names of its peers again while it runs.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from itertools import takewhile

import msgspec
from msgspec.structs import replace

from rackloom.errors import Refused

GROUP = "resource.nvidia.com"
API_VERSION = f"{GROUP}/v1beta1"

COMPUTE_DOMAIN_LABEL = f"{GROUP}/computeDomain"
"""On nodes, daemon pods, templates and DaemonSets. Its value is the ComputeDomain's UID."""
FINALIZER = COMPUTE_DOMAIN_LABEL
CLIQUE_ID_LABEL = f"{GROUP}/computeDomain.cliqueID"
TARGET_LABEL = f"{GROUP}/computeDomainTarget"
TARGET_DAEMON = "Daemon"
TARGET_WORKLOAD = "Workload"
NO_CLUSTER = "00000000-0000-0000-0000-000000000000"
"""The cluster UUID of a GPU behind the NVSwitches of a single machine: no fabric beyond the machine."""
GPU_CLIQUE_LABEL = "nvidia.com/gpu.clique"
"""On nodes: `<clusterUUID>.<cliqueId>`, the topology key of seed manifests."""

ALLOW_DELETION_ANNOTATION = "rackloom.dev/allow-deletion-under-load"
"""On a ComputeDomain: "true" lets its deletion take IMEX away from pods that still use it."""
ISOLATION_LABEL = "rackloom.dev/imex-isolation"
"""On nodes and ComputeDomains: `domain` or `channel`. Without it the controller's setting holds."""
WARM_CLIQUE_LABEL = "rackloom.dev/warm-clique"
"""On the controller's own ComputeDomain of a clique in channel mode, its slice, and the nodes on which its
daemons run. Its value is the clique id."""
CHANNELS_READY_LABEL = "rackloom.dev/imex-channels"
"""On nodes of a clique in channel mode while IMEX is READY there. Its value is the clique id."""

GPU_CLIENT_LABEL, DRIVER_UPGRADE = "nvidia.com/gpu.deploy.client", "paused-for-driver-upgrade"
"""GPU Operator's label of nodes for third-party programs that use GPUs, and its value while the operator
replaces the driver there."""

SIMULATED_LABEL = "rackloom.dev/simulated"
"""On every node of the twin, wherever it is registered."""

ORG_LABEL = "rackloom.dev/org"
"""On a namespace: the organisation that has pods in it."""

DAEMON_CONTAINER = "compute-domain-daemon"
"""The container by which pods of IMEX daemons are recognised."""
MESH_ANNOTATION = "rackloom.dev/imex-mesh"
"""On daemon pods: which of its peers the daemon reaches, as JSON `{complete, peers, missing}`."""
IMEX_ERROR_ANNOTATION = "rackloom.dev/imex-error"
"""On daemon pods, while nvidia-imex does not run: its last exit and its log, in one line."""

SPANS_CLIQUES = "SpansCliques"
"""The condition of a ComputeDomain with nodes in several cliques."""
QUOTA_RESERVED = "QuotaReserved"
"""The condition of a ComputeDomain that Kueue counts."""
WAITING_FOR_QUOTA = "WaitingForQuota"
"""Its reason for a ComputeDomain that waits for quota and has nothing."""
WITHDRAWN = "Withdrawn"
"""Its reason for a ComputeDomain that was evicted, has no pod, and loses everything that it has."""

IMEX_DRIVER = "compute-domain.nvidia.com"
GPU_DRIVER = "gpu.nvidia.com"
CHANNEL_CLASS = "compute-domain-default-channel.nvidia.com"
DAEMON_CLASS = "compute-domain-daemon.nvidia.com"
ISOLATED_CHANNEL_CLASS = "compute-domain-isolated-channel.rackloom.dev"
ISOLATED_CHANNEL_TYPE = "isolated-channel"
"""The device attribute `type` of a clique's channels. Those of a node have `channel`."""
CHANNEL_REQUEST = "channel"
DAEMON_REQUEST = "daemon"
CHANNEL_DEVICE = "channel-0"
DAEMON_DEVICE = "daemon-0"

IMEX_SERVER_PORT = 50000
IMEX_COMMAND_PORT = 50005
"""Peers query each other on this port: if it is closed, a healthy domain reports DEGRADED."""
IMEX_PROBE_PORT = 8084
BOOT_ID_VARIABLE = "IMEX_BOOT_ID"
"""In the environment of an IMEX daemon: the boot id of its node. `BOOT_FILE` in its directory has it too,
once the clique object has the status of this daemon."""
IMEX_SETTINGS_VARIABLE = "IMEX_SETTINGS"
"""In the environment of an IMEX daemon: the operator's settings of nvidia-imex, if there are any."""
BOOT_FILE = "boot"

CHANNELS_PER_NODE = 2048
"""The driver's IMEX channel device nodes are 0 to 2047."""
CHANNELS_PER_CLIQUE = 128
"""Channels that one clique's pool offers to isolated jobs: the most devices one ResourceSlice holds."""
PODS_PER_CLAIM = 256
"""Kubernetes reserves one claim for at most this many pods."""
MAX_NODES_PER_IMEX_DOMAIN = 18
"""Trays of one NVL72 rack. It is a setting, because other racks differ."""


def daemon_name(compute_domain_uid: str) -> str:
    """The name of a ComputeDomain's DaemonSet, of its daemon claim template and of its NetworkPolicy."""
    return f"computedomain-daemon-{compute_domain_uid}"


def clique_object_name(compute_domain_uid: str, clique_id: str) -> str:
    """The name of the ComputeDomainClique that one ComputeDomain has for one clique."""
    return f"{compute_domain_uid}.{clique_id}"


def imex_secret_name(compute_domain_uid: str) -> str:
    """The Secret with the key and certificate that all IMEX daemons of a ComputeDomain share."""
    return f"computedomain-imex-{compute_domain_uid}"


def imex_authority_name(compute_domain_uid: str) -> str:
    """The Secret with the authority that issues them. Only the controller reads it."""
    return f"computedomain-imex-authority-{compute_domain_uid}"


def imex_peer_name(compute_domain_uid: str) -> str:
    """The DNS name in that certificate: a peer with it belongs to this ComputeDomain's IMEX domain."""
    return f"imex-{compute_domain_uid}"


def shared_claim_name(compute_domain_uid: str) -> str:
    """The name of the one claim that all pods of a ComputeDomain share in channel mode."""
    return f"computedomain-channel-{compute_domain_uid}"


def channel_pool_name(clique_id: str) -> str:
    """The pool of a clique's isolated channels. The prefix keeps it apart from pools named by node."""
    return f"clique/{clique_id}"


def channel_device_name(channel: int) -> str:
    """The device of one IMEX channel, in a node's pool and in a clique's."""
    return f"channel-{channel}"


def clique_of_pool(pool: str) -> str | None:
    """The clique that has its isolated channels in a pool, or None for any other pool."""
    return pool.removeprefix("clique/") if pool.startswith("clique/") else None


# The side that runs the IMEX daemons, and the isolation of a ComputeDomain.


class ImexMode(StrEnum):
    """The side that runs nvidia-imex."""

    DRIVER_MANAGED = "driverManaged"
    HOST_MANAGED = "hostManaged"


class ImexIsolation(StrEnum):
    """A ComputeDomain has the whole IMEX domain of its nodes, or one channel of a shared one."""

    DOMAIN = "domain"
    CHANNEL = "channel"


class AllocationMode(StrEnum):
    """How many of a node's IMEX channels a claim gets."""

    SINGLE = "Single"
    ALL = "All"


def isolation_of(labels: Mapping[str, str], default: ImexIsolation) -> ImexIsolation:
    """The isolation in the labels of a node or a ComputeDomain, or `default` without a known value.

    The controller and the node plugins need the same default: a node in channel mode publishes no channel,
    only `daemon-0`.
    """
    value = labels.get(ISOLATION_LABEL)
    return ImexIsolation(value) if value in set(ImexIsolation) else default


# Driver versions.


OLDEST_IMEX_DRIVER = "570.158.01"
"""The first with an IMEX daemon that resolves its peers' names again while it runs (NVIDIA's DRA driver)."""


def version_numbers(version: str) -> tuple[int, ...]:
    """`570.158.01` or `v2.0.0-rc.1` as numbers, up to the first part that does not begin with a number."""
    parts = (re.split("[-+]", part)[0] for part in version.lstrip("v").split("."))
    return tuple(int(digits) for digits in takewhile(str.isdigit, parts))


def is_driver_too_old(driver: str) -> bool:
    """Whether a driver of this version is older than the oldest that works."""
    return version_numbers(driver) < version_numbers(OLDEST_IMEX_DRIVER)


# Names that a user may change, because vendors rename them.


POD_GROUP_VERSIONS = tuple(f"scheduling.k8s.io/{version}" for version in ("v1beta1", "v1alpha3", "v1alpha2"))
"""The API versions that have a PodGroup, the newest first.

Kubernetes 1.37 serves the first two, and 1.36 the last. All of them have the fields that are rendered. In
v1alpha1 (1.35) a group is a part of a Workload, and pods name it by another field.
"""


class SchedulerLabels(msgspec.Struct, frozen=True, kw_only=True):
    """Label keys, resource names and object names that the planner reads and renders."""

    clique: str = "nvidia.com/gpu.clique"
    host: str = "kubernetes.io/hostname"
    gpu: str = "nvidia.com/gpu"
    gpu_driver: str = "gpu.nvidia.com"
    gang: str = "rackloom.dev/gang"
    movable: str = "rackloom.dev/movable"
    """On pods: "true" if the job may be restarted elsewhere."""
    topology: str = "nvlink"
    """Name of the Topology object of Kueue and of KAI."""
    queue: str = "default"
    job: str = "rackloom.dev/job"
    """On pods of a rendered job: its affinity selects only them."""
    pod_group_version: str = ""
    """Version of the PodGroup: one of `POD_GROUP_VERSIONS`. Empty: the first that the cluster serves."""

    def changed(self, pairs: list[str]) -> "SchedulerLabels":
        """With `name=value` pairs of a command line. Raises Refused for an unknown name."""
        named: dict[str, str] = {}
        for pair in pairs:
            name, found, value = pair.partition("=")
            if not found or not value or name not in self.__struct_fields__:
                known = ", ".join(self.__struct_fields__)
                raise Refused(f"no such label: {pair!r}", nearest_fix=f"NAME=VALUE with NAME one of {known}")
            named[name] = value
        return replace(self, **named)
