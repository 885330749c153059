"""DeviceTaintRules: taints that an administrator puts on devices of any driver (KEP-5055).

kube-scheduler allocates as if each device that a rule selects had the rule's taint among those that its
driver publishes. `with_taint_rules` gives slices with these taints, so the allocator does not need the rules.
A rule without a selector selects nothing. Every field that a selector gives must be equal, and an empty
selector selects all devices. Rules of 1.34 that select by class or by CEL expression (`v1alpha3`) cannot be
read, since later servers dropped both: in a file they are refused, in a cluster left out.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import (
    ApiValue,
    DeviceTaint,
    ObjectMeta,
    ResourceSlice,
)


class DeviceTaintSelector(ApiValue, frozen=True, kw_only=True):
    """The devices that a rule applies to. None is any."""

    driver: str | None = None
    pool: str | None = None
    device: str | None = None


class DeviceTaintRuleSpec(ApiValue, frozen=True, kw_only=True):
    """A taint, and the devices that get it."""

    device_selector: DeviceTaintSelector | None = None
    taint: DeviceTaint


class DeviceTaintRule(ApiValue, frozen=True, kw_only=True):
    """One rule."""

    metadata: ObjectMeta
    spec: DeviceTaintRuleSpec

    def concerns(self, driver: str, pool: str) -> bool:
        """Whether it may select a device of a pool."""
        selector = self.spec.device_selector
        return selector is not None and selector.driver in (None, driver) and selector.pool in (None, pool)

    def selects(self, driver: str, pool: str, device: str) -> bool:
        """Whether a device gets its taint."""
        selector = self.spec.device_selector
        return selector is not None and self.concerns(driver, pool) and selector.device in (None, device)


class WithheldDevice(msgspec.Struct, frozen=True):
    """A device that a claim would get if a rule did not taint it."""

    rule: str
    node: str
    driver: str
    device: str


class _ServedName(msgspec.Struct):
    name: str


class _ServedRule(msgspec.Struct):
    """A rule as a server sends it. Its metadata may have fields that are newer than this program."""

    metadata: _ServedName
    spec: DeviceTaintRuleSpec


def readable_rules(objects: Iterable[Mapping[str, Any]]) -> Iterator[DeviceTaintRule]:
    """The rules among the DeviceTaintRules of a cluster, without those that cannot be read."""
    for obj in objects:
        with suppress(msgspec.ValidationError):
            served = msgspec.convert(obj, _ServedRule)
            yield DeviceTaintRule(metadata=ObjectMeta(name=served.metadata.name), spec=served.spec)


def with_taint_rules(
    slices: Iterable[ResourceSlice], rules: Sequence[DeviceTaintRule]
) -> tuple[ResourceSlice, ...]:
    """The slices with the taints of the rules. A slice without a selected device stays the same object."""
    found = list(slices)
    for number, resource_slice in enumerate(found if rules else ()):
        spec = resource_slice.spec
        devices = list(spec.devices)
        for at, device in enumerate(spec.devices):
            selecting = (rule for rule in rules if rule.selects(spec.driver, spec.pool.name, device.name))
            added = tuple(rule.spec.taint for rule in selecting)
            if added:
                devices[at] = replace(device, taints=(*device.taints, *added))
        # Keep the object if nothing changed: a comparison with the last reading then sees no difference.
        if any(after is not before for after, before in zip(devices, spec.devices, strict=True)):
            found[number] = replace(resource_slice, spec=replace(spec, devices=tuple(devices)))
    return tuple(found)
