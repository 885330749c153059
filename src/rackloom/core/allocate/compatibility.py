"""Compatibility groups: which partitions of a counter set may be in use together.

A device may name groups for each counter set that it draws from. On each set, all devices in use must
have a group in common: one that all of them have, not one per pair. A device that names no group fits
only with devices that name none. Devices of different sets are never compared.

`GroupBook` keeps the groups that are still common to the devices in use, for each counter set of one
pool. Devices that earlier allocations hold count as their driver publishes them now. The device taken
last is given back first, which restores the groups exactly.

Drivers may change a slice under devices in use, so that those devices no longer fit together. The rules
are then upstream's: if no group is common, no device may enter. If some devices name groups and others
name none, the first one that is published decides.
"""

from collections.abc import Callable, Iterator

from rackloom.core.allocate.inputs import DeviceId
from rackloom.core.allocate.objects import Device
from rackloom.core.allocate.pools import Pool

CommonGroups = frozenset[str] | None
"""The groups that all devices of a counter set have, or None if they name none."""


class GroupBook:
    """The groups that are common to the devices in use, for each counter set of one pool."""

    def __init__(self, pool: Pool, in_use: Callable[[DeviceId], bool]) -> None:
        self._common: dict[str, CommonGroups] = {}
        """A set that no device in use draws from is absent."""
        self._earlier: list[dict[str, CommonGroups]] = []
        """The state before each `take`, with the latest at the end."""
        for source in (*pool.slices, *pool.elsewhere):
            for device in source.spec.devices:
                if device.consumes_counters and in_use(DeviceId(pool.driver, pool.name, device.name)):
                    self._common = self._with(device)
        self.at_first = dict(self._common)
        """The groups that are common to the devices that were in use before."""

    def conflict(self, device: Device) -> str | None:
        """The counter set that keeps the device out, and why. None if it may be in use with the others."""
        for name, groups in _groups_by_set(device):
            if not self._admits(name, groups):
                common = self._common[name]
                wanted = "no group" if groups is None else _listed(groups)
                there = "name no group" if common is None else f"have {_listed(common)} in common"
                return f"{name}: names {wanted}, those in use {there}"
        return None

    def admits(self, device: Device) -> bool:
        """Whether the device may be in use with the others. If not, `conflict` has the reason."""
        return all(self._admits(name, groups) for name, groups in _groups_by_set(device))

    def take(self, device: Device) -> None:
        """Note that a device came into use. `admits` must have allowed it."""
        self._earlier.append(self._common)
        self._common = self._with(device)

    def give_back(self) -> None:
        """Note that the device taken last is free again."""
        self._common = self._earlier.pop()

    def _admits(self, name: str, groups: CommonGroups) -> bool:
        if name not in self._common:
            return True
        common = self._common[name]
        if common is None or groups is None:
            return common is groups
        return not common.isdisjoint(groups)

    def _with(self, device: Device) -> dict[str, CommonGroups]:
        """The common groups if the device is in use too."""
        common = dict(self._common)
        for name, groups in _groups_by_set(device):
            before = common.setdefault(name, groups)
            if before is not None and groups is not None:
                common[name] = before & groups
        return common


def _groups_by_set(device: Device) -> Iterator[tuple[str, CommonGroups]]:
    """The groups of a device on each counter set that it draws from."""
    for use in device.consumes_counters:
        yield use.counter_set, frozenset(use.compatibility_groups) or None


def _listed(groups: frozenset[str]) -> str:
    return ", ".join(sorted(groups)) or "nothing"
