"""Candidate devices of a node, and whether a device could serve a request at all.

`candidates_of` numbers the devices of all usable pools in the order in which the search tries them.
`Eligibility` checks the rules that do not depend on assignments: binding conditions, the selectors of
the class, the selectors of the request, and the device's node selection. It checks in this order, and
the first reason counts. An error of a selector is a verdict too (`AllocationStopped`). It takes effect
only when the search reaches that device.

Running CEL dominates the cost, so two caches share verdicts:

- By the request's `likeness`, within one allocation.
- By the values that the expression can read (`Program.key`). Real devices differ in UUID and address,
  and few expressions read those. An expression with generated code simply runs.

`SelectorCache` keeps the results of expressions across allocations, for as long as its owner keeps it.
It also keeps the derived attributes that the ledger needs. `blocking_taint` finds the first NoSchedule or
NoExecute taint that a request does not tolerate. The ledger calls it.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from rackloom.core.allocate.cel import compiler, errors
from rackloom.core.allocate.cel.environment import DeviceView
from rackloom.core.allocate.cel.values import SemanticVersion
from rackloom.core.allocate.inputs import DeviceId, Features, RequestAlternative
from rackloom.core.allocate.objects import (
    Amount,
    Device,
    DeviceAttribute,
    DeviceSelector,
    DeviceTaint,
    DeviceToleration,
    Node,
    ResourceSlice,
)
from rackloom.core.allocate.outcome import AllocationStopped, Cause, CauseKind
from rackloom.core.allocate.pools import MalformedNodeSelector, Pool, devices_of, node_is_selected
from rackloom.core.allocate.quantity import Quantity

if TYPE_CHECKING:
    from rackloom.core.allocate.cel.derived import DerivedProgram

# Candidate devices, with the facts that are computed once for each of them.


class CandidateDevice:
    """A device that a node may reach."""

    __slots__ = ("_malformed", "_view", "device", "id", "pool", "position", "shareable", "source")

    def __init__(
        self, pool: Pool, source: ResourceSlice, device: Device, position: int, *, shareable: bool
    ) -> None:
        self.id = DeviceId(pool.driver, pool.name, device.name)
        self.pool = pool
        self.source = source
        self.device = device
        self.position = position
        """The device's place in the order of the search."""
        self.shareable = shareable
        """Whether several requests may hold a share of it at once."""
        self._view: DeviceView | None = None
        self._malformed: bool | None = None

    @property
    def malformed(self) -> bool:
        """Whether a value of the device cannot be read, so that every selector fails on it."""
        if self._malformed is None:
            self._malformed = is_malformed(self.id.driver, self.device)
        return self._malformed

    @property
    def view(self) -> DeviceView:
        """The device as CEL sees it, built when the first selector needs it."""
        if self._view is None:
            self._view = DeviceView.of_device(self.id.driver, self.device)
        return self._view

    def attribute(self, name: str) -> DeviceAttribute | None:
        """The attribute with a fully qualified name. Published names without a domain are in the driver's."""
        found = self.device.attributes.get(name)
        domain, slash, identifier = name.partition("/")
        if found is None and slash and domain == self.id.driver:
            return self.device.attributes.get(identifier)
        return found


def is_malformed(driver: str, device: Device) -> bool:
    """Whether a value of the device cannot be read, so that every selector fails on it."""
    return not _is_plain(device) and DeviceView.of_device(driver, device).problem is not None


def _is_plain(device: Device) -> bool:
    """Whether all values are certain to be well-formed. Text, numbers and booleans need no parsing."""
    for attribute in device.attributes.values():
        if attribute.versions is not None:
            return False
        if attribute.string is not None or attribute.int_ is not None or attribute.bool_ is not None:
            continue
        if attribute.version is None or not _is_version(attribute.version):
            return False
    for has in device.capacity.values():  # noqa: SIM110 (twice as fast as a generator)
        if not is_quantity(has.value):
            return False
    return True


@lru_cache(maxsize=4096)
def _is_version(text: str) -> bool:
    try:
        SemanticVersion.parse(text)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=4096)
