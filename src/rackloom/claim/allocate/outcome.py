"""The three answers of an allocation: devices, not here, or an error with how far it reaches."""

from enum import StrEnum

import msgspec

from rackloom.claim.allocate.cost import Standing
from rackloom.claim.allocate.objects import AllocationResult


class Scope(StrEnum):
    """Whom an error stops."""

    NODE = "node"
    """This node only: others may still fit."""
    ATTEMPT = "attempt"
    """The pod, on every node, until something changes."""


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """All claims got their devices."""

    node: str
    results: tuple[AllocationResult, ...]
    """One per claim, in the order of the claims."""
    steps: int
    """Search steps that it took: a measure of work."""
    standing: Standing | None = None
    """How good it is. Mode exact does not rank: None."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The claims cannot all be had on this node; `explain` says why."""

    node: str
    steps: int


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """No answer: an input cannot be used, or the bound on the search was reached."""

    node: str
    scope: Scope
    reason: str
    undecided: bool = False
    """Stopped by the caller's bound: more time might decide it."""
    steps: int = 0


Outcome = Allocation | Refusal | Fault


class Stop(Exception):
    """Carries a fault from where it is found to the door of the allocator."""

    def __init__(self, reason: str, *, scope: Scope = Scope.ATTEMPT, undecided: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.scope = scope
        self.undecided = undecided
