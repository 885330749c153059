"""Generates a ResourceClaimTemplate for a request, and verifies it by allocation.

For each node type, most frequent first, until one succeeds:

1. Choose the pairs of GPU and NIC requests (`layout`).
2. Write a selector for the devices of each request: the fewest shared traits that select just them,
   or else a list of identifiers. Attributes are read through `.?` with a default, so that a device without
   the attribute is left out and is not an error, which would stop the pod on every node.
3. If an attribute has one value per affinity group, use matchAttribute instead of naming devices.
4. Allocate the template on a fresh node of every type. Each type that serves it must keep the
   alignment. This check reads the topology, not the layout.

A refusal carries the nearest fix that was tried and works: an option that gives other hardware, the
same request in pairs, other rails, fewer devices, or another alignment.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from rackloom.core.allocate.cel import compiler, errors
from rackloom.core.allocate.driver_slices import GPU_DRIVER, NUMA_NODE, PCIE_ROOT
from rackloom.core.allocate.eligibility import CandidateDevice
from rackloom.core.allocate.inputs import DeviceId
from rackloom.core.allocate.objects import (
    CelSelector,
    DeviceClaim,
    DeviceConstraint,
    DeviceRequest,
    DeviceSelector,
    ExactDeviceRequest,
    ObjectMeta,
    ResourceClaim,
    ResourceClaimSpec,
    ResourceClaimTemplate,
    ResourceClaimTemplateSpec,
)
from rackloom.core.allocate.outcome import Allocation, Fault, FaultScope, Refusal
from rackloom.core.allocate.templates import inventory
from rackloom.core.allocate.templates.inventory import (
    RDMA,
    HardwareInventory,
    NodeType,
    Scalar,
    scalar_attribute,
)
from rackloom.core.allocate.templates.layout import (
    AffinityGroup,
    Align,
    RequestPair,
    TemplateRequest,
    affinity_groups,
    is_near,
    nics_by_rail,
    request_pairs,
    require_servable,
)
from rackloom.errors import Refused

# Selectors that pick out given devices.


@dataclass(frozen=True, slots=True)
class ChosenSelector:
    """How a set of devices is distinguished from the others."""

    expression: str | None
    """None if all devices of the class will do."""
    by: tuple[str, ...]
    """The attributes that it reads."""


def selector_by_traits(
    wanted: Sequence[CandidateDevice], among: Sequence[CandidateDevice], traits: Sequence[str]
) -> ChosenSelector | None:
    """The fewest of `traits` that `wanted` share and that select just them. RDMA is kept in any case."""
    shared: dict[str, Scalar] = {}
    for name in traits:
        # Values count with their type: 1 and True are equal in Python and not in CEL.
        values = {(type(value), value) for value in (scalar_attribute(device, name) for device in wanted)}
        value = values.pop()[1] if len(values) == 1 else None
        if value is not None:
            shared[name] = value
    if not _selects_exactly(shared, wanted, among):
        return None
    # Leave out one trait after the other, the last first, for as long as the rest selects the same devices.
    for name in reversed(list(shared)):
        rest = {trait: value for trait, value in shared.items() if trait != name}
        if shared.get(RDMA) is True and name == RDMA:
            continue
        shared = rest if _selects_exactly(rest, wanted, among) else shared
    tests = [_equality_test(name, value) for name, value in shared.items()]
    return ChosenSelector(" && ".join(tests) or None, tuple(shared))


def selector_by_ids(
    wanted: Sequence[CandidateDevice], among: Sequence[CandidateDevice], names: Sequence[str]
) -> ChosenSelector | None:
    """A list of the values of the first of `names` that all of `wanted` publish and no others share."""
    for name in names:
        values = [scalar_attribute(device, name) for device in wanted]
        if not all(isinstance(value, str) for value in values):
            continue
        one_of = f"== {json.dumps(values[0])}" if len(values) == 1 else f"in {json.dumps(values)}"
        expression = f'{attribute_access(name)}.orValue("") {one_of}'
        if _selects(expression, wanted, among):
            return ChosenSelector(expression, (name,))
    return None


def _selects_exactly(
    traits: dict[str, Scalar], wanted: Sequence[CandidateDevice], among: Sequence[CandidateDevice]
) -> bool:
    expression = " && ".join(_equality_test(name, value) for name, value in traits.items())
    return _selects(expression or "true", wanted, among)


def _selects(expression: str, wanted: Sequence[CandidateDevice], among: Sequence[CandidateDevice]) -> bool:
    program = compiler.compile_selector(expression)
    return {unit.id for unit in among if program.matches(unit.view)} == {unit.id for unit in wanted}


def _equality_test(name: str, value: Scalar) -> str:
    """Compare the attribute with `value`. A missing one reads as a default of its type that never occurs."""
    absent = {bool: "false", int: "-1", str: '""'}[type(value)]
    return f"{attribute_access(name)}.orValue({absent}) == {json.dumps(value)}"


def attribute_access(name: str) -> str:
    """How a selector reads an attribute that a device may lack."""
    domain, _, identifier = name.partition("/")
    return f'device.attributes["{domain}"].?{identifier}'


# The template of one node type.


_MATCH_ATTRIBUTES = {Align.NUMA: NUMA_NODE, Align.PCIE: PCIE_ROOT}


class TemplateDraft:
    """The template of a request for one node type, and how its selectors were chosen. May be refused."""

    def __init__(
        self,
        stock: HardwareInventory,
        hardware: NodeType,
        asked: TemplateRequest,
        groups: Sequence[RequestPair],
    ) -> None:
        self._stock = stock
        self._hardware = hardware
        self._asked = asked
        self.notes: dict[str, list[str]] = {}
        """How devices are selected and by which source, with the requests or constraints selected so."""
        found = () if asked.unaligned else affinity_groups(hardware, asked.align)
        self._matching = matching_attribute(hardware, asked.align, found)
        if self._matching:
            gpus = tuple(chain.from_iterable(affinity.gpus for affinity in found))
            nics = tuple(chain.from_iterable(affinity.nics for affinity in found))
            groups = [
                RequestPair(group.gpu_count, group.nic_count, gpus, nics, group.affinity) for group in groups
            ]
        endings = [f"-{number}" for number in range(len(groups))] if asked.pairs else [""]
        self._names = [(f"gpu{ending}", f"nic{ending}") for ending in endings]
        requests = list(chain.from_iterable(map(self._device_requests, self._names, groups)))
        constraints: list[DeviceConstraint] = []
        for names in self._names if self._matching else ():
            both = f"one {self._matching}, which both drivers publish"
            self.notes.setdefault(both, []).append(" with ".join(names))
            constraints.append(DeviceConstraint(requests=names, match_attribute=self._matching))
        devices = DeviceClaim(requests=tuple(requests), constraints=tuple(constraints))
        self.template = ResourceClaimTemplate(
            metadata=ObjectMeta(name=asked.title),
            spec=ResourceClaimTemplateSpec(spec=ResourceClaimSpec(devices=devices)),
        )

    def _device_requests(self, names: tuple[str, str], group: RequestPair) -> Iterator[DeviceRequest]:
        # A rail is a name, not a property: traits that single out a NIC here may match another one elsewhere.
        by_name = self._asked.align is Align.RAIL
        wanted = [self._hardware.gpus[index] for index in group.gpus]
        gpu_traits = () if by_name else inventory.GPU_TRAITS
        selector = _choose_selector(wanted, self._hardware.gpus, gpu_traits, inventory.GPU_IDS)
        yield self._device_request(names[0], group.gpu_count, wanted, selector, group)
        wanted = [self._hardware.nics[index] for index in group.nics]
        nic_traits = () if by_name else inventory.NIC_TRAITS
        selector = _choose_selector(wanted, self._hardware.nics, nic_traits, inventory.NIC_IDS)
        yield self._device_request(names[1], group.nic_count, wanted, selector, group)

    def _device_request(
        self,
        name: str,
        count: int,
        wanted: Sequence[CandidateDevice],
        selector: ChosenSelector | None,
        group: RequestPair,
    ) -> DeviceRequest:
        kind = "GPU" if wanted[0].id.driver == GPU_DRIVER else "NIC"
        if selector is None:
            lacking = ", ".join(inventory.GPU_IDS[:1] if kind == "GPU" else inventory.NIC_IDS[:3])
            where = "" if self._matching else f" of {group.affinity.title}"
            raise Refused(
                f"the {kind}s{where} cannot be selected on {self._hardware.machine.name}: their driver "
                f"publishes nothing that tells them from the others ({lacking})"
            )
        self.notes.setdefault(self._note(kind, wanted, selector, group), []).append(name)
        cel = CelSelector(expression=selector.expression) if selector.expression else None
        # The first class that all of the devices belong to. A class without selectors holds every device, so
        # it does not count.
        for klass in self._stock.classes:
            tests = [part.cel.expression for part in klass.spec.selectors if part.cel]
            if tests and all(_matches(test, device) for test in tests for device in wanted):
                break
        else:
            raise Refused(f"no device class holds the devices of {wanted[0].id.driver}")
        return DeviceRequest(
            name=name,
            exactly=ExactDeviceRequest(
                device_class_name=klass.metadata.name,
                selectors=(DeviceSelector(cel=cel),) if cel else (),
                allocation_mode="ExactCount",
                count=count,
            ),
        )

    def _note(
        self, kind: str, wanted: Sequence[CandidateDevice], selector: ChosenSelector, group: RequestPair
    ) -> str:
        by = f"by {', '.join(selector.by)}" if selector.by else "by class alone"
        out_of = f"out of {len(wanted)} {kind}{'' if len(wanted) == 1 else 's'}, {by}"
        if self._matching:
            return f"{out_of}; wherever they are"
        if self._asked.unaligned and kind == "NIC":
            return f"{out_of}; not near the GPUs, as asked"
        return f"{out_of}; {group.affinity.title} (source: {group.affinity.source})"


def matching_attribute(hardware: NodeType, align: Align, found: Sequence[AffinityGroup]) -> str | None:
    """The attribute with one value per affinity group, which all its devices share and no other group has."""
    name = _MATCH_ATTRIBUTES.get(align)
    if name is None or not found:
        return None
    values = [
        {
            inventory.scalar_attribute(device, name)
            for device in chain(
                (hardware.gpus[g] for g in group.gpus), (hardware.nics[n] for n in group.nics)
            )
        }
        for group in found
    ]
    published = all(len(of) == 1 and None not in of for of in values)
    return name if published and max(Counter(chain.from_iterable(values)).values()) == 1 else None


def _choose_selector(
    wanted: Sequence[CandidateDevice],
    among: Sequence[CandidateDevice],
    traits: Sequence[str],
    names: Sequence[str],
) -> ChosenSelector | None:
    by_traits = selector_by_traits(wanted, among, traits) if traits else None
    return by_traits or selector_by_ids(wanted, among, names)


def _matches(expression: str, device: CandidateDevice) -> bool:
    try:
        return compiler.compile_selector(expression).matches(device.view)
    except (errors.CompileError, errors.EvaluationError):
        return False


# Verification by allocation.


DevicePair = tuple[tuple[int, ...], tuple[int, ...]]
"""Indices of the GPUs and of the NICs."""


@dataclass(frozen=True, slots=True)
class TemplateVerification:
    """The result of the allocation on fresh nodes."""

    nodes: int
    """Nodes that can serve the template, with the requested alignment."""
    of: int
    devices: tuple[DevicePair, ...]
    """The devices that the first node of each kind gives, for the kinds that serve it."""


def verify_template(
    stock: HardwareInventory, hardware: NodeType, asked: TemplateRequest, template: ResourceClaimTemplate
) -> TemplateVerification:
    """Raises Refused unless nodes of `hardware` serve the template, and all of these keep the alignment."""
    claim = ResourceClaim(metadata=template.metadata, spec=template.spec.spec)
    serving: list[tuple[NodeType, DevicePair]] = []
    rails: set[tuple[int, ...]] = set()
    for kind in stock.kinds:
        outcome = stock.fleet.answer_on(kind.nodes[0].metadata.name, [claim])
        # The kind that the template is for has to serve it. A fault of the attempt would stop every pod.
        required = kind is hardware
        if isinstance(outcome, Fault) and (required or outcome.scope is FaultScope.ATTEMPT):
            raise Refused(f"the template fails on {outcome.node}: {outcome.reason}")
        if isinstance(outcome, Refusal) and required:
            raise Refused(f"{outcome.node} cannot serve the template")
        if not isinstance(outcome, Allocation):
            continue
        pairs = list(_device_pairs(kind, outcome))
        broken = next(_alignment_violations(kind, asked, pairs), None)
        if broken is not None:
            raise Refused(f"on {kind.nodes[0].metadata.name} the template would give {broken}")
        gpus = tuple(chain.from_iterable(gpus for gpus, _ in pairs))
        nics = tuple(chain.from_iterable(nics for _, nics in pairs))
        serving.append((kind, (gpus, nics)))
        if asked.align is Align.RAIL:
            order = nics_by_rail(kind)
            rails.add(tuple(map(order.index, nics)))
    if len(rails) > 1:
        raise Refused("nodes of different kinds would give different rails")
    return TemplateVerification(
        nodes=sum(len(kind.nodes) for kind, _ in serving),
        of=sum(len(kind.nodes) for kind in stock.kinds),
        devices=tuple(devices for _, devices in serving),
    )


def _device_pairs(kind: NodeType, outcome: Allocation) -> Iterator[DevicePair]:
    """`gpu-0` with `nic-0` and so on. Without pairs, all GPUs with all NICs."""
    index = {device.id: number for devices in (kind.gpus, kind.nics) for number, device in enumerate(devices)}
    given: dict[str, list[int]] = {}
    for result in outcome.results[0].devices.results:
        given.setdefault(result.request, []).append(index[DeviceId.of(result)])
    for name, gpus in given.items():
        if name.startswith("gpu"):
            yield tuple(gpus), tuple(given["nic" + name.removeprefix("gpu")])


def _alignment_violations(
    kind: NodeType, asked: TemplateRequest, pairs: Sequence[DevicePair]
) -> Iterator[str]:
    """Each violation of the alignment, in words."""
    for gpus, nics in pairs:
        for nic in nics:
            if kind.machine.nics[nic].excluded is not None:
                yield f"{kind.nics[nic].id.device}, which must not carry data"
        table = [[is_near(kind.machine, asked.align, gpu, nic) for nic in nics] for gpu in gpus]
        if not _alignment_holds(asked, table):
            given = [kind.gpus[gpu].id.device for gpu in gpus] + [kind.nics[nic].id.device for nic in nics]
            state = "near" if asked.unaligned else "not near"
            yield f"{', '.join(given)}, which are {state} each other"


def _alignment_holds(asked: TemplateRequest, table: Sequence[Sequence[bool]]) -> bool:
    """All near (or, unaligned, none). On rails, each device needs one near it: they come one by one."""
    if asked.unaligned:
        return not any(map(any, table)) or (asked.align is Align.RAIL and not asked.pairs)
    if asked.align is Align.RAIL:
        return all(map(any, table)) and all(map(any, zip(*table, strict=True)))
    return all(map(all, table))


# Generation, and the nearest fix of a refusal.


@dataclass(frozen=True, slots=True)
class GeneratedTemplate:
    """A template that was verified."""

    template: ResourceClaimTemplate
    notes: tuple[str, ...]
    """The machine that it is for, the choice and source of its selectors, and the result of the check."""
    verified: TemplateVerification


AlternativeInventory = tuple[str, Callable[[], HardwareInventory]]
"""An option that the user could add, and the stock that it would give."""


def generate_template(
    asked: TemplateRequest, stock: HardwareInventory, *, elsewhere: Iterable[AlternativeInventory] = ()
) -> GeneratedTemplate:
    """A template that serves the request. Raises Refused, with a tried fix if there is one."""
    require_servable(asked)
    if not stock.kinds:
        raise Refused("no slice names a node", nearest_fix="pass the slices of the GPU and NIC drivers")
    try:
        return _attempt(asked, stock)
    except Refused as refused:
        if refused.nearest_fix is not None:
            raise
        fix = _nearest_fix(asked, stock, elsewhere)
        none = "" if fix else "; neither fewer devices nor another alignment helps"
        raise Refused(refused.reason + none, nearest_fix=fix) from None


def _attempt(asked: TemplateRequest, stock: HardwareInventory) -> GeneratedTemplate:
    """The template of the first kind of node that can. Raises Refused for the most frequent kind's reason."""
    reasons: list[Refused] = []
    for kind in stock.kinds:
        try:
            draft = TemplateDraft(stock, kind, asked, request_pairs(kind, asked))
            verified = verify_template(stock, kind, asked, draft.template)
            notes = tuple(_template_notes(asked, stock, kind, draft, verified))
            return GeneratedTemplate(draft.template, notes, verified)
        except Refused as refused:
            reasons.append(refused)
    raise reasons[0]