def is_quantity(amount: Amount) -> bool:
    """Whether an amount can be read."""
    try:
        Quantity.parse(str(amount))
    except ValueError:
        return False
    return True


def candidates_of(pools: Sequence[Pool], features: Features) -> tuple[CandidateDevice, ...]:
    """All devices of usable pools, in the order of the search."""
    found: list[CandidateDevice] = []
    for pool in pools:
        for source, device in devices_of(pool):
            shareable = features.consumable_capacity and bool(device.allow_multiple_allocations)
            found.append(CandidateDevice(pool, source, device, len(found), shareable=shareable))
    return tuple(found)


# Taints and tolerations.


_BLOCKING = ("NoSchedule", "NoExecute")
"""The other effects (None, and any that a later version adds) do not block."""


def first_blocking_taint(device: Device) -> DeviceTaint | None:
    """The first taint that blocks requests without a toleration for it."""
    for taint in device.taints:
        if taint.effect in _BLOCKING:
            return taint
    return None


def blocking_taint(device: Device, tolerations: Iterable[DeviceToleration]) -> DeviceTaint | None:
    """The first blocking taint that the tolerations do not cover."""
    accepted = tuple(tolerations)
    for taint in device.taints:
        if taint.effect in _BLOCKING and not any(_tolerates(toleration, taint) for toleration in accepted):
            return taint
    return None


def _tolerates(toleration: DeviceToleration, taint: DeviceTaint) -> bool:
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator in ("", "Equal"):
        return toleration.value == taint.value
    return toleration.operator == "Exists"


# Verdicts of selectors and node selection, and their caches.


Verdict = Cause | AllocationStopped | None
"""None if the device matches. An AllocationStopped counts only if the search reaches the device."""


_EXPRESSIONS_KEPT = 256
_RESULTS_KEPT = 4096
"""The most results of one expression. It has one for each set of values that it reads."""


class SelectorCache:
    """Results of expressions on devices. The caller decides how long it lives.

    It keeps only the results of the most recently used expressions, so that its memory is bounded.
    """

    def __init__(self) -> None:
        self._results: OrderedDict[str, dict[Hashable, bool | errors.EvaluationError]] = OrderedDict()
        self._derived: OrderedDict[str, dict[Hashable, DeviceAttribute | errors.EvaluationError]] = (
            OrderedDict()
        )

    def evaluate(
        self, expression: str, view: DeviceView
    ) -> bool | errors.CompileError | errors.EvaluationError:
        """Whether the expression holds for the device. Errors are returned as values."""
        program = compiled(expression)
        if isinstance(program, errors.CompileError):
            return program
        # Every selector fails on a malformed device, so there is no result to keep.
        if view.problem is not None:
            return _run_program(program, view)
        if program.fast is not None:
            # Running generated code costs less than looking up its result.
            try:
                return program.fast(view)
            except Exception:  # noqa: S110 (the exact evaluator decides instead)
                pass
        known = _known_results(self._results, expression)
        key = program.key(view)
        if key not in known:
            if len(known) == _RESULTS_KEPT:
                known.clear()
            known[key] = _run_program(program, view)
        return known[key]

    def derive(
        self, expression: str, view: DeviceView
    ) -> DeviceAttribute | errors.CompileError | errors.EvaluationError:
        """The attribute that the expression derives from the device. Errors are returned as values."""
        program = compiled_derived(expression)
        if isinstance(program, errors.CompileError):
            return program
        known = _known_results(self._derived, expression)
        key = program.key(view)
        if key not in known:
            if len(known) == _RESULTS_KEPT:
                known.clear()
            try:
                known[key] = program.evaluate(view)
            except errors.EvaluationError as error:
                known[key] = error
        return known[key]


_Result = TypeVar("_Result")


def _known_results(
    results: OrderedDict[str, dict[Hashable, _Result]], expression: str
) -> dict[Hashable, _Result]:
    """The results of an expression, which becomes the most recently used one."""
    known = results.get(expression)
    if known is None:
        known = results[expression] = {}
        if len(results) > _EXPRESSIONS_KEPT:
            results.popitem(last=False)
    else:
        results.move_to_end(expression)
    return known


