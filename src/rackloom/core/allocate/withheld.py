"""The devices that DeviceTaintRules keep from pending claims.

A claim is held up by rules if it finds no devices as things are, and would find some without the rules. The
devices that it would get then, and the rules that taint them, are the answer. Each claim is tried alone and
on any node: other claims of its pod, and the pod's requirements on nodes, are not looked at.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from rackloom.core.allocate.eligibility import blocking_taint
from rackloom.core.allocate.fleet import Fleet
from rackloom.core.allocate.objects import (
    AllocationResult,
    Device,
    DeviceClass,
    Node,
    ResourceClaim,
    ResourceSlice,
)
from rackloom.core.allocate.outcome import Allocation
from rackloom.core.allocate.taint_rules import DeviceTaintRule, WithheldDevice, with_taint_rules


class DeviceSupply(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of a cluster, and those that claims hold."""

    nodes: tuple[Node, ...]
    classes: tuple[DeviceClass, ...]
    slices: tuple[ResourceSlice, ...]
    """As drivers publish them."""
    in_use: tuple[AllocationResult, ...]
    rules: tuple[DeviceTaintRule, ...]


def withheld_devices(
    claims: Iterable[ResourceClaim], supply: DeviceSupply
) -> list[tuple[WithheldDevice, ...]]:
    """The devices that the rules keep from each claim. Empty if the rules do not hold it up."""
    tainted = _fleet(supply, with_taint_rules(supply.slices, supply.rules))
    untainted = _fleet(supply, supply.slices)
    found = []
    for claim in claims:
        served = isinstance(tainted.find([claim]), Allocation)
        without = None if served else untainted.find([claim])
        found.append(tuple(_withheld(without, supply.rules)) if isinstance(without, Allocation) else ())
    return found


def _fleet(supply: DeviceSupply, slices: Sequence[ResourceSlice]) -> Fleet:
    fleet = Fleet(supply.nodes, supply.classes, slices)
    fleet.occupy(supply.in_use)
    return fleet


def _withheld(given: Allocation, rules: Sequence[DeviceTaintRule]) -> Iterator[WithheldDevice]:
    for result in (device for each in given.results for device in each.devices.results):
        for rule in rules:
            if rule.selects(result.driver, result.pool, result.device):
                tainted = Device(name=result.device, taints=(rule.spec.taint,))
                if blocking_taint(tainted, result.tolerations) is not None:
                    yield WithheldDevice(rule.metadata.name, given.node, result.driver, result.device)
