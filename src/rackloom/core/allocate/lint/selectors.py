"""Lint rules for one selector, judged by running it on the devices that it will meet.

A `LintContext` holds these devices: those of given nodes, or typical ones if no nodes are given.
Only with given nodes does a missing attribute prove that nothing publishes it. A machine profile may
just not know it.

The rules are in this order. A finding of the first three ends the check:

1. It compiles.
2. It is not constant. The truth of an expression that only compares attributes with literals depends on
   how each attribute relates to each literal: equal, just below, just above, other or absent.
   `constant_truth` tries all combinations, and does not judge expressions with other functions or more
   than 4096 combinations.
3. It checks the driver before it reads that driver's attributes.
4. Attributes that it reads are published.
5. It has an answer for every device: an evaluation error stops the pod on every node.
6. PCI addresses and UUIDs in it exist on the nodes.
7. It is true for some device, if nothing else was found. This rule and rule 6 need given nodes.

Rules 1, 3, 4, 5 and 6 hold for the expression of a derived attribute too.

A `LintFinding` names the rule, the field, the reason and the fix.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import cached_property
from itertools import islice, product

import msgspec

from rackloom.core.allocate.cel import compiler, derived, environment, errors
from rackloom.core.allocate.cel.compiler import Read
from rackloom.core.allocate.cel.parse import parse_expression
from rackloom.core.allocate.cel.syntax import Call, CelNode, Const, Fold, children
from rackloom.core.allocate.driver_slices import (
    GPU_DRIVER,
    NIC_DRIVER,
    attributes_always_published,
    typical_slices,
)
from rackloom.core.allocate.eligibility import CandidateDevice
from rackloom.core.allocate.inputs import DeviceId
from rackloom.core.allocate.objects import DeviceAttribute, DeviceClass, DeviceSelector, ResourceClaim
from rackloom.core.allocate.outcome import Allocation, Outcome
from rackloom.core.allocate.templates.generate import attribute_access
from rackloom.core.allocate.templates.inventory import HardwareInventory, fleet_of, inventory_of_slices

# Findings.


FieldPath = tuple[str | int, ...]


class LintRule(StrEnum):
    """The kinds of traps. The command line prints the values."""

    DOES_NOT_COMPILE = "does-not-compile"
    CONSTANT = "constant"
    """A selector that has the same truth value for every device."""
    MATCHES_NOTHING = "matches-nothing"
    UNKNOWN_CLASS = "unknown-class"
    UNPUBLISHED = "unpublished-attribute"
    DEREFERENCE = "missing-attribute"
    """Some device of the class lacks an attribute: the pod is stopped on every node."""
    FAILS = "fails-on-devices"
    """No answer for some device, for another reason but with the same consequence."""
    NO_DRIVER_CHECK = "no-driver-check"
    FOREIGN_ID = "id-of-another-machine"
    MANAGEMENT_NIC = "management-nic"
    IDLE_HCA = "hca-without-data"
    """An RDMA device that must not carry tenant data."""
    COUNT = "count"
    ONE_VALUE = "one-value-for-all"
    """A matchAttribute that forces one root or NUMA node, while none has all requested devices."""
    NO_NODE = "no-node"


class LintFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A trap in one object."""

    trap: LintRule
    path: FieldPath
    """The field, from the claim's or class's `spec`."""
    why: str
    fix: str


def dotted_path(path: FieldPath) -> str:
    """`spec.devices.requests[0].name`."""
    words = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(words).removeprefix(".")


# The devices that a claim is checked against.


