"""What each layer says of a site, as values; collectors make them, `join` ties them, others read them.

Nothing here decides what is right. A layer that was not read, or not lately, says so in `Layers`, and what
it would have told is then unknown, not absent.

A large site has a hundred thousand of these. They cannot refer to one another in circles, so those of which
there are many are left out of garbage collection (`gc=False`), whose pauses are felt by all that waits.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from rackloom.claim.domain.objects import ComputeDomain
from rackloom.prove.picture.workloads import ClaimSeen, PodSeen, TemplateSeen
from rackloom.topology.identity import GpuKey, SlotKey


class Layer(StrEnum):
    """Who was asked."""

    FABRIC = "fabric"
    """Switch controllers, through the newest reading of each that the site service has recorded."""
    SITE = "site"
    """The site service's own records: tenants, machines, instances, logical partitions."""
    CLUSTER = "cluster"
    """The Kubernetes API server."""
    TRANSFER = "transfer"
    """Records of measured transfers."""


class LayerSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a layer could be read."""

    layer: Layer
    at: float | None = None
    """When it was last read in full, seconds since the epoch; None: never."""
    unknown_since: float | None = None
    """Since when it cannot be read; None: it could, at `at`."""
    problem: str = ""
    fix: str = ""
    """A command that makes it readable, where that is known."""


class SilentController(msgspec.Struct, frozen=True):
    """A switch controller that does not answer."""

    url: str
    since: float
    chassis: tuple[str, ...]
    """Serials of the chassis for which it speaks, one at least."""


class DomainSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One NVLink domain, as its switch controllers were last read."""

    uuid: str
    endpoints: tuple[str, ...] = ()
    observed_at: float | None = None
    unknown_since: float | None = None
    """Since when its controllers do not answer, or contradict one another."""
    problem: str = ""
    silent: tuple[SilentController, ...] = ()
    """Those of its controllers that do not answer; another one's answer is enough."""
    chassis: frozenset[str] = frozenset()
    """Serials of the chassis for which any of its controllers speaks."""
    disputed: bool = False
    """Whether they answer, and contradict one another or those of another domain."""
    paused: bool = False
    default_policy: str = ""
    """What the site does with the factory's partition: keep, tray or none; empty: not known."""

    @property
    def answers(self) -> bool:
        """Whether what its controllers showed is how things are."""
        return self.observed_at is not None and self.unknown_since is None


