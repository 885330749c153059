"""The answers of an allocation: devices, a refusal or a fault, with causes and costs.

`Allocation` means that every claim has its devices, `Refusal` that this node cannot serve them, and
`Fault` that there is no answer: an input cannot be used, or the bound on the search was reached. A
fault stops either one node or the whole scheduling attempt (`FaultScope`), as it does in
kube-scheduler. Inside the allocator a fault travels as the exception `AllocationStopped`.

`CauseKind` lists why a device does not serve a request, in the order in which the rules are checked.
Search and explanation share it.

`Cost` orders valid answers for mode best. Its fields compare lexicographically: a later field counts
only if all earlier ones are equal. `Optimality` adds whether the search proved that no valid answer
costs less.
"""

from enum import StrEnum

import msgspec

from rackloom.core.allocate.objects import AllocationResult

# Why a device does not serve a request: shared by search and explanation.


class CauseKind(StrEnum):
    """The reasons why a device does not serve a request, in the order in which they are checked."""

    IN_USE = "in-use"
    BINDING_CONDITIONS = "binding-conditions"
    CLASS_SELECTOR = "class-selector"
    REQUEST_SELECTOR = "request-selector"
    SELECTOR_FAILS = "selector-fails"
    OTHER_NODE = "other-node"
    CAPACITY = "capacity"
    COMPATIBILITY_GROUPS = "compatibility-groups"
    COUNTERS = "counters"
    TAINT = "taint"
    DERIVED_FAILS = "derived-attribute-fails"
    CONSTRAINT = "constraint"
    ATTRIBUTE_MISSING = "attribute-missing"


class Cause(msgspec.Struct, frozen=True):
    """A kind, and the detail a person needs: an expression, a taint, an amount that is short."""

    kind: CauseKind
    detail: str = ""


# The order of valid answers.


class Cost(msgspec.Struct, frozen=True, order=True, kw_only=True):
    """Less is better. A field decides only if all fields before it are equal."""

    alternatives: int
    """Steps down the lists of `firstAvailable`, over all requests."""
    broken: int
    """NUMA nodes, PCIe roots and NVLink cliques that are partly in use and partly free afterwards."""
    room: int
    """The remainder, before, of the counter sets that are drawn from, in thousandths of a whole set.

    Small means packed: partitions come from the sets that are used the most already.
    """
    apart: int
    """Over pairs of devices of two requests of a claim: 0 below one PCIe root, 1 on one NUMA node, else 2."""
    unlinked: int
    """Pairs of devices of a claim that both publish NVLink cliques but have none in common."""


class Optimality(msgspec.Struct, frozen=True, kw_only=True):
    """The quality of an answer of mode best."""

    cost: Cost
    proved: bool
    """Whether no valid answer costs less. False if the search was cut short before that was shown."""
    at_least: Cost | None
    """No valid answer costs less than this. `cost` itself if proved, or None if nothing is known.

    Fields are compared in order, so only the first that differs from `cost` shows how much is open.
    """
    broken_before: int
    """The number of groups of the node that were partly in use before. Nodes are compared without these."""


# The three answers, and the exception that carries a fault to the entry point.


class FaultScope(StrEnum):
    """The scope of an error."""

    NODE = "node"
    """Only the node: others may still fit."""
    ATTEMPT = "attempt"
    """The pod, on every node, until something changes."""


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """All claims got their devices."""

    node: str
    results: tuple[AllocationResult, ...]
    """One per claim, in the order of the claims."""
    steps: int
    """Search steps that it took: a measure of work."""
    optimality: Optimality | None = None
    """The quality of the answer. None in mode exact, which does not rank."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The node cannot serve all claims. `explain` gives the reason."""

    node: str
    steps: int


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """No answer: an input cannot be used, or the bound on the search was reached."""

    node: str
    scope: FaultScope
    reason: str
    undecided: bool = False
    """Stopped by the caller's bound: more time might decide it."""
    steps: int = 0


Outcome = Allocation | Refusal | Fault


class AllocationStopped(Exception):
    """Carries a fault to the entry point of the allocator."""

    def __init__(
        self, reason: str, *, scope: FaultScope = FaultScope.ATTEMPT, undecided: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.scope = scope
        self.undecided = undecided