@dataclass(frozen=True, eq=False)
class LintContext:
    """The devices that a claim may meet."""

    hardware: HardwareInventory
    given: bool
    """Real nodes: a missing device or attribute does not exist. Otherwise only typical ones are known."""
    machines: tuple[HardwareInventory, ...] = ()
    """Published machines, if no nodes are given. They show whether any could serve a claim."""

    @cached_property
    def classes(self) -> dict[str, DeviceClass]:
        """Device classes by name."""
        return {klass.metadata.name: klass for klass in self.hardware.classes}

    @cached_property
    def devices(self) -> tuple[CandidateDevice, ...]:
        """The devices of one node of each kind."""
        return tuple(device for kind in self.hardware.kinds for device in kind.devices)

    @cached_property
    def excluded(self) -> dict[DeviceId, str]:
        """NICs that must not carry tenant data, with the reason."""
        return {
            kind.nics[nic.index].id: nic.excluded
            for kind in self.hardware.kinds
            for nic in kind.machine.nics
            if nic.excluded is not None and self.given
        }

    def of_class(self, name: str) -> list[CandidateDevice]:
        """The devices that belong to a class."""
        return self.passing(self.devices, self.classes[name].spec.selectors)

    def passing(
        self, devices: Sequence[CandidateDevice], selectors: Iterable[DeviceSelector]
    ) -> list[CandidateDevice]:
        """The devices that selectors let through, as far as is known."""
        left = list(devices)
        for selector in selectors:
            program = compiled_or_none(selector.cel.expression) if selector.cel else None
            left = [device for device in left if program is not None and self._passes(program, device)]
        return left

    def fails(self, program: "AnyProgram", device: CandidateDevice) -> bool:
        """Whether an expression has no answer for a device, for another reason than a gap in a profile."""
        if not isinstance(selector_answer(program, device), errors.EvaluationError):
            return False
        missing = [name for name in attributes_read(program) if device.attribute(name) is None]
        return not missing or any(self.lacks(device, name) for name in missing)

    def lacks(self, device: CandidateDevice, name: str) -> bool:
        """Whether a device does not publish an attribute, for sure."""
        if device.attribute(name) is not None:
            return False
        return self.hardware.observed or name not in attributes_always_published(device.id.driver)

    def _passes(self, program: compiler.Program, device: CandidateDevice) -> bool:
        answer = selector_answer(program, device)
        return answer if isinstance(answer, bool) else not self.fails(program, device)


def lint_context(
    stock: HardwareInventory | None,
    classes: Iterable[DeviceClass] = (),
    machines: Iterable[HardwareInventory] = (),
) -> LintContext:
    """Evidence from given nodes, or from typical ones. `classes` win over those of the nodes."""
    base = stock or inventory_of_slices(typical_slices())
    named = tuple({klass.metadata.name: klass for klass in (*base.classes, *classes)}.values())
    fleet = fleet_of(base.kinds, named, base.fleet.index)
    merged = HardwareInventory(base.kinds, named, fleet, base.source, observed=base.observed)
    return LintContext(merged, stock is not None, tuple(machines) if stock is None else ())


def compiled_or_none(expression: str) -> compiler.Program | None:
    """The program, or None if it does not compile."""
    try:
        return compiler.compile_selector(expression)
    except errors.CompileError:
        return None


AnyProgram = compiler.Program | derived.DerivedProgram
"""A selector, or the expression of a derived attribute."""


def selector_answer(
    program: AnyProgram, device: CandidateDevice
) -> bool | DeviceAttribute | errors.EvaluationError:
    """The answer of an expression for a device, or the reason why there is none."""
    try:
        if isinstance(program, derived.DerivedProgram):
            return program.evaluate(device.view)
        return program.matches(device.view)
    except errors.EvaluationError as error:
        return error


def attributes_read(program: AnyProgram) -> list[str]:
    """The attributes that an expression reads by name, as `domain/identifier`."""
    return sorted(
        f"{domain}/{name}" for kind, domain, name in program.reads if kind == "attribute" and domain and name
    )


def allocation_outcomes(inventories: Iterable[HardwareInventory], claim: ResourceClaim) -> Iterator[Outcome]:
    """The answer of each kind of node to a claim, with nothing in use."""
    free = ResourceClaim(metadata=claim.metadata, spec=claim.spec)
    for stock in inventories:
        for kind in stock.kinds:
            yield stock.fleet.answer_on(kind.nodes[0].metadata.name, [free])


def can_be_served(inventories: Iterable[HardwareInventory], claim: ResourceClaim) -> bool:
    """Whether some node can serve a claim."""
    return any(isinstance(outcome, Allocation) for outcome in allocation_outcomes(inventories, claim))


# Whether a selector depends on the device at all.


_COMPARING = frozenset(
    {"_==_", "_!=_", "_<_", "_<=_", "_>_", "_>=_", "_&&_", "_||_", "!_", "@in", "_[_]", "_?._", "_[?_]"}
    | {"orValue", "hasValue", "-_"}
)
_MAX_COMBINATIONS = 4096
"""The most combinations that are tried. Expressions with more are not judged."""

LiteralValue = str | int | bool | None


