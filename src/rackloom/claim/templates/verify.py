"""Allocates a template on fresh nodes and looks at the topology of what it got.

Written against the topology, not against the plan: the groups that made the template are not asked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rackloom.claim.allocate.allocator import allocate
from rackloom.claim.allocate.objects import ResourceClaim, ResourceClaimTemplate
from rackloom.claim.allocate.outcome import Allocation, Fault, Refusal, Scope
from rackloom.claim.allocate.use import DeviceId
from rackloom.claim.templates.hardware import Hardware, Stock
from rackloom.claim.templates.places import near, rails
from rackloom.claim.templates.wish import Align, Wish
from rackloom.errors import Refused

Devices = tuple[tuple[int, ...], tuple[int, ...]]
"""Indices of the GPUs and of the NICs."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What the allocation on fresh nodes showed."""

    nodes: int
    """Nodes that can serve the template, with the alignment asked for."""
    of: int
    devices: tuple[Devices, ...]
    """Per kind of node that serves it: what the first such node gives."""


def verify(stock: Stock, hardware: Hardware, wish: Wish, template: ResourceClaimTemplate) -> Verified:
    """Refused unless nodes of `hardware` serve the template, and every node that does keeps the alignment."""
    claim = ResourceClaim(metadata=template.metadata, spec=template.spec.spec)
    serving: list[tuple[Hardware, Devices]] = []
    for kind in stock.kinds:
        pairs = _allocated(stock, kind, claim, required=kind is hardware)
        if pairs is None:
            continue
        broken = next(_misaligned(kind, wish, pairs), None)
        if broken is not None:
            raise Refused(f"on {kind.nodes[0].metadata.name} the template would give {broken}")
        serving.append((kind, _merged(pairs)))
    if wish.align is Align.RAIL and len({_rails(kind, nics) for kind, (_, nics) in serving}) > 1:
        raise Refused("nodes of different kinds would give different rails")
    return Verified(
        nodes=sum(len(kind.nodes) for kind, _ in serving),
        of=sum(len(kind.nodes) for kind in stock.kinds),
        devices=tuple(devices for _, devices in serving),
    )


def _allocated(stock: Stock, kind: Hardware, claim: ResourceClaim, *, required: bool) -> list[Devices] | None:
    """The devices of each pair of requests on a node of the kind; None where it cannot serve the claim."""
    outcome = allocate(kind.nodes[0], stock.classes, stock.index, [claim])
    if isinstance(outcome, Fault) and (required or outcome.scope is Scope.ATTEMPT):
        raise Refused(f"the template fails on {outcome.node}: {outcome.reason}")
    if isinstance(outcome, Refusal) and required:
        raise Refused(f"{outcome.node} cannot serve the template")
    return list(_pairs(kind, outcome)) if isinstance(outcome, Allocation) else None


def _pairs(kind: Hardware, outcome: Allocation) -> Iterator[Devices]:
    """`gpu-0` with `nic-0` and so on; without pairs, all GPUs with all NICs."""
    index = {one.id: number for devices in (kind.gpus, kind.nics) for number, one in enumerate(devices)}
    given: dict[str, list[int]] = {}
    for one in outcome.results[0].devices.results:
        given.setdefault(one.request, []).append(index[DeviceId(one.driver, one.pool, one.device)])
    for name, gpus in given.items():
        if name.startswith("gpu"):
            yield tuple(gpus), tuple(given["nic" + name.removeprefix("gpu")])


def _misaligned(kind: Hardware, wish: Wish, pairs: Sequence[Devices]) -> Iterator[str]:
    """What breaks the alignment, in words."""
    for gpus, nics in pairs:
        for nic in nics:
            if kind.machine.nics[nic].excluded is not None:
                yield f"{kind.nics[nic].id.device}, which must not carry data"
        table = [[near(kind.machine, wish.align, gpu, nic) for nic in nics] for gpu in gpus]
        if not _as_asked(wish, table):
            given = [kind.gpus[gpu].id.device for gpu in gpus] + [kind.nics[nic].id.device for nic in nics]
            state = "near" if wish.unaligned else "not near"
            yield f"{', '.join(given)}, which are {state} each other"


def _as_asked(wish: Wish, table: Sequence[Sequence[bool]]) -> bool:
    """All near (or, unaligned, none). On rails, each device needs one near it: they come one by one."""
    if wish.unaligned:
        return not any(map(any, table)) or (wish.align is Align.RAIL and not wish.pairs)
    if wish.align is Align.RAIL:
        return all(map(any, table)) and all(map(any, zip(*table, strict=True)))
    return all(map(all, table))


def _merged(pairs: Sequence[Devices]) -> Devices:
    return tuple(g for gpus, _ in pairs for g in gpus), tuple(n for _, nics in pairs for n in nics)


def _rails(kind: Hardware, nics: Sequence[int]) -> tuple[int, ...]:
    order = rails(kind)
    return tuple(order.index(nic) for nic in nics)
