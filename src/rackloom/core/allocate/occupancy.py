"""The devices in use on one node, by position.

Two nodes of one kind answer a claim alike if the same positions are used the same way: their `key` is then
equal. Dedicated devices are bits of one number, so a node without shared devices has a number for its key.
For shared devices it counts the shares and adds up the amounts that these took.

It also keeps the remaining amounts of counters that devices draw from (`counters`), to avoid a search that
would find too little.

Positions are those of the search. After them come the devices of other nodes that draw from the counters
of this node's pools (`NodeDevices.elsewhere`): they change the remaining amounts here.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain

from rackloom.core.allocate.capacity import CounterBook, CounterKey, counter_draws
from rackloom.core.allocate.inputs import DeviceId, InUse
from rackloom.core.allocate.objects import AllocationResult, Device, DeviceResult
from rackloom.core.allocate.pools import Pool, PoolKey
from rackloom.core.allocate.problem import NodeDevices
from rackloom.core.allocate.quantity import Quantity, exact_value

_BILLION = 10**9

CounterDraws = tuple[tuple[CounterKey, int], ...]
"""The draws of a device, in billionths: quantities have no finer part."""


def draws_of(device: Device) -> CounterDraws:
    """The amount that a device draws from each counter. Raises AllocationStopped if one is no quantity."""
    return tuple((key, int(amount * _BILLION)) for key, amount in counter_draws(device))


class CounterLevels:
    """The remaining amounts of a pool's counters, as in `CounterBook`, kept while devices come and go."""

    __slots__ = ("_left", "_overdrawn")

    def __init__(self, book: CounterBook) -> None:
        self._left = {key: int(amount * _BILLION) for key, amount in book.left.items()}
        self._overdrawn = sum(left < 0 for left in self._left.values())

    def suffice(self, draws: CounterDraws, also: Sequence[CounterDraws] = ()) -> bool:
        """Whether there is enough for one more device, after others."""
        if self._overdrawn:
            return False
        left = self._left
        if also:
            left = dict(left)
            for key, amount in chain.from_iterable(also):
                left[key] -= amount
        return all(amount <= left[key] for key, amount in draws)

    def move(self, draws: CounterDraws, sign: int) -> None:
        """Take draws away (-1) or put them back (1)."""
        for key, amount in draws:
            before = self._left[key]
            self._left[key] = after = before + sign * amount
            self._overdrawn += (after < 0) - (before < 0)


