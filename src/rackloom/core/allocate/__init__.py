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
    from rackloom.core.allocate.allocator import SearchMode as SearchMode
    from rackloom.core.allocate.allocator import allocate as allocate
    from rackloom.core.allocate.checker import AllocationChecker as AllocationChecker
    from rackloom.core.allocate.driver_slices import device_classes as device_classes
    from rackloom.core.allocate.driver_slices import slices_of as slices_of
    from rackloom.core.allocate.eligibility import SelectorCache as SelectorCache
    from rackloom.core.allocate.explanation import Explanation as Explanation
    from rackloom.core.allocate.explanation import explain as explain
    from rackloom.core.allocate.explanation import render_explanation as render_explanation
    from rackloom.core.allocate.fleet import Fleet as Fleet
    from rackloom.core.allocate.inputs import DeviceId as DeviceId
    from rackloom.core.allocate.inputs import Features as Features
    from rackloom.core.allocate.inputs import InUse as InUse
    from rackloom.core.allocate.inputs import in_use_by as in_use_by
    from rackloom.core.allocate.objects import AllocationResult as AllocationResult
    from rackloom.core.allocate.objects import DeviceClass as DeviceClass
    from rackloom.core.allocate.objects import Node as Node
    from rackloom.core.allocate.objects import ObjectMeta as ObjectMeta
    from rackloom.core.allocate.objects import ResourceClaim as ResourceClaim
    from rackloom.core.allocate.objects import ResourceClaimTemplate as ResourceClaimTemplate
    from rackloom.core.allocate.objects import ResourceSlice as ResourceSlice
    from rackloom.core.allocate.outcome import Allocation as Allocation
    from rackloom.core.allocate.outcome import AllocationStopped as AllocationStopped
    from rackloom.core.allocate.outcome import Cause as Cause
    from rackloom.core.allocate.outcome import CauseKind as CauseKind
    from rackloom.core.allocate.outcome import Cost as Cost
    from rackloom.core.allocate.outcome import Fault as Fault
    from rackloom.core.allocate.outcome import FaultScope as FaultScope
    from rackloom.core.allocate.outcome import Optimality as Optimality
    from rackloom.core.allocate.outcome import Refusal as Refusal
    from rackloom.core.allocate.planning import AllocationFix as AllocationFix
    from rackloom.core.allocate.planning import PlacedClaim as PlacedClaim
    from rackloom.core.allocate.planning import RefusedClaim as RefusedClaim
    from rackloom.core.allocate.planning import allocate_each as allocate_each
    from rackloom.core.allocate.planning import nearest_fix as nearest_fix
    from rackloom.core.allocate.pools import SliceIndex as SliceIndex
    from rackloom.core.allocate.quantity import Quantity as Quantity

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
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
