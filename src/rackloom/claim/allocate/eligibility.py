"""Whether a device could serve a request at all: selectors and nodes, nothing that changes during a search.

Verdicts of selectors are shared by all devices that look alike to an expression (`Program.key`): real devices
all differ in uuid and address, and few expressions read those.
"""

from collections.abc import Hashable, Iterable

from rackloom.claim.allocate import cel
from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.causes import Cause, Kind
from rackloom.claim.allocate.features import Features
from rackloom.claim.allocate.nodes import MalformedSelector, reaches
from rackloom.claim.allocate.objects import DeviceSelector, Node
from rackloom.claim.allocate.outcome import Stop
from rackloom.claim.allocate.requests import Ask

Verdict = Cause | Stop | None
"""None: it matches. A Stop is an error that counts only if the search comes to this device."""


class Selectors:
    """Compiled expressions, and what they said of devices. Lives as long as the caller likes."""

    def __init__(self) -> None:
        self._programs: dict[str, cel.Program | cel.CompileError] = {}
        self._said: dict[str, dict[Hashable, bool | cel.EvaluationError]] = {}
        self._verdicts: dict[Hashable, dict[bytes, Verdict]] = {}

    def verdicts(self, ask: Ask, features: Features) -> dict[bytes, Verdict]:
        """What was found for devices by their content, with selectors as they are now. To be added to."""
        key = features, ask.device_class.spec.selectors, ask.selectors
        return self._verdicts.setdefault(key, {})

    def says(self, expression: str, candidate: Candidate) -> bool | cel.CompileError | cel.EvaluationError:
        """Whether the expression holds for the device; errors come back as values."""
        program = self._program(expression)
        if isinstance(program, cel.CompileError):
            return program
        view = candidate.view
        if view.problem is not None:
            return _run(program, candidate)
        known = self._said.setdefault(expression, {})
        key = program.key(view)
        if key not in known:
            known[key] = _run(program, candidate)
        return known[key]

    def _program(self, expression: str) -> cel.Program | cel.CompileError:
        if expression not in self._programs:
            try:
                self._programs[expression] = cel.compile(expression)
            except cel.CompileError as error:
                self._programs[expression] = error
        return self._programs[expression]


def _run(program: cel.Program, candidate: Candidate) -> bool | cel.EvaluationError:
    try:
        return program.matches(candidate.view)
    except cel.EvaluationError as error:
        return error


class Eligibility:
    """Verdicts of one node's devices on the asks of one allocation."""

    def __init__(self, node: Node, features: Features, selectors: Selectors) -> None:
        self._node = node
        self._features = features
        self._selectors = selectors
        self._known: dict[Hashable, dict[Candidate, Verdict]] = {}
        self._by_content: dict[Hashable, dict[bytes, Verdict]] = {}

    def verdict(self, ask: Ask, candidate: Candidate) -> Verdict:
        """What selectors and node selection say; an error is returned, not raised."""
        known = self._known.setdefault(ask.likeness, {})
        if candidate not in known:
            known[candidate] = self._found(ask, candidate)
        # An error names the request, so it is not shared.
        found = known[candidate]
        return self._judge(ask, candidate) if isinstance(found, Stop) else found

    def matches(self, ask: Ask, candidate: Candidate) -> bool:
        """Whether the device is selectable. Raises Stop where a selector fails."""
        verdict = self.verdict(ask, candidate)
        if isinstance(verdict, Stop):
            raise verdict
        return verdict is None

    def _found(self, ask: Ask, candidate: Candidate) -> Verdict:
        """The verdict on a device of the same content, unless devices differ in the nodes they reach."""
        if candidate.source.spec.per_device_node_selection:
            return self._judge(ask, candidate)
        if ask.likeness not in self._by_content:
            self._by_content[ask.likeness] = self._selectors.verdicts(ask, self._features)
        known = self._by_content[ask.likeness]
        if candidate.content not in known:
            known[candidate.content] = self._judge(ask, candidate)
        return known[candidate.content]

    def _judge(self, ask: Ask, candidate: Candidate) -> Verdict:
        device = candidate.device
        if device.binding_conditions and not self._features.device_binding_and_status:
            return Cause(Kind.BINDING_CONDITIONS, "the feature DeviceBindingAndStatus is off")
        if any(use.compatibility_groups for use in device.consumes_counters):
            return Cause(Kind.COMPATIBILITY_GROUPS, "compatibility groups are not supported")
        owner = f"class {ask.device_class.metadata.name}"
        verdict = self._selected(ask.device_class.spec.selectors, candidate, owner, Kind.CLASS_SELECTOR)
        if verdict is None:
            owner = f"claim {ask.claim_name}, request {ask.name}"
            verdict = self._selected(ask.selectors, candidate, owner, Kind.REQUEST_SELECTOR)
        return self._reached(candidate) if verdict is None else verdict

    def _selected(
        self, selectors: Iterable[DeviceSelector], candidate: Candidate, owner: str, kind: Kind
    ) -> Verdict:
        for number, selector in enumerate(selectors):
            if selector.cel is None:
                return Stop(f"{owner}: selector #{number} has no CEL expression (unsupported selector type?)")
            said = self._selectors.says(selector.cel.expression, candidate)
            if isinstance(said, cel.CompileError):
                return Stop(f"{owner}: selector #{number} does not compile: {said}")
            if isinstance(said, cel.EvaluationError):
                return Stop(f"{owner}: selector #{number} fails on device {candidate.id}: {said}")
            if not said:
                return Cause(kind, selector.cel.expression)
        return None

    def _reached(self, candidate: Candidate) -> Verdict:
        device = candidate.device
        if not candidate.source.spec.per_device_node_selection:
            return None
        try:
            here = reaches(
                self._node,
                node_name=device.node_name,
                all_nodes=device.all_nodes,
                selector=device.node_selector,
            )
        except MalformedSelector as error:
            return Stop(f"device {candidate.id}: {error}")
        return None if here else Cause(Kind.OTHER_NODE, f"not reached from {self._node.metadata.name}")