@lru_cache(maxsize=_EXPRESSIONS_KEPT)
def compiled(expression: str) -> compiler.Program | errors.CompileError:
    """The compiled expression, or why it does not compile."""
    try:
        return compiler.compile_selector(expression)
    except errors.CompileError as error:
        return error


@lru_cache(maxsize=_EXPRESSIONS_KEPT)
def compiled_derived(expression: str) -> "DerivedProgram | errors.CompileError":
    """The compiled expression of a derived attribute, or why it does not compile."""
    # Few claims have derived attributes, so the module is loaded only here.
    from rackloom.core.allocate.cel.derived import compile_derived

    try:
        return compile_derived(expression)
    except errors.CompileError as error:
        return error


def _run_program(program: compiler.Program, view: DeviceView) -> bool | errors.EvaluationError:
    try:
        return program.matches(view)
    except errors.EvaluationError as error:
        return error


class Eligibility:
    """Verdicts on one node's devices for the requests of one allocation."""

    def __init__(self, node: Node, features: Features, selectors: SelectorCache) -> None:
        self._node = node
        self._features = features
        self._selectors = selectors
        self._known: dict[Hashable, dict[CandidateDevice, Verdict]] = {}
        self._known_of: dict[RequestAlternative, dict[CandidateDevice, Verdict]] = {}

    def verdict(self, ask: RequestAlternative, candidate: CandidateDevice) -> Verdict:
        """The verdict of selectors and node selection. An error is returned, not raised."""
        known = self._known_of.get(ask)
        if known is None:
            known = self._known_of[ask] = self._known.setdefault(ask.likeness, {})
        if candidate not in known:
            known[candidate] = self.judge(ask, candidate)
        # The text of an error names the request, so errors are not shared between like requests.
        found = known[candidate]
        return self.judge(ask, candidate) if isinstance(found, AllocationStopped) else found

    def matches(self, ask: RequestAlternative, candidate: CandidateDevice) -> bool:
        """Whether the device is selectable. Raises AllocationStopped if a selector fails."""
        verdict = self.verdict(ask, candidate)
        if isinstance(verdict, AllocationStopped):
            raise verdict
        return verdict is None

    def judge(self, ask: RequestAlternative, candidate: CandidateDevice) -> Verdict:
        """The verdict without the cache, for callers that keep it themselves."""
        device = candidate.device
        if device.binding_conditions and not self._features.device_binding_and_status:
            return Cause(CauseKind.BINDING_CONDITIONS, "the feature DeviceBindingAndStatus is off")
        owner = f"class {ask.device_class.metadata.name}"
        verdict = self._selected(ask.device_class.spec.selectors, candidate, owner, CauseKind.CLASS_SELECTOR)
        if verdict is None:
            owner = f"claim {ask.claim_name}, request {ask.name}"
            verdict = self._selected(ask.selectors, candidate, owner, CauseKind.REQUEST_SELECTOR)
        if verdict is not None or not candidate.source.spec.per_device_node_selection:
            return verdict
        # Each device of this slice selects its nodes. A selector that cannot be read is an error that counts
        # only if the search reaches the device.
        try:
            here = node_is_selected(self._node, device)
        except MalformedNodeSelector as error:
            return AllocationStopped(f"device {candidate.id}: {error}")
        return None if here else Cause(CauseKind.OTHER_NODE, f"not reached from {self._node.metadata.name}")

    def _selected(
        self, selectors: Iterable[DeviceSelector], candidate: CandidateDevice, owner: str, kind: CauseKind
    ) -> Verdict:
        for number, selector in enumerate(selectors):
            if selector.cel is None:
                return AllocationStopped(
                    f"{owner}: selector #{number} has no CEL expression (unsupported selector type?)"
                )
            result = self._selectors.evaluate(selector.cel.expression, candidate.view)
            if isinstance(result, errors.CompileError):
                return AllocationStopped(f"{owner}: selector #{number} does not compile: {result}")
            if isinstance(result, errors.EvaluationError):
                return AllocationStopped(
                    f"{owner}: selector #{number} fails on device {candidate.id}: {result}"
                )
            if not result:
                return Cause(kind, selector.cel.expression)
        return None
