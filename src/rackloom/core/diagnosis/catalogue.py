"""The catalogue of checks: their names, their order, and which check explains which.

The names appear in tables, JSON, metrics and scenario files, so they are part of the interface.
Checks on which others depend come first. `HOST_CHECKS` exist only for a host with its own files read.
Findings of equal severity are sorted in this order, those of the host first.

`EXPLAINS` is the causal graph: a finding of the check on the left is the plain cause of findings of the
checks on the right, if both concern the same place. `examination` folds findings along this graph. An unknown
finding explains no failure, except for the checks in `SILENCE_EXPLAINS_FAILURES`: a kubelet that does not
answer breaks the pods on its node.
"""

import re
from collections.abc import Mapping
from enum import StrEnum


class Check(StrEnum):
    """The name of a check."""

    LAYER = "layer readable"
    CONTROLLER = "switch controller"
    CONTROLLER_AWAY = "switch controller away"
    DOMAIN_PAUSED = "domain at work"
    TRAY_PLACE = "tray in its place"
    MACHINE_PRESENT = "machine present"
    GPU_HEALTH = "GPU health"
    PARTITION_HEALTH = "partition health"
    ISOLATION = "tenants apart"
    ONE_PARTITION = "GPU in one partition"
    PARTITION_THERE = "partition present"
    PARTITION_OWNED = "partition owned"
    DEFAULT_GONE = "default partition removed"
    MULTICAST = "multicast groups left"
    INTERFACE = "GPU in its partition"
    LOGICAL_SPREAD = "logical partition in one domain"
    MAPPING = "machine GPU mapping"
    IDENTITY = "one identity per GPU"
    SPLIT = "tray in one partition"
    CLIQUE_LABEL = "gpu.clique matches the fabric"
    CLIQUE_WRITER = "one writer of gpu.clique"
    NODE_READY = "node ready"
    NODE_PUBLISHES = "node publishes its devices"
    SLICE_OF_NODE = "slice of a living node"
    DEVICE_TAINT = "device untainted"
    DEVICE_THERE = "allocated device published"
    TEMPLATES = "template names match"
    CLAIMS = "claims allocated,reserved"
    GANG = "gang on its trays"
    PREPARED = "claimed device ready"
    ACTIVE = "ComputeDomain active"
    ONE_CLIQUE = "pods in one clique"
    MESH = "IMEX mesh complete"
    NIC_LINK = "NIC link"
    NIC_ALIGNED = "NIC aligned with its GPU"
    TRANSFER = "newest transfer"
    DRIVER = "driver version"
    CDI = "CDI on"
    PORTS = "IMEX ports free"
    HOST_IMEX = "host nvidia-imex off"
    CHANNELS = "IMEX channels offered"


def runbook_name(check: str) -> str:
    """The name of the runbook of a check: `device-untainted`."""
    return re.sub(r"[^a-z0-9]+", "-", check.lower()).strip("-")


EXPLAINS: Mapping[Check, frozenset[Check]] = {
    Check.LAYER: frozenset({Check.CONTROLLER}),
    Check.CONTROLLER: frozenset({Check.INTERFACE, Check.MAPPING}),
    Check.CONTROLLER_AWAY: frozenset({Check.CONTROLLER, Check.INTERFACE, Check.MAPPING}),
    Check.TRAY_PLACE: frozenset({Check.MACHINE_PRESENT, Check.INTERFACE, Check.MAPPING, Check.IDENTITY}),
    Check.MACHINE_PRESENT: frozenset({Check.INTERFACE, Check.MAPPING}),
    Check.GPU_HEALTH: frozenset({Check.INTERFACE, Check.PARTITION_HEALTH, Check.DEVICE_TAINT}),
    Check.ISOLATION: frozenset({Check.INTERFACE}),
    Check.ONE_PARTITION: frozenset({Check.INTERFACE}),
    Check.PARTITION_THERE: frozenset({Check.INTERFACE, Check.CLIQUE_LABEL, Check.ONE_CLIQUE}),
    Check.PARTITION_OWNED: frozenset({Check.PARTITION_THERE, Check.INTERFACE, Check.SPLIT, Check.ONE_CLIQUE}),
    Check.DEFAULT_GONE: frozenset({Check.INTERFACE, Check.MULTICAST}),
    Check.INTERFACE: frozenset({Check.SPLIT, Check.CLIQUE_LABEL}),
    Check.MAPPING: frozenset({Check.INTERFACE, Check.IDENTITY}),
    Check.IDENTITY: frozenset({Check.CLIQUE_LABEL}),
    Check.SPLIT: frozenset({Check.CLIQUE_LABEL, Check.ONE_CLIQUE, Check.ACTIVE, Check.MESH}),
    Check.CLIQUE_LABEL: frozenset({Check.ONE_CLIQUE}),
    Check.NODE_READY: frozenset(
        {
            Check.NODE_PUBLISHES,
            Check.MESH,
            Check.ACTIVE,
            Check.ONE_CLIQUE,
            Check.CLAIMS,
            Check.PREPARED,
            Check.DEVICE_TAINT,
            Check.DEVICE_THERE,
        }
    ),
    Check.NODE_PUBLISHES: frozenset({Check.DEVICE_THERE, Check.CLAIMS}),
    Check.SLICE_OF_NODE: frozenset({Check.DEVICE_THERE}),
    Check.TEMPLATES: frozenset({Check.CLAIMS, Check.ACTIVE}),
    Check.CLAIMS: frozenset({Check.ACTIVE}),
    Check.ONE_CLIQUE: frozenset({Check.ACTIVE, Check.MESH}),
    Check.MESH: frozenset({Check.ACTIVE}),
    Check.NIC_LINK: frozenset({Check.TRANSFER}),
    Check.NIC_ALIGNED: frozenset({Check.TRANSFER}),
    Check.DRIVER: frozenset({Check.CHANNELS, Check.NODE_PUBLISHES, Check.MESH}),
    Check.HOST_IMEX: frozenset({Check.PORTS, Check.MESH}),
    Check.PORTS: frozenset({Check.MESH}),
    Check.CHANNELS: frozenset({Check.NODE_PUBLISHES}),
}
"""A finding of the key is a cause of findings of the values that share a place with it."""

SILENCE_EXPLAINS_FAILURES: frozenset[Check] = frozenset({Check.NODE_READY})
"""Unknown findings that explain failures: the pods of a kubelet that does not answer are not ready."""

HOST_CHECKS = (Check.DRIVER, Check.CDI, Check.PORTS, Check.HOST_IMEX, Check.CHANNELS)
SITE_CHECKS = tuple(check for check in Check if check not in HOST_CHECKS)