class NodeOccupancy:
    """Dedicated devices as bits, and the number of shares of shared ones with the amounts that they took."""

    __slots__ = ("_again", "_devices", "_key", "_levels", "_shares", "_taken", "_takers", "dedicated")

    def __init__(self, devices: NodeDevices) -> None:
        self._devices = devices
        self.dedicated = 0
        """One bit per position: devices that are held whole."""
        self._again: dict[int, int] = {}
        """The number of further holders of such a device. No search allows it, but clusters may report it."""
        self._shares: dict[int, int] = {}
        self._taken: dict[tuple[int, str], Fraction] = {}
        self._takers: dict[tuple[int, str], int] = {}
        """The number of shares that took of a capacity. A share may take 0, and counts."""
        self._key: Hashable | None = 0
        self._levels: dict[PoolKey, CounterLevels] = {}

    def key(self) -> Hashable:
        """Equal if the same positions are used the same way."""
        if self._key is None:
            shared = frozenset(self._shares.items()), frozenset(self._taken.items())
            self._key = (self.dedicated, *shared) if self._shares else self.dedicated
        return self._key

    @property
    def full(self) -> bool:
        """Whether every device of the node is held whole."""
        everything = (1 << len(self._devices.candidates)) - 1
        return self.dedicated & everything == everything

    def add(self, results: Iterable[AllocationResult], *, shares: bool) -> None:
        """Add results. Admin access holds nothing. Without `shares` each result is a whole device."""
        self._key = None
        for at, device in self._held(results):
            if not self.holds(at):
                self._draw(at, -1)
            if device.share_id is None or not shares:
                if self.dedicated >> at & 1:
                    self._again[at] = self._again.get(at, 0) + 1
                self.dedicated |= 1 << at
                continue
            self._shares[at] = self._shares.get(at, 0) + 1
            for name, amount in (device.consumed_capacity or {}).items():
                self._taken[at, name] = self._taken.get((at, name), Fraction(0)) + exact_value(amount)
                self._takers[at, name] = self._takers.get((at, name), 0) + 1

    def remove(self, results: Iterable[AllocationResult], *, shares: bool) -> None:
        """Remove the results of allocations that ended."""
        self._key = None
        for at, device in self._held(results):
            held = self.holds(at)
            if device.share_id is None or not shares:
                # The device is free once the last of those that hold it gave it back.
                more = self._again.pop(at, 0)
                if more > 1:
                    self._again[at] = more - 1
                if not more:
                    self.dedicated &= ~(1 << at)
            elif at in self._shares:
                self._return(at, device)
            if held and not self.holds(at):
                self._draw(at, 1)

    def take_over(self, other: "NodeOccupancy") -> bool:
        """Copy the use of the same devices from `other`. Returns whether any are in use."""
        positions, ids = self._devices.positions, other._devices.ids
        here = {at: positions[ids[at]] for at in other._in_use() if ids[at] in positions}
        if not here:
            return False
        self._key = None
        for before, at in here.items():
            self.dedicated |= (other.dedicated >> before & 1) << at
            for own, others in ((self._again, other._again), (self._shares, other._shares)):
                if before in others:
                    own[at] = others[before]
        for key, amount in other._taken.items():
            if key[0] in here:
                self._taken[here[key[0]], key[1]] = amount
                self._takers[here[key[0]], key[1]] = other._takers[key]
        return True

    def devices_in_use(self) -> list[DeviceId]:
        """The devices that are held, whole or by a share."""
        return [self._devices.ids[at] for at in self._in_use()]

    def _in_use(self) -> Iterable[int]:
        return {*_bits(self.dedicated), *self._shares}

    def holds(self, at: int) -> bool:
        """Whether the device is held, whole or by a share."""
        return bool(self.dedicated >> at & 1) or at in self._shares

    def counters(self, pool: Pool) -> CounterLevels:
        """The remaining amounts of a pool's counters. Raises AllocationStopped if one is no quantity."""
        levels = self._levels.get(pool.key)
        if levels is None:
            positions = self._devices.positions
            book = CounterBook(pool, lambda device: self.holds(positions[device]))
            levels = self._levels[pool.key] = CounterLevels(book)
        return levels

    def _draw(self, at: int, sign: int) -> None:
        """Note that a device came into use (-1), or is free again (1)."""
        if not self._levels:
            return
        if at >= len(self._devices.candidates):
            # A device of another node: the next call of `counters` finds the pools that it draws from.
            self._levels.clear()
            return
        candidate = self._devices.candidates[at]
        if not candidate.device.consumes_counters:
            return
        if candidate.pool.elsewhere:
            self._levels.pop(candidate.pool.key, None)
        elif candidate.pool.key in self._levels:
            self._levels[candidate.pool.key].move(draws_of(candidate.device), sign)

    def _return(self, at: int, device_result: DeviceResult) -> None:
        self._shares[at] -= 1
        for name, amount in (device_result.consumed_capacity or {}).items():
            key = at, name
            # A cluster may give back a capacity that was never noted as taken.
            if key not in self._takers:
                continue
            self._taken[key] -= exact_value(amount)
            self._takers[key] -= 1
            if not self._takers[key]:
                del self._taken[key], self._takers[key]
        if not self._shares[at]:
            del self._shares[at]
            # The last share returns everything, also capacity that no result named again.
            for key in [key for key in self._taken if key[0] == at]:
                del self._taken[key], self._takers[key]

    def taken(self, at: int, name: str) -> Fraction:
        """The amount that shares took of a capacity of one device."""
        return self._taken.get((at, name), _NOTHING)

    def as_in_use(self) -> InUse:
        """The same as books of devices."""
        ids = self._devices.ids
        consumed: dict[DeviceId, dict[str, str]] = {}
        for (at, name), amount in self._taken.items():
            # Quantities have no more than nine decimals, and so have their sums.
            consumed.setdefault(ids[at], {})[name] = str(Quantity(int(amount * _BILLION), -9))
        return InUse(
            dedicated=frozenset(ids[at] for at in _bits(self.dedicated)),
            shared=frozenset(ids[at] for at in self._shares),
            consumed=consumed,
        )

    def _held(self, results: Iterable[AllocationResult]) -> Iterator[tuple[int, DeviceResult]]:
        """The devices of results that hold one, with their positions. Devices that are gone are left out."""
        for result in chain.from_iterable(allocation.devices.results for allocation in results):
            position = self._devices.positions.get(DeviceId.of(result))
            if position is not None and not result.admin_access:
                yield position, result


_NOTHING = Fraction(0)


def _bits(number: int) -> Iterator[int]:
    """The positions of the bits that are set."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
