"""How much of its node a pod takes, and whether that is still there: what kube-scheduler counts; pure.

The rules are those of its plugin NodeResourcesFit and of k8s.io/component-helpers (PodRequests): cpu, memory
and every extended resource alike, and the pods themselves.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any

from rackloom.claim.allocate.quantity import Quantity
from rackloom.claim.kube.api import Object

Amounts = Mapping[str, Fraction]
"""By resource: cores, bytes, or pieces."""
PODS = "pods"
NOTHING: Amounts = {}
_ZERO = Fraction(0)
_TOO_MUCH = Fraction(2**63)
"""What cannot be read: a real API server takes no such pod, and no node may take it for nothing."""


def needs(spec: Mapping[str, Any]) -> Amounts:
    """What a pod takes: the most that runs together, which init containers may be before the others."""
    most: Amounts = {}
    lasting: Amounts = {}
    for one in spec.get("initContainers") or ():
        here = plus(lasting, _asked(one))
        most = _most(most, here)
        if one.get("restartPolicy") == "Always":
            lasting = here
    together = reduce(plus, map(_asked, spec.get("containers") or ()), lasting)
    whole = {**_most(most, together), **_asked(spec)}
    return plus(plus(whole, _amounts(spec.get("overhead") or {})), {PODS: Fraction(1)})


def has_room(node: Object, needed: Amounts, taken: Amounts) -> bool:
    """Whether a node has what is needed beside what others take. It has nothing of what it does not name."""
    there = _amounts((node.get("status") or {}).get("allocatable") or {})
    return all(
        not amount or amount <= there.get(name, _ZERO) - taken.get(name, _ZERO)
        for name, amount in needed.items()
    )


def plus(one: Amounts, other: Amounts) -> Amounts:
    """Both together."""
    return {name: one.get(name, _ZERO) + other.get(name, _ZERO) for name in _names(one, other)}


def minus(one: Amounts, other: Amounts) -> Amounts:
    """What is left of `one`."""
    return {name: one.get(name, _ZERO) - other.get(name, _ZERO) for name in _names(one, other)}


def _most(one: Amounts, other: Amounts) -> Amounts:
    return {name: max(one.get(name, _ZERO), other.get(name, _ZERO)) for name in _names(one, other)}


def _names(*amounts: Amounts) -> Iterable[str]:
    return dict.fromkeys(name for one in amounts for name in one)


def _asked(container: Mapping[str, Any]) -> Amounts:
    """A limit without a request is one: the API server writes it so."""
    resources = container.get("resources") or {}
    return _amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _amounts(written: Mapping[str, Any]) -> dict[str, Fraction]:
    return {name: _amount(value) for name, value in written.items()}


@lru_cache(maxsize=10_000)
def _amount(value: str | int | float) -> Fraction:
    try:
        found = Quantity.parse(value)
    except ValueError:
        return _TOO_MUCH
    return found.unscaled * Fraction(10) ** found.scale
