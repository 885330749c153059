"""The checks of the API server on the derived attributes of a claim.

Names are `<domain>/<identifier>` and unique in a request, a constraint compares each of them, and all
expressions of a claim together do not cost too much. An expression that does not compile is not reported
here: the allocator and `rackloom claim check` say why.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from rackloom.claim.manifests.documents import FieldPath
from rackloom.core.allocate.cel.derived import compile_derived
from rackloom.core.allocate.cel.errors import CompileError
from rackloom.core.allocate.objects import DeviceClaim, RequestSpec

_MOST = 32
"""Derived attributes of a request (DeviceRequest in resource.k8s.io/v1)."""
_COST_LIMIT, _UNBOUNDED = 1_000_000, 2**64 - 1
"""Of all derived attributes of a claim together (DeviceClaimDerivedAttributeCELMaxCost)."""
_QUALIFIED_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[A-Za-z_][A-Za-z0-9_]*")


class RuleViolation(NamedTuple):
    """A rule that a claim breaks. `where` is the path within the claim's devices."""

    where: FieldPath
    reason: str
    fix: str


def derived_violation(claim: DeviceClaim) -> RuleViolation | None:
    """The first rule that the derived attributes of a claim break."""
    compared = {name for of in claim.constraints for name in (of.match_attribute, of.distinct_attribute)}
    cost = 0
    for spec, where in _asks(claim):
        names = [derived.name for derived in spec.derived_attributes]
        if len(names) > _MOST:
            return RuleViolation(where, f"{len(names)} derived attributes", f"derive {_MOST} at most")
        for number, name in enumerate(names):
            wrong = _wrong_name(name, names[:number], compared)
            if wrong is not None:
                return RuleViolation((*where, number), *wrong)
        cost += sum(_cost_of(derived.expression) for derived in spec.derived_attributes)
    if cost <= _COST_LIMIT:
        return None
    what = "the derived attributes of the claim"
    reason = f"{what} may cost {cost} together, more than {_COST_LIMIT}"
    if cost >= _UNBOUNDED:
        reason = f"nothing bounds what {what} may cost"
    return RuleViolation(("requests",), reason, "write simpler expressions, without loops in loops")


def _asks(claim: DeviceClaim) -> Iterator[tuple[RequestSpec, FieldPath]]:
    """The requests and their alternatives, each with the path of its derived attributes."""
    for number, request in enumerate(claim.requests):
        if request.exactly is not None:
            yield request.exactly, ("requests", number, "exactly", "derivedAttributes")
        for index, spec in enumerate(request.first_available):
            yield spec, ("requests", number, "firstAvailable", index, "derivedAttributes")


def _wrong_name(name: str, earlier: list[str], compared: set[str | None]) -> tuple[str, str] | None:
    """The problem of the name of a derived attribute, and the fix."""
    if not _QUALIFIED_NAME.fullmatch(name):
        word = re.sub(r"[^A-Za-z0-9_]", "_", name.rpartition("/")[2]) or "name"
        return f"{name!r} is no name of a derived attribute", f"write derived/{word}"
    if name in earlier:
        return f"two derived attributes are called {name!r}", "give each its own name"
    if name not in compared:
        fix = f"add a constraint with matchAttribute: {name}, or leave it out"
        return f"no constraint compares the derived attribute {name!r}", fix
    return None


def _cost_of(expression: str) -> int:
    """The most that an evaluation may cost, or 0 if the expression does not compile."""
    try:
        return compile_derived(expression).max_cost
    except CompileError:
        return 0
