"""A Kubernetes DRA allocator that explains itself; usable without the rest of Rackloom.

The public names below are all that a user needs. Each is imported on first use (PEP 562), so that reading
objects loads neither the CEL compiler nor the search.

Allocation follows kube-scheduler's structured allocator: requests in order, devices in the order of their
slices, depth-first search with backtracking. `explain` accounts for every device that a request did not get,
and names the nearest change with which it would.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rackloom.core.allocate.allocator import SearchMode, allocate
    from rackloom.core.allocate.checker import AllocationChecker
    from rackloom.core.allocate.driver_slices import device_classes, slices_of
    from rackloom.core.allocate.eligibility import SelectorCache
    from rackloom.core.allocate.explain import Explanation, explain, render_explanation
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
_MODULES = {
    "allocate": "allocator",
    "SearchMode": "allocator",
    "allocate_each": "planning",
    "PlacedClaim": "planning",
    "RefusedClaim": "planning",
    "nearest_fix": "planning",
    "AllocationFix": "planning",
    "explain": "explain",
    "render_explanation": "explain",
    "Explanation": "explain",
    "Fleet": "fleet",
    "AllocationChecker": "checker",
    "Allocation": "outcome",
    "Refusal": "outcome",
    "Fault": "outcome",
    "FaultScope": "outcome",
    "AllocationStopped": "outcome",
    "Cost": "outcome",
    "Optimality": "outcome",
    "Cause": "outcome",
    "CauseKind": "outcome",
    "Features": "inputs",
    "InUse": "inputs",
    "DeviceId": "inputs",
    "in_use_by": "inputs",
    "SliceIndex": "pools",
    "SelectorCache": "eligibility",
    "Quantity": "quantity",
    "Node": "objects",
    "ObjectMeta": "objects",
    "DeviceClass": "objects",
    "ResourceClaim": "objects",
    "ResourceClaimTemplate": "objects",
    "ResourceSlice": "objects",
    "AllocationResult": "objects",
    "slices_of": "driver_slices",
    "device_classes": "driver_slices",
}
__all__ = [
    "Allocation",
    "AllocationChecker",
    "AllocationFix",
    "AllocationResult",
    "AllocationStopped",
    "Cause",
    "CauseKind",
    "Cost",
    "DeviceClass",
    "DeviceId",
    "Explanation",
    "Fault",
    "FaultScope",
    "Features",
    "Fleet",
    "InUse",
    "Node",
    "ObjectMeta",
    "Optimality",
    "PlacedClaim",
    "Quantity",
    "Refusal",
    "RefusedClaim",
    "ResourceClaim",
    "ResourceClaimTemplate",
    "ResourceSlice",
    "SearchMode",
    "SelectorCache",
    "SliceIndex",
    "allocate",
    "allocate_each",
    "device_classes",
    "explain",
    "in_use_by",
    "nearest_fix",
    "render_explanation",
    "slices_of",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
