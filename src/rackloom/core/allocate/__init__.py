"""A Kubernetes DRA allocator that explains itself; usable without the rest of Rackloom.

The public names below are all that a user needs. Each is imported on first use (PEP 562), so that reading
objects loads neither the CEL compiler nor the search.

Allocation follows kube-scheduler's structured allocator: requests in order, devices in the order of their
slices, depth-first search with backtracking. `explain` accounts for every device that a request did not get,
and names the nearest change with which it would. README.md has an example.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rackloom.core.allocate.allocator import SearchMode, allocate
    from rackloom.core.allocate.checker import AllocationChecker
    from rackloom.core.allocate.driver_slices import device_classes, slices_of
    from rackloom.core.allocate.eligibility import SelectorCache
    from rackloom.core.allocate.explanation import Explanation, explain, render_explanation
    from rackloom.core.allocate.fleet import Fleet
    from rackloom.core.allocate.inputs import DeviceId, Features, InUse, in_use_by
    from rackloom.core.allocate.objects import (
        AllocationResult,
        DeviceClass,
        Node,
        ObjectMeta,
        ResourceClaim,
        ResourceClaimTemplate,
        ResourceSlice,
    )
    from rackloom.core.allocate.outcome import (
        Allocation,
        AllocationStopped,
        Cause,
        CauseKind,
        Cost,
        Fault,
        FaultScope,
        Optimality,
        Refusal,
    )
    from rackloom.core.allocate.planning import (
        AllocationFix,
        PlacedClaim,
        RefusedClaim,
        allocate_each,
        nearest_fix,
    )
    from rackloom.core.allocate.pools import SliceIndex
    from rackloom.core.allocate.quantity import Quantity

__all__ = ["Allocation", "AllocationChecker", "AllocationFix", "AllocationResult", "AllocationStopped"]
__all__ += ["Cause", "CauseKind", "Cost", "DeviceClass", "DeviceId", "Explanation", "Fault", "FaultScope"]
__all__ += ["Features", "Fleet", "InUse", "Node", "ObjectMeta", "Optimality", "PlacedClaim", "Quantity"]
__all__ += [
    "Refusal",
    "RefusedClaim",
    "ResourceClaim",
    "ResourceClaimTemplate",
    "ResourceSlice",
    "SearchMode",
]
__all__ += [
    "SelectorCache",
    "SliceIndex",
    "allocate",
    "allocate_each",
    "device_classes",
    "explain",
    "in_use_by",
]
__all__ += ["nearest_fix", "render_explanation", "slices_of"]

_MODULES = {
    "allocator": "SearchMode allocate",
    "checker": "AllocationChecker",
    "driver_slices": "device_classes slices_of",
    "eligibility": "SelectorCache",
    "explanation": "Explanation explain render_explanation",
    "fleet": "Fleet",
    "inputs": "DeviceId Features InUse in_use_by",
    "objects": "AllocationResult DeviceClass Node ObjectMeta ResourceClaim ResourceClaimTemplate "
    "ResourceSlice",
    "outcome": "Allocation AllocationStopped Cause CauseKind Cost Fault FaultScope Optimality Refusal",
    "planning": "AllocationFix PlacedClaim RefusedClaim allocate_each nearest_fix",
    "pools": "SliceIndex",
    "quantity": "Quantity",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