def _template_notes(
    asked: TemplateRequest,
    stock: HardwareInventory,
    kind: NodeType,
    draft: TemplateDraft,
    verified: TemplateVerification,
) -> Iterator[str]:
    machine = kind.machine
    aligned = "NICs far from the GPUs" if asked.unaligned else "aligned"
    yield f"{asked.gpus} GPUs and {asked.nics} NICs, {aligned} ({asked.align}), for {machine.name}."
    yield f"Made from {stock.source} with: {asked.flags}"
    yield from (f"{', '.join(names)}: {note}" for note, names in draft.notes.items())
    if asked.align is Align.RAIL:
        order = nics_by_rail(kind)
        taken = ", ".join(str(order.index(nic)) for nic in verified.devices[0][1])
        yield f"rails {taken} of {len(order)} (NICs in the order of their addresses or names)"
    for nic in machine.nics:
        if nic.excluded is not None:
            yield f"left out: {kind.nics[nic.index].id.device} ({nic.excluded})"
    yield f"Verified by allocation: free, {verified.nodes} of {verified.of} nodes serve it, aligned as said."


def _nearest_fix(
    asked: TemplateRequest, stock: HardwareInventory, elsewhere: Iterable[AlternativeInventory]
) -> str | None:
    """The nearest change that was tried and works."""
    for flag, inventory_with in elsewhere:
        if _can_be_generated(asked, inventory_with()):
            return f"add {flag}"
    for near in _nearby_requests(asked):
        if _can_be_generated(near, stock):
            return f"ask for {near.flags}"
    return None


def _can_be_generated(asked: TemplateRequest, stock: HardwareInventory) -> bool:
    try:
        require_servable(asked)
        _attempt(asked, stock)
    except Refused:
        return False
    return True


def _nearby_requests(asked: TemplateRequest) -> Iterator[TemplateRequest]:
    """Changed requests, nearest first: in pairs, any rail, fewer devices, another alignment, aligned."""
    change = msgspec.structs.replace
    for align in dict.fromkeys((asked.align, *Align)):
        kept = asked.rails if align is Align.RAIL else ()
        same = change(asked, align=align, rails=kept)
        yield same
        yield change(same, pairs=True)
        yield change(same, rails=())
        for units in range(asked.units - 1, 0, -1):
            gpus, nics = (count * units // asked.units for count in (asked.gpus, asked.nics))
            yield change(same, gpus=gpus, nics=nics, rails=())
            yield change(same, gpus=gpus, nics=nics, rails=(), pairs=True)
        yield change(same, gpus=1, nics=1, rails=())
    if asked.unaligned:
        yield from _nearby_requests(change(asked, unaligned=False))
