"""One GPU through all layers, as people read it: what, who says so, and when that was seen."""

from collections.abc import Iterator

import msgspec

from rackloom.prove.doctor.checks.nics import LINK_UNTOLD
from rackloom.prove.doctor.checks.view import around
from rackloom.prove.doctor.findings import Finding
from rackloom.prove.picture.values import DeviceSeen, DomainSeen, GpuChain, Layer, LayerSeen, PartitionSeen
from rackloom.web.scene import Scene, Seat
from rackloom.web.wiring import Wiring, fastest, link_trouble, link_untold, wiring

_WHO = {
    Layer.FABRIC: "switch controller",
    Layer.SITE: "site records",
    Layer.CLUSTER: "Kubernetes",
    Layer.TRANSFER: "transfer record",
}


Link = tuple[str, str | None, str]
"""What it is, its name (None: there is none, or none to be shown) and what to know of it."""
NOT_SHOWN = "not shown"


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What one layer says of a GPU."""

    who: str
    at: float | None
    """When it was seen; None: never."""
    unknown_since: float | None = None
    """Since when it could not be read again."""
    problem: str = ""
    """Why not."""
    links: tuple[Link, ...]

    @property
    def current(self) -> bool:
        """Whether what is missing here is absent, rather than unknown."""
        return self.at is not None and self.unknown_since is None


def said(whole: Scene, seat: Seat) -> tuple[Said, ...]:
    """The chain of a seat, tenant first and transfer last. Empty for somebody else's GPU."""
    chain = seat.chain
    if chain is None:
        return ()
    links = {
        Layer.SITE: _by_site(whole, chain),
        Layer.FABRIC: _by_fabric(chain),
        Layer.CLUSTER: _by_cluster(chain, fastest(_in_tray(whole, seat))),
        Layer.TRANSFER: _by_transfer(chain),
    }
    return tuple(_said(whole, seat, layer, tuple(told)) for layer, told in links.items())


def _in_tray(whole: Scene, seat: Seat) -> Iterator[GpuChain]:
    """What is shown of the GPUs beside a seat, and of its own."""
    trays = (tray for rack in whole.racks if rack.name == seat.place.rack for tray in rack.trays)
    return (one.chain for tray in trays if seat in tray for one in tray if one.chain is not None)


def objections(whole: Scene, seat: Seat) -> tuple[Finding, ...]:
    """What the doctor objects to that concerns a seat's GPU, the worst first; a tenant is told of none."""
    here = frozenset() if seat.chain is None else frozenset(around((seat.chain,)))
    return tuple(one for one in whole.findings or () if not here.isdisjoint(one.where))


def _said(whole: Scene, seat: Seat, layer: Layer, links: tuple[Link, ...]) -> Said:
    at, since = _seen(whole, seat, layer)
    problem = "" if since is None else _problem(whole, seat, layer)
    return Said(who=_WHO[layer], at=at, unknown_since=since, problem=problem, links=links)


def _problem(whole: Scene, seat: Seat, layer: Layer) -> str:
    domain = whole.domains.get(seat.domain) if layer is Layer.FABRIC else None
    return whole.layer(layer).problem or (domain.problem if domain is not None else "")


def _by_site(whole: Scene, chain: GpuChain) -> Iterator[Link]:
    if machine := chain.machine:
        yield "Tenant", machine.tenant and whole.tenants.get(machine.tenant, machine.tenant), ""
        yield "VPC", machine.vpc and whole.vpcs.get(machine.vpc, machine.vpc), ""
        yield "Instance", machine.instance, ""
        yield "Machine", machine.id, machine.health or machine.status
    else:
        yield "Machine", None, ""
    if wanted := chain.wanted:
        yield "Asked into", wanted.logical or "no partition", _both(wanted.status, wanted.problem)
    if logical := chain.logical:
        yield "Logical partition", logical.name, _both(logical.status, logical.problem)
    else:
        yield "Logical partition", None, _unshown(chain)


def _by_fabric(chain: GpuChain) -> Iterator[Link]:
    partition, gpu = chain.partition, chain.fabric
    if partition:
        yield "Partition", f"{partition.name} ({partition.id})", _partition_note(partition)
    else:
        yield "Partition", None, _unshown(chain)
    note = _both(_health(gpu.healthy), gpu.problem) if gpu else ""
    yield "Fabric GPU", f"{gpu.guid:#018x}" if gpu else None, note