class FabricGpu(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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
    """Id of the physical partition that holds it, unique within its domain; None: in none."""
    also: tuple[int, ...] = ()
    """Further partitions that list it too: a GPU belongs to at most one."""


class PartitionSeen(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One physical partition on a switch fabric."""

    domain: str
    id: int
    name: str
    healthy: bool | None
    problem: str = ""
    logical: str | None = None
    """UUID of the logical partition for which we made it; None: it is not ours."""
    default: bool = False
    """The factory's partition."""
    owner: str = ""
    """In the site's words: site, tray, default, released or foreign; empty: not known."""


class LostPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A partition that we made and saw, which the newest reading omits although nobody deleted it."""

    domain: str
    name: str
    logical: str
    seen_at: float
    """When it was last seen."""


class LogicalSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One logical partition in the site's records."""

    id: str
    name: str
    tenant: str
    vpc: str = ""
    status: str
    """As REST says it: Ready, Pending, Error, Unknown..."""
    since: float | None = None
    problem: str = ""


class MachineSeen(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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
    """What its health reports object to; empty: nothing."""
    cordoned: bool = False
    missing_since: float | None = None
    """Since when its controller lists no GPU of it."""
    instance: str | None = None
    held_since: float | None = None
    """When the instance was given it."""
    tenant: str | None = None
    vpc: str | None = None


class MovedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that an instance had in a place of its machine, until a switch controller listed it elsewhere."""

    machine: str
    module_id: int
    guid: int
    """64-bit fabric GUID."""
    since: float


class InstanceGpu(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One NVLink interface of an instance: the GPU and the logical partition that it was asked into."""

    instance: str
    machine: str
    module_id: int
    logical: str | None
    status: str
    since: float | None = None
    problem: str = ""
    fix: str = ""
    """What the newest plan named as the nearest fix."""


class NodeSeen(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One node of the cluster."""

    name: str
    ready: bool | None
    ready_since: float | None = None
    clique: str | None = None
    """Label nvidia.com/gpu.clique, `<clusterUUID>.<cliqueId>`; None: there is none."""
    clique_writer: str = ""
    """Who wrote it, as far as the object says."""
    clique_since: float | None = None
    """When that one last wrote any of what it owns, seconds since the epoch."""
    other_writers: tuple[str, ...] = ()
    """Further field managers that own the label."""
    taints: tuple[str, ...] = ()
    unschedulable: bool = False
    runtime: str | None = None
    """What runs its containers, such as containerd://2.0.1."""
    simulated: bool = False
    """It says of itself that it is no machine."""


class DeviceSeen(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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
    """What lies between the two, in nvidia-smi's letters: PIX, PXB, PHB, NODE, SYS."""
    link: str | None = None
    """Of a NIC: its state, as published."""
    gbps: int | None = None
    """Of a NIC: its line rate, Gb/s."""
    taints: tuple[str, ...] = ()


class PoolSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of devices that a driver publishes of a node, also when it has none in it."""

    driver: str
    name: str
    node: str


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One allocated device: which claim has it, and which pods use the claim."""

    driver: str
    pool: str
    device: str
    claim: str
    """namespace/name; empty: not for whoever looks."""
    pods: tuple[str, ...]
    """namespace/name each."""
    since: float | None = None
    """When the kubelet took the first of them; None: it does not say of each."""


class MeshSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The IMEX daemon of one node in one ComputeDomain (or, in channel mode, of one clique)."""

    node: str
    domain: str
    """UID of the ComputeDomain; empty for a clique's own long-lived IMEX domain."""
    clique: str | None
    complete: bool | None
    missing: tuple[str, ...] = ()


class TransferSeen(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The newest transfer that was measured from one GPU (or host)."""

    at: float
    node: str
    key: GpuKey = GpuKey()
    device: str
    """What carried it, such as mlx5_0:1."""
    gigabytes_per_second: float
    verdict: str
    """As the record says: holds, fails, unknown, or no promise (there was nothing to compare it with)."""
    reason: str = ""
    emulated: bool = False


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """All of a site, read at about one moment. Tuples are sorted by their names."""

    at: float
    layers: tuple[LayerSeen, ...]
    domains: tuple[DomainSeen, ...] = ()
    fabric_gpus: tuple[FabricGpu, ...] = ()
    partitions: tuple[PartitionSeen, ...] = ()
    lost_partitions: tuple[LostPartition, ...] = ()
    logicals: tuple[LogicalSeen, ...] = ()
    machines: tuple[MachineSeen, ...] = ()
    instance_gpus: tuple[InstanceGpu, ...] = ()
    moved_gpus: tuple[MovedGpu, ...] = ()
    nodes: tuple[NodeSeen, ...] = ()
    pools: tuple[PoolSeen, ...] = ()
    devices: tuple[DeviceSeen, ...] = ()
    uses: tuple[DeviceUse, ...] = ()
    compute_domains: tuple[ComputeDomain, ...] = ()
    meshes: tuple[MeshSeen, ...] = ()
    daemons_in: str = ""
    """Namespace of the pods whose word on IMEX counts; empty: the cluster was not asked."""
    transfers: tuple[TransferSeen, ...] = ()
    templates: tuple[TemplateSeen, ...] = ()
    claims: tuple[ClaimSeen, ...] = ()
    pods: tuple[PodSeen, ...] = ()
    """Those with claims that have not ended."""
    tenants: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Org of each tenant by its id."""
    vpcs: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Name of each VPC by its id."""
    namespaces: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Org of each namespace that is labelled with one: a cluster knows of tenants nothing else."""
    simulated: tuple[Layer, ...] = ()
    """Layers of which some or all is a simulation."""

    def layer(self, layer: Layer) -> LayerSeen | None:
        """Whether a layer was asked, and what came of it."""
        return next((one for one in self.layers if one.layer == layer), None)


class GpuChain(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One GPU through all layers; None where a layer does not know it, or was not read."""

    key: GpuKey
    """All that any layer knows of its identity."""
    machine: MachineSeen | None = None
    fabric: FabricGpu | None = None
    partition: PartitionSeen | None = None
    logical: LogicalSeen | None = None
    """That of its physical partition."""
    wanted: InstanceGpu | None = None
    """What its instance asked for."""
    node: NodeSeen | None = None
    device: DeviceSeen | None = None
    use: DeviceUse | None = None
    compute_domain: ComputeDomain | None = None
    channel: str | None = None
    """The IMEX channel of the pods that use it."""
    nics: tuple[DeviceSeen, ...] = ()
    """Those that serve it, first the one that its own plugin pairs it with."""
    transfer: TransferSeen | None = None
    conflicts: tuple[str, ...] = ()
    """Where two layers name different GPUs in one place, in words with both sides."""
