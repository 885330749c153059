"""The reports of every layer about one site at about one moment, as immutable values.

Four layers are read: the switch fabrics (the newest reading of each NVLink domain that the site service
has recorded), the site's own records, the Kubernetes cluster, and records of measured transfers.
Collectors build these values, `join` ties the records of one GPU together, and the checks and the rack
map read the result. Nothing here decides whether a state is right.

A layer that was not selected has no `LayerStatus` in the snapshot. A layer that could not be read has
`unknown_since`: its records are unknown, not absent. Tuples are sorted by name.

A large site has about a hundred thousand records. They cannot refer to one another in cycles, so the types
with many instances opt out of garbage collection (`gc=False`), because its pauses delay everything that
waits.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeVar

import msgspec

from rackloom.core.allocate.taint_rules import WithheldDevice
from rackloom.core.cluster.domain_objects import ComputeDomain
from rackloom.core.cluster.objects import Condition, ResourceKind
from rackloom.topology.join_key import GpuKey, SlotKey

K = TypeVar("K")
V = TypeVar("V")
DeviceId = tuple[str, str, str]
"""Driver, pool and name, as ResourceSlices and allocations name a device."""


def grouped(pairs: Iterable[tuple[K, V]]) -> defaultdict[K, list[V]]:
    """The values of each key, both in the order in which they come."""
    found: defaultdict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found


# Workloads of a cluster: pods with claims, their ResourceClaims and ResourceClaimTemplates.


class TemplateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A ResourceClaimTemplate."""

    namespace: str
    name: str
    domain: str
    """UID of the ComputeDomain that it was made for. Empty if it belongs to none."""


class ClaimRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A ResourceClaim."""

    namespace: str
    name: str
    domain: str
    """UID of the ComputeDomain that it requests a channel of. Empty if it requests none."""
    allocated: bool
    reserved_for: tuple[str, ...]
    """UIDs of pods."""
    since: float | None = None
    """When it was made, seconds since the epoch."""
    withheld: tuple[WithheldDevice, ...] = ()
    """Devices that it would get if DeviceTaintRules did not taint them."""

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A pod of a workload that has not ended."""

    namespace: str
    name: str
    uid: str
    node: str
    """Empty until it is bound."""
    templates: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Claim templates that it names, by the name of the claim in the pod."""
    claims: Mapping[str, str] = msgspec.field(default_factory=dict)
    """ResourceClaims that it has, named or made for it, by the name of the claim in the pod."""
    owner: str = ""
    """The controller that recreates it, as `Job team/train`. Empty if none."""
    since: float | None = None
    """When it was made, seconds since the epoch."""
    gated: bool = False
    """Whether it has scheduling gates: the scheduler does not consider it before they are removed."""

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


class ReportedCondition(msgspec.Struct, frozen=True, kw_only=True):
    """A condition by which a controller or a node reports something that needs attention."""

    kind: ResourceKind
    namespace: str
    name: str
    condition: Condition
    device: str = ""
    """Of a claim: the device that it concerns."""
    pods: tuple[str, ...] = ()
    """Pods that use the object, `namespace/name`."""


# Layers, the switch fabric, the site's records, the cluster, and the snapshot that holds them all.


class Layer(StrEnum):
    """A source of records."""

    FABRIC = "fabric"
    """Switch controllers, through the newest reading of each that the site service has recorded."""
    SITE = "site"
    """The site service's own records: tenants, machines, instances, logical partitions."""
    CLUSTER = "cluster"
    """The Kubernetes API server."""
    TRANSFER = "transfer"
    """Records of measured transfers."""


class LayerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a layer could be read."""

    layer: Layer
    at: float | None = None
    """Time of the last full reading, in seconds since the epoch, or None if it was never read."""
    unknown_since: float | None = None
    """Time of the first failed reading, or None if it was read, at `at`."""
    problem: str = ""
    fix: str = ""
    """A command that makes it readable, if one is known."""


class SilentController(msgspec.Struct, frozen=True):
    """A switch controller that does not answer."""

    url: str
    since: float
    chassis: tuple[str, ...]
    """Serials of the chassis that it controls, at least one."""


class NvlinkDomainRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One NVLink domain, as its switch controllers were last read."""

    uuid: str
    endpoints: tuple[str, ...] = ()
    observed_at: float | None = None
    unknown_since: float | None = None
    """Time since which its controllers do not answer, or contradict one another."""
    problem: str = ""
    silent: tuple[SilentController, ...] = ()
    """Controllers that do not answer. The answer of any other controller of the domain is enough."""
    chassis: frozenset[str] = frozenset()
    """Serials of the chassis that any of its controllers controls."""
    disputed: bool = False
    """Whether they answer, and contradict one another or those of another domain."""
    paused: bool = False
    uncertain: int = 0
    """Number of GPUs that its controller contradicts itself about."""
    default_policy: str = ""
    """The site's policy for the factory's partition: keep, tray or none. Empty if not known."""
    multicast_limit: int | None = None
    multicast_used: int | None = None
    """Multicast groups of the domain, and those that partitions have. None if the controller reports none."""

    @property
    def answers(self) -> bool:
        """Whether the newest reading shows the present state."""
        return self.observed_at is not None and self.unknown_since is None


class FabricGpuRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One GPU, as its switch controller names it."""

    domain: str
    place: SlotKey
    guid: int
    """64-bit fabric GUID."""
    tray_index: int
    healthy: bool | None
    """None: the controller does not know."""
    problem: str = ""
    partition: int | None = None
    """Id of the physical partition that holds it, unique within its domain, or None if none does."""
    also: tuple[int, ...] = ()
    """Further partitions that list it too: a GPU belongs to at most one."""
    uncertain: bool = False
    """Whether the controller contradicts itself about its partition."""


class PartitionRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One physical partition on a switch fabric."""

    domain: str
    id: int
    name: str
    healthy: bool | None
    problem: str = ""
    logical: str | None = None
    """UUID of the logical partition for which the site made it, or None if the site did not make it."""
    default: bool = False
    """The factory's partition."""
    owner: str = ""
    """The site's classification: site, tray, default, released or foreign. Empty if not known."""
    uncertain: bool = False
    """Whether its controller contradicts itself about its members, or may have left them out."""


class LostPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A partition that the site made and observed, and that the newest reading omits without a deletion."""

    domain: str
    name: str
    logical: str
    seen_at: float
    """When it was last observed."""


class LogicalPartitionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One logical partition in the site's records."""

    id: str
    name: str
    tenant: str
    vpc: str = ""
    status: str
    """As in REST: Ready, Pending, Error, Unknown..."""
    since: float | None = None
    problem: str = ""


class MachineRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One compute tray in the site's records."""

    id: str
    rack: str
    domain: str
    chassis_serial: str
    slot: int
    tray_index: int
    gpus: tuple[GpuKey, ...]
    """By module id, 1 first."""
    status: str
    health: str = ""
    """Problems that its health reports name. Empty if none."""
    cordoned: bool = False
    reserved_for: str | None = None
    """The only tenant that may have it now."""
    reservation: str = ""
    """For operators: the organisation that it is reserved for, and the end of the reservation."""
    missing_since: float | None = None
    """Time since which its controller lists no GPU of it."""
    instance: str | None = None
    held_since: float | None = None
    """When the instance got the machine."""
    tenant: str | None = None
    vpc: str | None = None


class MovedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of an instance that a switch controller now lists outside of the instance's machine."""

    machine: str
    module_id: int
    guid: int
    """64-bit fabric GUID."""
    since: float


class InstanceGpuRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One NVLink interface of an instance: the GPU and the logical partition requested for it."""

    instance: str
    machine: str
    module_id: int
    logical: str | None
    status: str
    since: float | None = None
    problem: str = ""
    fix: str = ""
    """The nearest fix that the newest plan named."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One node of the cluster."""

    name: str
    ready: bool | None
    ready_since: float | None = None
    clique: str | None = None
    """Label nvidia.com/gpu.clique, `<clusterUUID>.<cliqueId>`, or None without the label."""
    clique_writer: str = ""
    """The field manager that wrote it, if the object names one."""
    clique_since: float | None = None
    """When that manager last wrote any of its fields, seconds since the epoch."""
    other_writers: tuple[str, ...] = ()
    """Further field managers that own the label."""
    taints: tuple[str, ...] = ()
    unschedulable: bool = False
    runtime: str | None = None
    """Its container runtime, such as containerd://2.0.1."""
    simulated: bool = False
    """Whether its label declares that it is simulated."""


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One device of a ResourceSlice."""

    driver: str
    pool: str
    name: str
    node: str
    kind: str
    """gpu, mig, nic, channel or daemon."""
    key: GpuKey = GpuKey()
    clique: str | None = None
    pcie_root: str | None = None
    numa: int | None = None
    partner: str | None = None
    """Name of the NIC (of a GPU) or PCI address of the GPU (of a NIC) that its plugin pairs it with."""
    partner_address: str | None = None
    """Of a GPU: PCI address of that NIC."""
    partner_class: str | None = None
    """The PCIe path class of the two, as nvidia-smi abbreviates it: PIX, PXB, PHB, NODE, SYS."""
    link: str | None = None
    """Of a NIC: its state, as published."""
    gbps: int | None = None
    """Of a NIC: its line rate, Gb/s."""
    taints: tuple[str, ...] = ()
    """Those that its driver publishes, then those of DeviceTaintRules."""
    rules: tuple[str, ...] = ()
    """The DeviceTaintRules that keep new pods away."""
    tainted_since: float | None = None
    """When the first taint that keeps new pods away came, seconds since the epoch."""

    @property
    def device_id(self) -> DeviceId:
        """Its id in allocations."""
        return self.driver, self.pool, self.name


class PoolRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A pool that a driver publishes for a node, even if it contains no device."""

    driver: str
    name: str
    node: str


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One allocated device, the claim that has it, and the pods that use the claim."""

    driver: str
    pool: str
    device: str
    claim: str
    """namespace/name. Empty if hidden from the viewer."""
    pods: tuple[str, ...]
    """namespace/name each."""
    since: float | None = None
    """Time at which the kubelet accepted the first of these pods, or None if unknown for any of them."""
    jobs: tuple[str, ...] = ()
    """The controllers that recreate these pods, as `Job team/train`."""

    @property
    def device_id(self) -> DeviceId:
        """Its id in ResourceSlices."""
        return self.driver, self.pool, self.device


class ImexMeshRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The IMEX daemon of one node in one ComputeDomain (or, in channel mode, of one clique)."""

    node: str
    domain: str
    """UID of the ComputeDomain. Empty for a clique's long-lived IMEX domain."""
    clique: str | None
    """None until the daemon has reported it. Empty on a node without a fabric."""
    complete: bool | None
    """Whether the daemon reaches all its peers, or None until it has reported it."""
    missing: tuple[str, ...] = ()
    """The connections that it lacks."""


