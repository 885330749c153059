"""What is taken while a search goes on: every choice is entered, and can be struck out again.

The books of devices, counters, capacity and constraints change only here, and only together, so a choice that
one of them refuses leaves no trace in the others.
"""

from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction

import msgspec

from rackloom.claim.allocate.amounts import number
from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.capacity import Consumption, consumption, shortage
from rackloom.claim.allocate.causes import Cause, Kind
from rackloom.claim.allocate.constraints import Constraint
from rackloom.claim.allocate.counters import CounterBook
from rackloom.claim.allocate.features import Features
from rackloom.claim.allocate.objects import Amount
from rackloom.claim.allocate.pools import Pool, PoolKey
from rackloom.claim.allocate.requests import Ask
from rackloom.claim.allocate.taints import blocking_taint
from rackloom.claim.allocate.use import DeviceId, InUse


class Entry(msgspec.Struct, frozen=True, eq=False):
    """A device given to an ask."""

    ask: Ask
    candidate: Candidate
    consumption: Consumption
    charged: bool
    """Whether its counters were charged: a further share of a device is not charged again."""


class Ledger:
    """All books of one allocation."""

    def __init__(
        self,
        pools: Sequence[Pool],
        constraints: Sequence[Sequence[Constraint]],
        state: InUse,
        features: Features,
    ) -> None:
        self._features = features
        self._state = state
        self._pools = {pool.key: pool for pool in pools}
        self._constraints = constraints
        self._books: dict[PoolKey, CounterBook] = {}
        self._holders: dict[Candidate, list[int]] = {}
        self._taken: dict[DeviceId, dict[str, Fraction]] = {}
        self._shares: dict[Candidate, int] = {}
        self._static: dict[tuple[Hashable, Candidate], Consumption | Cause] = {}
        self._covering: dict[Ask, list[Constraint]] = {}
        self.entries: list[Entry] = []
        self.version = 0
        """Changes with every entry and every strike."""

    def in_use(self, ask: Ask, candidate: Candidate) -> Cause | None:
        """Whether somebody holds the device in a way that keeps it from `ask`.

        Admin access ignores use, but takes no device twice for one claim.
        """
        holders = self._holders.get(candidate, ())
        if ask.admin:
            return Cause(Kind.IN_USE, "by the same claim") if ask.claim in holders else None
        if holders:
            return Cause(Kind.IN_USE, "by this pod")
        return self._held_before(candidate)

    def _held_before(self, candidate: Candidate) -> Cause | None:
        device, state = candidate.id, self._state
        # A device does not change between dedicated and shared while anybody holds it.
        held = device in state.dedicated
        if not candidate.shareable:
            held = held or device in state.shared or device in state.consumed
        return Cause(Kind.IN_USE, ", ".join(state.holders.get(device, ()))) if held else None

    def held(self, candidate: Candidate) -> bool:
        """Whether this allocation gave the whole device away."""
        return bool(self._holders.get(candidate))

    def free_before(self, candidate: Candidate) -> bool:
        """Whether nobody held the device before this allocation in a way that keeps others from it."""
        return self._held_before(candidate) is None

    def mark(self, candidate: Candidate) -> Hashable:
        """What this allocation did to the device: equal for devices of one kind that fared alike."""
        if candidate.shareable:
            return self._shares.get(candidate, 0), frozenset(self._gone(candidate.id).items())
        return frozenset(self._holders.get(candidate, ()))

    def suits(self, ask: Ask, candidate: Candidate) -> Consumption | Cause:
        """What the device would give for `ask` if it were free, or why it never can: nothing here changes."""
        key = (ask.likeness, candidate)
        if key not in self._static:
            self._static[key] = self._suits(ask, candidate)
        return self._static[key]

    def _suits(self, ask: Ask, candidate: Candidate) -> Consumption | Cause:
        device = candidate.device
        given: Consumption | Cause = {}
        if self._features.consumable_capacity:
            given = consumption(ask.amounts, device)
        if isinstance(given, Cause):
            return given
        if device.consumes_counters and not self._features.partitionable_devices:
            return Cause(Kind.COUNTERS, "the feature PartitionableDevices is off")
        taint = blocking_taint(device, ask.tolerations) if self._features.device_taints else None
        if taint is not None:
            value = f"={taint.value}" if taint.value else ""
            return Cause(Kind.TAINT, f"{taint.key}{value}:{taint.effect}")
        return given

    def has_capacity(self, ask: Ask, candidate: Candidate) -> bool:
        """Whether the device has the capacity that `ask` wants, as things stand."""
        if not self._features.consumable_capacity:
            return True
        given = consumption(ask.amounts, candidate.device)
        taken = self._gone(candidate.id)
        return not isinstance(given, Cause) and shortage(candidate.device, taken, given) is None

    def short(self, ask: Ask, candidate: Candidate) -> Cause | None:
        """Why what is left of the device or of its pool's counters does not do for `ask` now."""
        given = self.suits(ask, candidate)
        if isinstance(given, Cause):
            return given
        cause = shortage(candidate.device, self._gone(candidate.id), given)
        if cause is None and self._draws(candidate):
            counters = self.book(candidate).short(candidate.device)
            cause = Cause(Kind.COUNTERS, counters) if counters else None
        return cause

    def broken(self, ask: Ask, candidate: Candidate) -> Cause | None:
        """Which constraint keeps the device from `ask` now."""
        for constraint in self.constraints(ask):
            values = constraint.values(candidate)
            if values is None:
                return Cause(Kind.ATTRIBUTE_MISSING, constraint.attribute)
            if not constraint.allows(values):
                return Cause(Kind.CONSTRAINT, str(constraint))
        return None

    def constraints(self, ask: Ask) -> list[Constraint]:
        """The constraints that cover `ask`."""
        if ask not in self._covering:
            own = self._constraints[ask.claim]
            self._covering[ask] = [one for one in own if ask.named_in(one.requests)]
        return self._covering[ask]

    def enter(self, ask: Ask, candidate: Candidate) -> Cause | None:
        """Give the device to `ask`, or say why not and change nothing. The caller asked the selectors."""
        given = self.suits(ask, candidate)
        if isinstance(given, Cause):
            return given
        cause = self.in_use(ask, candidate) or self.short(ask, candidate) or self.broken(ask, candidate)
        if cause is not None:
            return cause
        for constraint in self.constraints(ask):
            constraint.add(constraint.values(candidate) or frozenset())
        charged = self._draws(candidate)
        if charged:
            self.book(candidate).charge(candidate.device)
        self._hold(ask, candidate, given)
        self.entries.append(Entry(ask, candidate, given, charged))
        self.version += 1
        return None

    def strike(self) -> None:
        """Undo the last entry."""
        entry = self.entries.pop()
        self.version += 1
        candidate = entry.candidate
        for constraint in self.constraints(entry.ask):
            constraint.undo()
        if entry.charged:
            self.book(candidate).refund(candidate.device)
        if candidate.shareable:
            self._shares[candidate] -= 1
            self._move(candidate, entry.consumption, -1)
        else:
            self._holders[candidate].pop()

    def clear(self) -> None:
        """Undo all entries."""
        while self.entries:
            self.strike()

    def book(self, candidate: Candidate) -> CounterBook:
        """The counters of the device's pool."""
        return self._book(candidate.pool.key)

    def _book(self, pool: PoolKey) -> CounterBook:
        if pool not in self._books:
            self._books[pool] = CounterBook(self._pools[pool], self.ever_held)
        return self._books[pool]

    def left_of(self, pool: PoolKey, counter: str) -> Fraction:
        """What is left of the counters of one name, over all sets of a pool."""
        return sum(
            (left for (_, name), left in self._book(pool).left.items() if name == counter), Fraction(0)
        )

    def _gone(self, device: DeviceId) -> dict[str, Fraction]:
        """Capacity of a device that is taken, before or now."""
        if device not in self._taken:
            self._taken[device] = {name: number(used) for name, used in self.used_before(device).items()}
        return self._taken[device]

    def used_before(self, device: DeviceId) -> Mapping[str, Amount]:
        """Capacity of a device that earlier allocations took."""
        return self._state.consumed.get(device, {})

    def _draws(self, candidate: Candidate) -> bool:
        """Whether giving the device charges its counters: the first share of it does."""
        if not candidate.device.consumes_counters:
            return False
        return not (
            candidate.shareable and (self._shares.get(candidate, 0) or self.charged_before(candidate))
        )

    def charged_before(self, candidate: Candidate) -> bool:
        """Whether shares in use already pay for the device's counters: those that took capacity do."""
        return candidate.id in self._state.consumed

    def ever_held(self, device: DeviceId) -> bool:
        """Whether anybody held the device, or a share of it, before this allocation."""
        state = self._state
        return device in state.dedicated or device in state.shared or device in state.consumed

    def _hold(self, ask: Ask, candidate: Candidate, given: Consumption) -> None:
        if candidate.shareable:
            self._shares[candidate] = self._shares.get(candidate, 0) + 1
            self._move(candidate, given, 1)
        else:
            self._holders.setdefault(candidate, []).append(ask.claim)

    def _move(self, candidate: Candidate, given: Consumption, sign: int) -> None:
        book = self._gone(candidate.id)
        for name, amount in given.items():
            book[name] = book.get(name, Fraction(0)) + sign * number(amount)