def _by_cluster(chain: GpuChain, siblings: int) -> Iterator[Link]:
    node, use, domain = chain.node, chain.use, chain.compute_domain
    yield "GPU", chain.key.gpu_uuid.value if chain.key.gpu_uuid else None, ""
    yield "Clique", clique(chain), ""
    yield "Node", node.name if node else None, _both(_READY[node.ready], *node.taints) if node else ""
    hidden = NOT_SHOWN if use_hidden(chain) else ""
    yield "Claim", use.claim if use else None, hidden
    yield "Pod", ", ".join(use.pods) if use else None, hidden
    yield "ComputeDomain", domain.key if domain else None, domain.status.status.value if domain else hidden
    yield "Channel", chain.channel, hidden
    for nic in chain.nics:
        yield "NIC", nic.name, _nic_note(chain, nic, siblings)
    if not chain.nics:
        yield "NIC", None, ""


def _seen(whole: Scene, seat: Seat, layer: Layer) -> tuple[float | None, float | None]:
    """When a layer was read; of the fabric, when this domain was, and of transfers when it was measured."""
    seen = whole.layer(layer)
    if layer is Layer.TRANSFER and seat.chain is not None and seat.chain.transfer is not None:
        return seat.chain.transfer.at, seen.unknown_since
    if layer is Layer.FABRIC:
        return _fabric_seen(seen, whole.domains.get(seat.domain))
    return seen.at, seen.unknown_since


def _fabric_seen(layer: LayerSeen, domain: DomainSeen | None) -> tuple[float | None, float | None]:
    """Of a domain that nobody speaks for, the time of the others tells nothing."""
    if domain is None:
        return None, layer.unknown_since
    return domain.observed_at, domain.unknown_since if layer.unknown_since is None else layer.unknown_since


def partition_hidden(chain: GpuChain) -> bool:
    """Whether a GPU is in a partition of which the viewer is told nothing, being somebody else's."""
    return chain.partition is None and chain.fabric is not None and chain.fabric.partition is not None


def use_hidden(chain: GpuChain) -> bool:
    """Whether a GPU is used by pods of which the viewer is told nothing, as they may be somebody else's."""
    return chain.use is not None and not chain.use.claim


def _unshown(chain: GpuChain) -> str:
    return NOT_SHOWN if partition_hidden(chain) else ""


def _partition_note(partition: PartitionSeen) -> str:
    return _both(_OWNERS.get(partition.owner, ""), _health(partition.healthy), partition.problem)


_OWNERS = {
    "default": "the factory's",
    "foreign": "made by nobody we know",
    "released": "given up, and not yet gone",
    "tray": "keeps a tray that nobody was given to itself",
}


def _health(healthy: bool | None) -> str:
    return {True: "healthy", False: "unhealthy", None: "health unknown"}[healthy]


_READY = {True: "ready", False: "not ready", None: "readiness unknown"}


def clique(chain: GpuChain) -> str | None:
    """The clique of a GPU, as its own device says before its node's label does."""
    return (chain.device.clique if chain.device else None) or (chain.node.clique if chain.node else None)


def _nic_note(chain: GpuChain, nic: DeviceSeen, siblings: int) -> str:
    near = "" if chain.device is None else _WIRED[wiring(chain.device, nic)]
    return _both(near, link_trouble(nic, siblings) or (LINK_UNTOLD if link_untold(nic) else ""))


_WIRED = {
    Wiring.ROOT: "below the GPU's own PCIe root",
    Wiring.NUMA: "at the GPU's own NUMA node",
    Wiring.APART: "at another NUMA node than the GPU",
    Wiring.UNKNOWN: "alignment unknown",
}


def _both(*words: str) -> str:
    return ", ".join(word for word in words if word)


def _by_transfer(chain: GpuChain) -> Iterator[Link]:
    if seen := chain.transfer:
        value = f"{seen.gigabytes_per_second:.1f} GB/s by {seen.device}"
        yield "Last transfer", value, _both(seen.verdict, "emulated" if seen.emulated else "", seen.reason)
    else:
        yield "Last transfer", None, ""