class MeasuredTransfer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The newest transfer that was measured from one GPU (or host)."""

    at: float
    node: str
    key: GpuKey = GpuKey()
    device: str
    """The device that carried it, such as mlx5_0:1."""
    gigabytes_per_second: float
    verdict: str
    """As recorded: holds, fails, unknown, or no promise (nothing to compare the measurement with)."""
    reason: str = ""
    emulated: bool = False


class SiteSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All of a site, read at about one moment. Tuples are sorted by their names."""

    at: float
    layers: tuple[LayerStatus, ...]
    domains: tuple[NvlinkDomainRecord, ...] = ()
    fabric_gpus: tuple[FabricGpuRecord, ...] = ()
    partitions: tuple[PartitionRecord, ...] = ()
    lost_partitions: tuple[LostPartition, ...] = ()
    logicals: tuple[LogicalPartitionRecord, ...] = ()
    machines: tuple[MachineRecord, ...] = ()
    instance_gpus: tuple[InstanceGpuRecord, ...] = ()
    moved_gpus: tuple[MovedGpu, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    pools: tuple[PoolRecord, ...] = ()
    devices: tuple[DeviceRecord, ...] = ()
    uses: tuple[DeviceUse, ...] = ()
    compute_domains: tuple[ComputeDomain, ...] = ()
    meshes: tuple[ImexMeshRecord, ...] = ()
    daemons_in: str = ""
    """Namespace of the IMEX daemons, the only pods with trusted mesh annotations. Empty if not read."""
    transfers: tuple[MeasuredTransfer, ...] = ()
    templates: tuple[TemplateRecord, ...] = ()
    claims: tuple[ClaimRecord, ...] = ()
    pods: tuple[PodRecord, ...] = ()
    """Those with claims that have not ended."""
    reported: tuple[ReportedCondition, ...] = ()
    tenants: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Org of each tenant by its id."""
    vpcs: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Name of each VPC by its id."""
    namespaces: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Org of each namespace that is labelled with one, the only link from a cluster to tenants."""
    issuers: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Token issuers with signing keys that the site service could not read, each with the reason."""
    simulated: tuple[Layer, ...] = ()
    """Layers of which some or all is a simulation."""

    def layer(self, layer: Layer) -> LayerStatus | None:
        """The status of a layer, or None if it was not selected."""
        return next((status for status in self.layers if status.layer == layer), None)


class GpuChain(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One GPU through all layers. None for a layer that does not know it or was not read."""

    key: GpuKey
    """The parts of its identity that any layer reports."""
    machine: MachineRecord | None = None
    fabric: FabricGpuRecord | None = None
    partition: PartitionRecord | None = None
    logical: LogicalPartitionRecord | None = None
    """That of its physical partition."""
    wanted: InstanceGpuRecord | None = None
    """The request of its instance."""
    node: NodeRecord | None = None
    device: DeviceRecord | None = None
    use: DeviceUse | None = None
    compute_domain: ComputeDomain | None = None
    channel: str | None = None
    """The IMEX channel of the pods that use it."""
    nics: tuple[DeviceRecord, ...] = ()
    """Those that serve it, first the one that its own plugin pairs it with."""
    transfer: MeasuredTransfer | None = None
    conflicts: tuple[str, ...] = ()
    """Descriptions of contradictions: two layers that name different GPUs in one slot."""
