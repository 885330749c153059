"""The catalogue of checks: their names, their order, and which check explains which.

The names appear in tables, JSON, metrics and scenario files, so they are part of the interface.
`SITE_CHECKS` lists what others rest on first. `HOST_CHECKS` exist only for a host whose own files are
read. Findings of equal severity are sorted in this order, those of the host first.

`EXPLAINS` is the causal graph: a finding of the check on the left is the plain cause of findings of the
checks on the right, if both concern the same thing. `examination` folds by it. An unknown finding
explains no failure, except for the checks in `SILENCE_EXPLAINS_FAILURES`: a kubelet that is silent does
break what runs on its node.
"""

from collections.abc import Mapping

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

EXPLAINS: Mapping[str, frozenset[str]] = {
    LAYER: frozenset({CONTROLLER}),
    CONTROLLER: frozenset({INTERFACE, MAPPING}),
    CONTROLLER_AWAY: frozenset({CONTROLLER, INTERFACE, MAPPING}),
    TRAY_PLACE: frozenset({MACHINE_PRESENT, INTERFACE, MAPPING, IDENTITY}),
    MACHINE_PRESENT: frozenset({INTERFACE, MAPPING}),
    GPU_HEALTH: frozenset({INTERFACE, PARTITION_HEALTH, DEVICE_TAINT}),
    ISOLATION: frozenset({INTERFACE}),
    ONE_PARTITION: frozenset({INTERFACE}),
    PARTITION_THERE: frozenset({INTERFACE, CLIQUE_LABEL, ONE_CLIQUE}),
    PARTITION_OWNED: frozenset({PARTITION_THERE, INTERFACE, SPLIT, ONE_CLIQUE}),
    DEFAULT_GONE: frozenset({INTERFACE}),
    INTERFACE: frozenset({SPLIT, CLIQUE_LABEL}),
    MAPPING: frozenset({INTERFACE, IDENTITY}),
    IDENTITY: frozenset({CLIQUE_LABEL}),
    SPLIT: frozenset({CLIQUE_LABEL, ONE_CLIQUE, ACTIVE, MESH}),
    CLIQUE_LABEL: frozenset({ONE_CLIQUE}),
    NODE_READY: frozenset({NODE_PUBLISHES, MESH, ACTIVE, ONE_CLIQUE, CLAIMS, DEVICE_TAINT, DEVICE_THERE}),
    NODE_PUBLISHES: frozenset({DEVICE_THERE, CLAIMS}),
    SLICE_OF_NODE: frozenset({DEVICE_THERE}),
    TEMPLATES: frozenset({CLAIMS, ACTIVE}),
    CLAIMS: frozenset({ACTIVE}),
    ONE_CLIQUE: frozenset({ACTIVE, MESH}),
    MESH: frozenset({ACTIVE}),
    NIC_LINK: frozenset({TRANSFER}),
    NIC_ALIGNED: frozenset({TRANSFER}),
    DRIVER: frozenset({CHANNELS, NODE_PUBLISHES, MESH}),
    HOST_IMEX: frozenset({PORTS, MESH}),
    PORTS: frozenset({MESH}),
    CHANNELS: frozenset({NODE_PUBLISHES}),
}
"""A finding of the check on the left is the plain cause of those on the right that concern the same thing."""

SILENCE_EXPLAINS_FAILURES: frozenset[str] = frozenset({NODE_READY})
"""Unknown by these is a silence that itself breaks what follows: pods of a silent kubelet are not ready."""

SITE_CHECKS: tuple[str, ...] = (
    LAYER,
    CONTROLLER,
    CONTROLLER_AWAY,
    DOMAIN_PAUSED,
    TRAY_PLACE,
    MACHINE_PRESENT,
    GPU_HEALTH,
    PARTITION_HEALTH,
    ISOLATION,
    ONE_PARTITION,
    PARTITION_THERE,
    PARTITION_OWNED,
    DEFAULT_GONE,
    INTERFACE,
    LOGICAL_SPREAD,
    MAPPING,
    IDENTITY,
    SPLIT,
    CLIQUE_LABEL,
    CLIQUE_WRITER,
    NODE_READY,
    NODE_PUBLISHES,
    SLICE_OF_NODE,
    DEVICE_TAINT,
    DEVICE_THERE,
    TEMPLATES,
    CLAIMS,
    ACTIVE,
    ONE_CLIQUE,
    MESH,
    NIC_LINK,
    NIC_ALIGNED,
    TRANSFER,
)
"""Of a site, what others rest on first."""

HOST_CHECKS: tuple[str, ...] = (DRIVER, CDI, PORTS, HOST_IMEX, CHANNELS)
"""Only of a host whose own files are read."""
