"""Amounts of resources: the effective request of a pod, and what a node can allocate.

The rule is that of kube-scheduler's NodeResourcesFit, for CPU, memory, GPUs and every other resource alike:

1. A limit without a request is a request.
2. Sidecars (init containers that restart always) run from their turn on. Any other init container runs beside
   the sidecars before it, and ends before the next one starts.
3. The request is the larger of all containers with all sidecars, and of each init container with the sidecars
   before it.
4. What the pod requests as a whole replaces that sum. Overhead and the pod itself are added.

Sources: Kubernetes documentation, "Init Containers" and "Sidecar Containers" (resource sharing within
containers), "Pod-level resources", "Pod Overhead".

An amount that is no quantity raises ValueError. Nothing is guessed for it.
"""

from collections import Counter
from collections.abc import Callable, Mapping
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
CLASS_RESOURCE = "deviceclass.resource.kubernetes.io/"
"""Prefix of the resource that counts devices of a class: a claim serves them (KEP-5004)."""
_MOST_REMEMBERED = 10_000
_amounts: dict[str, Thousandths] = {}
"""By the text of the parts that decide them: most pods of a site are written alike, and most nodes."""


def _remembered(written: str, amounts: Callable[[], ResourceAmounts]) -> Thousandths:
    if written not in _amounts:
        if len(_amounts) >= _MOST_REMEMBERED:
            _amounts.clear()
        _amounts[written] = in_thousandths(amounts())
    return _amounts[written]


def effective_requests(spec: JsonMapping) -> Thousandths:
    """The request of a pod, or of a template, by its spec. Raises ValueError for an unreadable amount."""
    parts = [
        [(part.get("resources"), part.get("restartPolicy")) for part in spec.get(kind) or ()]
        for kind in ("initContainers", "containers")
    ]
    written = repr((parts, spec.get("resources"), spec.get("overhead")))
    return _remembered(written, lambda: pod_requests(spec))


def pod_requests(spec: JsonMapping) -> ResourceAmounts:
    """The same as exact amounts. Raises ValueError for an unreadable amount."""
    most, lasting = NO_AMOUNTS, NO_AMOUNTS
    for container in spec.get("initContainers") or ():
        here = lasting + _container_requests(container)
        most = most | here
        if container.get("restartPolicy") == "Always":
            lasting = here
    together = sum(map(_container_requests, spec.get("containers") or ()), lasting)
    whole = ResourceAmounts({**(most | together), **_container_requests(spec)})
    return whole + _parse_amounts(spec.get("overhead") or {}) + ResourceAmounts({PODS_RESOURCE: 1})


def requested_devices(spec: JsonMapping, resource: str) -> int:
    """How many devices of an extended resource a pod requests, such as GPUs by `nvidia.com/gpu`.

    Raises ValueError for an unreadable amount, and for a part of a device.
    """
    return effective_requests(spec).get(resource, 0) // 1000


def requests_beside_devices(spec: JsonMapping, gpu_resource: str) -> Thousandths:
    """What a pod requests of its node beside devices: CPU, memory, the pod itself. Raises ValueError."""
    return {
        name: amount
        for name, amount in effective_requests(spec).items()
        if amount and name != gpu_resource and not name.startswith(CLASS_RESOURCE)
    }


def allocatable_of_node(node: JsonMapping) -> ResourceAmounts:
    """What pods may request of a node; capacity if it names nothing allocatable. Raises ValueError.

    It has nothing of a resource that it does not name.
    """
    status = node.get("status") or {}
    return _parse_amounts(status.get("allocatable") or status.get("capacity") or {})


def node_amounts(node: JsonMapping) -> Thousandths:
    """The same in the units of requests. Raises ValueError."""
    status = node.get("status") or {}
    written = repr((status.get("allocatable"), status.get("capacity")))
    return _remembered(written, lambda: allocatable_of_node(node))


def in_thousandths(amounts: Mapping[str, Fraction | int]) -> Thousandths:
    """Rounded up, as kube-scheduler rounds CPUs to thousandths and bytes to whole ones."""
    return {name: ceil(amount * 1000) for name, amount in amounts.items()}


def _container_requests(container: JsonMapping) -> ResourceAmounts:
    resources = container.get("resources") or {}
    return _parse_amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _parse_amounts(written: Mapping[str, Any]) -> ResourceAmounts:
    return ResourceAmounts({name: _parse_amount(name, value) for name, value in written.items()})


@lru_cache(maxsize=_MOST_REMEMBERED)
def _parse_amount(name: str, value: str | int | float) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{name} is {value!r}, and not a quantity")
    try:
        found = Quantity.parse(value)
    except ValueError as error:
        raise ValueError(f"{name} is {value!r}, and not a quantity") from error
    amount = found.unscaled * Fraction(10) ** found.scale
    if amount < 0:
        raise ValueError(f"{name} is {value!r}, and less than 0")
    # Extended resources have a prefix and come in whole numbers (Kubernetes, "Extended resources").
    if "/" in name and amount.denominator != 1:
        raise ValueError(f"{name} is {value!r}, and not a whole number")
    return amount