def constant_truth(program: compiler.Program) -> bool | None:
    """The only truth value that a selector can have, errors aside, or None if it has both or is unclear."""
    root = parse_expression(program.expression).root
    # Only comparisons can be judged by trying the values beside their literals.
    for node in _all_nodes(root):
        if isinstance(node, Fold) or (isinstance(node, Call) and node.function not in _COMPARING):
            return None
    reads = sorted(program.reads, key=str)
    for kind, domain, name in reads:
        if kind not in ("driver", "attribute") or (kind == "attribute" and (domain is None or name is None)):
            return None
    # True and 1 are equal in Python and not in CEL.
    values = list({(type(value), value): value for value in _values_to_try(root)}.values())
    texts = [value for value in values if isinstance(value, str)]
    choices = [texts if kind == "driver" else values for kind, _, _ in reads]
    combinations = list(islice(product(*choices), _MAX_COMBINATIONS + 1))
    if len(combinations) > _MAX_COMBINATIONS:
        return None
    truths = {
        _truth_with_values(program, dict(zip(reads, combination, strict=True)))
        for combination in combinations
    } - {None}
    return truths.pop() if len(truths) == 1 else None


def _all_nodes(node: CelNode) -> Iterator[CelNode]:
    yield node
    for child in children(node):
        yield from _all_nodes(child)


def _values_to_try(root: CelNode) -> Iterator[LiteralValue]:
    yield from (None, True, False, "", 0)
    for node in _all_nodes(root):
        value = node.value if isinstance(node, Const) else None
        if isinstance(value, str):
            yield from (value, f"{value}0")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield from (value - 1, value, value + 1)


def _truth_with_values(program: compiler.Program, of: dict[Read, LiteralValue]) -> bool | None:
    attributes: dict[str, dict[str, object]] = {}
    for (kind, domain, name), value in of.items():
        if kind == "attribute" and value is not None:
            # A bool is an int to Python, so it comes first.
            field = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "string"
            attributes[f"{domain}/{name}"] = {field: value}
    driver = next((str(value) for (kind, _, _), value in of.items() if kind == "driver"), "")
    try:
        return program.matches(environment.DeviceView.of(driver, attributes, {}))
    except errors.EvaluationError:
        return None


# Rules for one selector.


_KNOWN_DOMAINS = frozenset({GPU_DRIVER, NIC_DRIVER, "resource.kubernetes.io"})
_ADDRESS = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_UUID = r"(?:GPU|MIG)-[0-9a-f-]{8,}"
_ID = re.compile(f"{_ADDRESS}|{_UUID}", re.IGNORECASE)
_SHOWN = 3
"""Devices that a finding names."""


def selector_findings(
    expression: str, devices: Sequence[CandidateDevice], context: LintContext, path: FieldPath
) -> Iterator[LintFinding]:
    """The findings about a selector that runs on `devices`."""
    try:
        program = compiler.compile_selector(expression)
    except errors.CompileError as error:
        yield _does_not_compile(error, path)
        return
    only = constant_truth(program)
    if only is not None:
        why = f"it is {str(only).lower()} whatever the device"
        fix = "leave it out" if only else "correct the comparison"
        yield LintFinding(trap=LintRule.CONSTANT, path=path, why=why, fix=fix)
        return
    found = list(_SelectorLint(program, devices, context, path).findings())
    yield from found
    if not context.given or not devices or found:
        return
    if all(selector_answer(program, device) is False for device in devices):
        why = f"it is true for none of the {len(devices)} devices that it is asked of"
        fix = "compare with values that exist here"
        yield LintFinding(trap=LintRule.MATCHES_NOTHING, path=path, why=why, fix=fix)


def derived_findings(
    expression: str, devices: Sequence[CandidateDevice], context: LintContext, path: FieldPath
) -> Iterator[LintFinding]:
    """The findings about the expression of a derived attribute, for `devices` that pass the selectors."""
    try:
        program = derived.compile_derived(expression)
    except errors.CompileError as error:
        yield _does_not_compile(error, path)
        return
    yield from _SelectorLint(program, devices, context, path).findings()


def _does_not_compile(error: errors.CompileError, path: FieldPath) -> LintFinding:
    why = f"line {error.line}, column {error.column}: {error.message}"
    fix = error.hint or "correct the expression"
    return LintFinding(trap=LintRule.DOES_NOT_COMPILE, path=path, why=why, fix=fix)


