"""Amounts of resources: effective requests of pods, and what nodes can allocate.

Amounts follow kube-scheduler's NodeResourcesFit: a pod asks for what its containers request together, or for
what its init containers need at one time where that is more; what the pod asks for as a whole replaces the
sum; overhead and the pod itself count too.
"""

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import Any

from rackloom.core.allocate.quantity import Quantity
from rackloom.core.cluster.objects import JsonMapping

ResourceAmounts = Counter[str]
"""By resource: cores, bytes, or pieces. The values are fractions; a sum or a maximum drops zeros."""
Thousandths = Mapping[str, int]
"""By resource: thousandths of its unit. Whole numbers, since a site has many pods."""
PODS_RESOURCE = "pods"
CPU_RESOURCE, MEMORY_RESOURCE = "cpu", "memory"
NO_AMOUNTS = ResourceAmounts()
_UNREADABLE_AMOUNT = Fraction(2**63)
"""What cannot be read: a real API server takes no such pod, and no node may take it for nothing."""


def pod_requests(spec: JsonMapping) -> ResourceAmounts:
    """The requests of a pod: the most that runs at one time, which may be during init containers."""
    most, lasting = NO_AMOUNTS, NO_AMOUNTS
    for container in spec.get("initContainers") or ():
        here = lasting + _container_requests(container)
        most = most | here
        if container.get("restartPolicy") == "Always":
            lasting = here
    together = sum(map(_container_requests, spec.get("containers") or ()), lasting)
    # What the pod asks for as a whole replaces the sum of its containers.
    whole = ResourceAmounts({**(most | together), **_container_requests(spec)})
    return whole + _parse_amounts(spec.get("overhead") or {}) + ResourceAmounts({PODS_RESOURCE: 1})


def allocatable_of_node(node: JsonMapping) -> ResourceAmounts:
    """What pods may request of a node. It has nothing of what it does not name."""
    return _parse_amounts((node.get("status") or {}).get("allocatable") or {})


def _parse_amounts(written: Mapping[str, Any]) -> ResourceAmounts:
    """Quantities as amounts."""
    return ResourceAmounts({name: _parse_amount(value) for name, value in written.items()})


def _container_requests(container: JsonMapping) -> ResourceAmounts:
    """A limit without a request is one: the API server writes it so."""
    resources = container.get("resources") or {}
    return _parse_amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


@lru_cache(maxsize=10_000)
def _parse_amount(value: str | int | float) -> Fraction:
    try:
        found = Quantity.parse(value)
    except ValueError:
        return _UNREADABLE_AMOUNT
    return found.unscaled * Fraction(10) ** found.scale


def in_thousandths(amounts: Mapping[str, Fraction | int]) -> Thousandths:
    """Rounded up, as kube-scheduler rounds CPUs to thousandths and bytes to whole ones."""
    return {name: ceil(amount * 1000) for name, amount in amounts.items()}


CLASS_RESOURCE = "deviceclass.resource.kubernetes.io/"
"""Prefix of the resource that counts devices of a class: a claim serves them (KEP-5004)."""


def requests_beside_devices(spec: JsonMapping, gpu_resource: str) -> Thousandths:
    """What a pod requests of its node beside devices: CPU, memory, the pod itself."""
    return in_thousandths(
        {
            name: amount
            for name, amount in pod_requests(spec).items()
            if amount and name != gpu_resource and not name.startswith(CLASS_RESOURCE)
        }
    )
