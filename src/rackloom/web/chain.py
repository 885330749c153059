"""One GPU through all layers: the report of each layer, its age, and the wiring of the NICs.

The layers are site records, switch controller, Kubernetes and transfer record. Each `LayerReport` has the
time of its observation, the time since which it could not be read again, and named links. A link without a
name shows whether there is none or whether the viewer may not see it.

The wiring of a GPU and a NIC is the nearest thing that both hang from: the same PCIe root, the same NUMA
node, or neither. A GPU that is coupled to its processor (GB200) shares a PCIe root with no NIC, so the NUMA
node is the nearest one possible. This module does not decide what is wrong: the findings do.
"""

from collections.abc import Iterator, Mapping

import msgspec

from rackloom.core.diagnosis.checks.nics import are_apart
from rackloom.core.diagnosis.index import tray_nics
from rackloom.core.diagnosis.snapshot import DeviceId, DeviceRecord, GpuChain, Layer, PartitionRecord
from rackloom.topology.part_names import PartName, place_numbers
from rackloom.web.model import MapGpu, SiteMap

# The report of each layer.


_LAYER_NAMES = {
    Layer.FABRIC: "switch controller",
    Layer.SITE: "site records",
    Layer.CLUSTER: "Kubernetes",
    Layer.TRANSFER: "transfer record",
}


ChainLink = tuple[str, str | None, str]
"""The kind of the object, its name (None if there is none, or if it is hidden) and a note."""
NOT_SHOWN = "not shown"


class LayerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one layer about a GPU."""

    source: str
    at: float | None
    """When it was read, or None if it never was."""
    unknown_since: float | None = None
    """Since when it cannot be read."""
    links: tuple[ChainLink, ...]

    @property
    def current(self) -> bool:
        """Whether an object that is missing here is absent, not unknown."""
        return self.at is not None and self.unknown_since is None


def layer_reports(whole: SiteMap, gpu: MapGpu) -> tuple[LayerReport, ...]:
    """The report of each layer about a GPU, tenant first and transfer last. Empty for a hidden GPU."""
    chain = gpu.chain
    if chain is None:
        return ()
    trays = (tray for rack in whole.racks if rack.name == gpu.place.rack for tray in rack.trays)
    tray = [member.chain for tray in trays if gpu in tray for member in tray if member.chain is not None]
    links = {
        Layer.SITE: _by_site(whole, chain),
        Layer.FABRIC: _by_fabric(chain, whole.operator),
        Layer.CLUSTER: _by_cluster(chain, tray_nics(tray, gpu.place.name.tray)),
        Layer.TRANSFER: _by_transfer(chain),
    }
    return tuple(_layer_report(whole, gpu, layer, tuple(found)) for layer, found in links.items())


def _layer_report(whole: SiteMap, gpu: MapGpu, layer: Layer, links: tuple[ChainLink, ...]) -> LayerReport:
    at, since = _read_at(whole, gpu, layer)
    return LayerReport(source=_LAYER_NAMES[layer], at=at, unknown_since=since, links=links)


def _by_site(whole: SiteMap, chain: GpuChain) -> Iterator[ChainLink]:
    if machine := chain.machine:
        yield "Tenant", machine.tenant and whole.tenants.get(machine.tenant, machine.tenant), ""
        yield "VPC", machine.vpc and whole.vpcs.get(machine.vpc, machine.vpc), ""
        yield "Instance", machine.instance, ""
        yield "Machine", machine.id, machine.health or machine.status
    else:
        yield "Machine", None, ""
    if wanted := chain.wanted:
        yield "Asked into", wanted.logical or "no partition", _joined(wanted.status, wanted.problem)
    if logical := chain.logical:
        yield "Logical partition", logical.name, _joined(logical.status, logical.problem)
    else:
        yield "Logical partition", None, _partition_note_hidden(chain)


def _by_fabric(chain: GpuChain, for_operator: bool) -> Iterator[ChainLink]:
    partition, gpu = chain.partition, chain.fabric
    if partition:
        yield "Partition", f"{partition.name} ({partition.id})", _partition_note(partition)
    else:
        yield "Partition", None, _partition_note_hidden(chain)
    note = _joined(_health_text(gpu.healthy), gpu.problem) if gpu else ""
    yield "Fabric GPU", f"{gpu.guid:#018x}" if gpu else None, note
    # A tenant has no use for the chassis of its provider.
    if gpu is not None and for_operator:
        yield "Place", place_numbers(gpu.place), ""


def _by_cluster(chain: GpuChain, names: Mapping[DeviceId, PartName]) -> Iterator[ChainLink]:
    node, use, domain = chain.node, chain.use, chain.compute_domain
    yield "GPU", chain.key.gpu_uuid.value if chain.key.gpu_uuid else None, ""
    yield "Clique", clique_of(chain), ""
    yield "Node", node.name if node else None, _joined(_READY_TEXT[node.ready], *node.taints) if node else ""
    hidden = NOT_SHOWN if use_hidden(chain) else ""
    yield "Claim", use.claim if use else None, hidden
    yield "Pod", ", ".join(use.pods) if use else None, hidden
    yield "ComputeDomain", domain.key if domain else None, domain.status.status.value if domain else hidden
    yield "Channel", chain.channel, hidden
    for nic in chain.nics:
        yield "NIC", str(names[nic.device_id]), _joined(nic.name, _nic_note(chain, nic))
    if not chain.nics:
        yield "NIC", None, ""


def _read_at(whole: SiteMap, gpu: MapGpu, layer: Layer) -> tuple[float | None, float | None]:
    """The time of a layer's reading, and since when it is unknown. For the fabric, of this GPU's domain."""
    status = whole.layer(layer)
    if layer is Layer.TRANSFER and gpu.chain is not None and gpu.chain.transfer is not None:
        return gpu.chain.transfer.at, status.unknown_since
    if layer is not Layer.FABRIC:
        return status.at, status.unknown_since
    domain = whole.domains.get(gpu.domain)
    if domain is None:
        # If the domain has no controller, the reading times of other domains are no evidence.
        return None, status.unknown_since
    return domain.observed_at, domain.unknown_since if status.unknown_since is None else status.unknown_since


def partition_hidden(chain: GpuChain) -> bool:
    """Whether a GPU is in a partition that is hidden from the viewer."""
    return chain.partition is None and chain.fabric is not None and chain.fabric.partition is not None


def use_hidden(chain: GpuChain) -> bool:
    """Whether a GPU is used by pods that are hidden from the viewer."""
    return chain.use is not None and not chain.use.claim


def _partition_note_hidden(chain: GpuChain) -> str:
    return NOT_SHOWN if partition_hidden(chain) else ""


def _partition_note(partition: PartitionRecord) -> str:
    return _joined(_OWNER_TEXT.get(partition.owner, ""), _health_text(partition.healthy), partition.problem)


_OWNER_TEXT = {
    "default": "the factory's",
    "foreign": "made by nobody we know",
    "released": "given up, and not yet gone",
    "tray": "keeps a tray that nobody was given to itself",
}


def _health_text(healthy: bool | None) -> str:
    return {True: "healthy", False: "unhealthy", None: "health unknown"}[healthy]


_READY_TEXT = {True: "ready", False: "not ready", None: "readiness unknown"}


def clique_of(chain: GpuChain) -> str | None:
    """The clique of a GPU: its device's, else its node's label."""
    return (chain.device.clique if chain.device else None) or (chain.node.clique if chain.node else None)


def _nic_note(chain: GpuChain, nic: DeviceRecord) -> str:
    near = "" if chain.device is None else _nic_position(chain.device, nic)
    link = "" if nic.link is None else f"link {nic.link}"
    return _joined(near, link, "" if nic.gbps is None else f"{nic.gbps} Gb/s")


def _nic_position(gpu: DeviceRecord, nic: DeviceRecord) -> str:
    """The nearest thing from which both hang, as their plugins published it."""
    if are_apart(gpu.numa, nic.numa, (gpu.partner_class, nic.partner_class)):
        return "at another NUMA node than the GPU"
    if gpu.pcie_root is not None and gpu.pcie_root == nic.pcie_root:
        return "below the GPU's own PCIe root"
    return "alignment unknown" if gpu.numa is None or nic.numa is None else "at the GPU's own NUMA node"


def _joined(*words: str) -> str:
    return ", ".join(word for word in words if word)


def _by_transfer(chain: GpuChain) -> Iterator[ChainLink]:
    if last := chain.transfer:
        value = f"{last.gigabytes_per_second:.1f} GB/s by {last.device}"
        yield "Last transfer", value, _joined(last.verdict, "emulated" if last.emulated else "", last.reason)
    else:
        yield "Last transfer", None, ""