@dataclass(frozen=True)
class _SelectorLint:
    """An expression that compiles, and the devices that it runs on."""

    program: AnyProgram
    devices: Sequence[CandidateDevice]
    context: LintContext
    path: FieldPath

    def findings(self) -> Iterator[LintFinding]:
        failing = [device for device in self.devices if self.context.fails(self.program, device)]
        unchecked = list(self._driver_not_checked(failing))
        if unchecked:
            yield from unchecked
            return
        # Without nodes, only well-known domains show whether any device has an attribute.
        lacking = [
            name
            for name in attributes_read(self.program)
            if (self.context.given or name.partition("/")[0] in _KNOWN_DOMAINS)
            and self.devices
            and all(self.context.lacks(device, name) for device in self.devices)
        ]
        yield from map(self._unpublished, lacking)
        if failing and not lacking:
            yield self._failing(failing)
        if self.context.given:
            yield from self._foreign_ids()

    def _driver_not_checked(self, failing: Sequence[CandidateDevice]) -> Iterator[LintFinding]:
        """The selector reads attributes of one driver, but meets devices of several."""
        drivers = sorted({device.id.driver for device in self.devices})
        asked = sorted({name.partition("/")[0] for name in attributes_read(self.program)} & set(drivers))
        others = [device for device in failing if device.id.driver not in asked]
        if len(asked) == 1 and others:
            yield LintFinding(
                trap=LintRule.NO_DRIVER_CHECK,
                path=self.path,
                why=f"devices of {', '.join(drivers)} are asked, and {_device_list(others)} cannot answer: "
                "the error stops the pod on every node",
                fix=f"begin with: device.driver == '{asked[0]}' &&"
                if isinstance(self.program, compiler.Program)
                else f"select them: device.driver == '{asked[0]}'",
            )

    def _unpublished(self, name: str) -> LintFinding:
        asked = f"none of the {len(self.devices)} devices that are asked"
        near = self._similar_names(name)
        return LintFinding(
            trap=LintRule.UNPUBLISHED,
            path=self.path,
            why=f"{asked if self.context.given else 'no driver that is known'} publishes {name}",
            fix=f"use {' or '.join(near)}"
            if near
            else "select by what is published: rackloom claim template",
        )

    def _similar_names(self, name: str) -> list[str]:
        """Published names that are spelt similarly, the nearest first."""
        names = {
            key if "/" in key else f"{device.id.driver}/{key}"
            for device in self.devices
            for key in device.device.attributes
        } - {name}
        by_identifier = {published.rpartition("/")[2]: published for published in sorted(names)}
        near = get_close_matches(name.rpartition("/")[2], by_identifier, n=_SHOWN)
        return [by_identifier[identifier] for identifier in near]

    def _failing(self, failing: Sequence[CandidateDevice]) -> LintFinding:
        """The expression has no answer for some devices."""
        read = attributes_read(self.program)
        missing = [name for name in read if any(device.attribute(name) is None for device in failing)]
        error = selector_answer(self.program, failing[0])
        reason = f"without {', '.join(missing)}" if missing else f"({error})"
        return LintFinding(
            trap=LintRule.DEREFERENCE if missing else LintRule.FAILS,
            path=self.path,
            why=f"{_device_list(failing)} ({len(failing)} of {len(self.devices)} devices) {reason} cannot "
            "answer: the error stops the pod on every node",
            fix=" and ".join(map(self._guarded_access, missing)) or "compare values of one type",
        )

    def _guarded_access(self, name: str) -> str:
        values = [value for device in self.devices if (value := device.attribute(name)) is not None]
        default = '""'
        if values and values[0].int_ is not None:
            default = "-1"
        if values and values[0].bool_ is not None:
            default = "false"
        return f"write {attribute_access(name)}.orValue({default})"

    def _foreign_ids(self) -> Iterator[LintFinding]:
        """PCI addresses and UUIDs that no device has."""
        nodes = _all_nodes(parse_expression(self.program.expression).root)
        literals = {node.value for node in nodes if isinstance(node, Const) and isinstance(node.value, str)}
        published = (device.device.attributes.values() for device in self.context.devices)
        known = {value.string for values in published for value in values}
        missing = sorted({text for text in literals if _ID.fullmatch(text)} - known)
        if missing:
            # nvidia-smi prints eight digits of the PCI domain in upper case, drivers publish four in lower
            # case.
            split = (text.lower().partition(":") for text in missing)
            spelt = (f"{domain[-4:]}:{rest}" for domain, _, rest in split)
            respelt = [text for text in spelt if text in known]
            why = f"no device here has {', '.join(missing)}"
            ours = "make the claim for this machine: rackloom claim template"
            fix = f"write {', '.join(respelt)}" if respelt else ours
            yield LintFinding(trap=LintRule.FOREIGN_ID, path=self.path, why=why, fix=fix)


def _device_list(devices: Sequence[CandidateDevice]) -> str:
    names = [f"{device.id.driver}/{device.id.device}" for device in devices[:_SHOWN]]
    return ", ".join(names) + (" and others" if len(devices) > _SHOWN else "")
