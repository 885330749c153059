"""Tentative assignments of a search: entered together, undone one by one in reverse order.

`AllocationLedger` holds the state that changes while devices are chosen: holders of devices, consumed
capacity, counters, compatibility groups and constraints. `enter` first checks whether the device can ever
serve (policy of its capacities, taints), then use, capacity, groups, counters and constraints. It then
updates all of them, or returns the cause and changes nothing. `strike` undoes the last entry exactly.
`version` changes with every step, so that derived values can detect that they are stale.

A `Constraint` is matchAttribute or distinctAttribute. A set of devices that breaks a constraint stays
broken when devices are added, so each device is checked as it is chosen. Matching devices must all share
one value (one that all have, not one per pair). Distinct devices share none, pair by pair. A device
without the attribute breaks both. If a request derives the attribute, its expression gives the value, and
a published value is ignored. An error of the expression stops the allocation. The constraint keeps a
stack of value sets, and undoing pops it.

Three upstream rules shape the ledger. Admin access ignores use, but takes no device twice for one
claim. A device does not change between dedicated and shared while it is held. Only the first share of a
device is charged to its counters.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction

import msgspec

from rackloom.core.allocate.capacity import Consumption, CounterBook, capacity_shortage, consumption_of
from rackloom.core.allocate.cel.errors import CompileError, EvaluationError
from rackloom.core.allocate.compatibility import GroupBook
from rackloom.core.allocate.eligibility import CandidateDevice, SelectorCache, blocking_taint
from rackloom.core.allocate.inputs import DeviceId, Features, InUse, RequestAlternative, claim_title
from rackloom.core.allocate.objects import Amount, Device, DeviceAttribute, ResourceClaim
from rackloom.core.allocate.outcome import AllocationStopped, Cause, CauseKind
from rackloom.core.allocate.pools import Pool, PoolKey
from rackloom.core.allocate.quantity import exact_value

# Constraints of a claim, each a stack of the values so far.


AttributeValues = frozenset[tuple[str, Hashable]]
"""The values of an attribute with their types. Empty if no value of a known type is set."""


def attribute_values(attribute: DeviceAttribute, *, lists: bool) -> AttributeValues:
    """The values of an attribute. Lists count only if `lists` is set, and a scalar is a list of one."""
    # Values keep their type: the integer 1, the text "1" and the version 1 are three values.
    if lists:
        ints, strings = ("int", attribute.ints), ("string", attribute.strings)
        for kind, values in (ints, ("bool", attribute.bools), strings, ("version", attribute.versions)):
            if values:
                return frozenset((kind, value) for value in values)
    string, integer = ("string", attribute.string), ("int", attribute.int_)
    for kind, single in (string, integer, ("bool", attribute.bool_), ("version", attribute.version)):
        if single is not None:
            return frozenset([(kind, single)])
    return frozenset()


class Constraint:
    """One constraint, while devices are chosen.

    Matching devices all have one value in common (one that all of them have, not one per pair). Distinct
    devices have none in common, pair by pair. A device without the attribute breaks both.
    """

    def __init__(
        self,
        attribute: str,
        requests: tuple[str, ...],
        *,
        distinct: bool,
        lists: bool,
        known: dict[CandidateDevice, AttributeValues | None] | None = None,
        selectors: SelectorCache | None = None,
    ) -> None:
        """`known` is shared by constraints of one attribute, because N pairs have N of them.

        `selectors` evaluates derived attributes.
        """
        self.attribute = attribute
        self.requests = requests
        self.distinct = distinct
        self._lists = lists
        self._stack: list[AttributeValues] = []
        self._known = {} if known is None else known
        self._selectors = SelectorCache() if selectors is None else selectors
        self._derived: dict[tuple[str, CandidateDevice], AttributeValues] = {}

    def __str__(self) -> str:
        kind = "distinctAttribute" if self.distinct else "matchAttribute"
        scope = f" over {', '.join(self.requests)}" if self.requests else ""
        return f"{kind} {self.attribute}{scope}"

    def values(self, ask: RequestAlternative, candidate: CandidateDevice) -> AttributeValues | None:
        """The values to compare if the request gets the device, or None if it lacks the attribute.

        Raises AllocationStopped if the request derives the attribute and the expression fails.
        """
        if not ask.derived or self.attribute not in ask.derived:
            return self.published(candidate)
        values = self.derived(ask.derived[self.attribute], candidate)
        if isinstance(values, EvaluationError | CompileError):
            # An expression that does not compile fails on every device, so none is named.
            runs = isinstance(values, EvaluationError)
            fault = f"fails on device {candidate.id}" if runs else "does not compile"
            raise AllocationStopped(
                f"claim {ask.claim_name}, request {ask.name}: the derived attribute {self.attribute} {fault}:"
                f" {values}"
            )
        return values

    def derived(
        self, expression: str, candidate: CandidateDevice
    ) -> AttributeValues | CompileError | EvaluationError:
        """The values that an expression derives from a device. Errors are returned as values."""
        found = self._derived.get((expression, candidate))
        if found is None:
            attribute = self._selectors.derive(expression, candidate.view)
            # An error is not kept here: the selectors remember it.
            if not isinstance(attribute, DeviceAttribute):
                return attribute
            found = self._derived[expression, candidate] = attribute_values(attribute, lists=self._lists)
        return found

    def published(self, candidate: CandidateDevice) -> AttributeValues | None:
        """The values that the device publishes, or None if it lacks the attribute."""
        # None is a known value too: the device lacks the attribute.
        if candidate not in self._known:
            found = candidate.attribute(self.attribute)
            self._known[candidate] = None if found is None else attribute_values(found, lists=self._lists)
        return self._known[candidate]

    def allows(self, values: AttributeValues | None) -> bool:
        """Whether a device with these values could be added now."""
        if values is None:
            return False
        if not self._stack:
            # Upstream compares the first device with nothing, so even a value of a type that it cannot
            # compare passes. It checks that value only with list attributes.
            return bool(values) or not self._lists
        # Distinct devices are compared pair by pair, matching ones only with the values common to all so far.
        if self.distinct:
            return bool(values) and all(values.isdisjoint(earlier) for earlier in self._stack)
        return bool(self._stack[-1] & values)

    def add(self, values: AttributeValues) -> None:
        """Add a device with these values. `allows` must have passed them."""
        # matchAttribute keeps the values still common to all, distinctAttribute those of each device.
        together = values if self.distinct or not self._stack else self._stack[-1] & values
        self._stack.append(together)

    def undo(self) -> None:
        """Remove the device that was added last."""
        self._stack.pop()

    def values_so_far(self) -> AttributeValues:
        """The state that later checks depend on: the values still possible, or those used up if distinct."""
        return frozenset().union(*self._stack) if self.distinct else frozenset(*self._stack[-1:])

    @property
    def started(self) -> bool:
        """Whether a device was added."""
        return bool(self._stack)


def constraints_of(
    claim: ResourceClaim, features: Features, selectors: SelectorCache
) -> tuple[Constraint, ...]:
    """The constraints of a claim. Raises AllocationStopped if one is of an unknown kind."""
    known: defaultdict[str, dict[CandidateDevice, AttributeValues | None]] = defaultdict(dict)
    found = []
    for number, written in enumerate(claim.spec.devices.constraints):
        distinct = written.match_attribute is None
        attribute = written.distinct_attribute if distinct else written.match_attribute
        # A newer API may have kinds of constraints that this decoder drops. Ignoring one would break it.
        if attribute is None:
            raise AllocationStopped(
                f"claim {claim_title(claim)}, constraint #{number}:"
                f" empty constraint (unsupported constraint type?)"
            )
        constraint = Constraint(
            attribute,
            written.requests,
            distinct=distinct,
            lists=features.list_type_attributes,
            known=known[attribute],
            selectors=selectors,
        )
        found.append(constraint)
    return tuple(found)


# The ledger: all state that changes while devices are chosen.


class DeviceAssignment(msgspec.Struct, frozen=True, eq=False):
    """A device that is given to a request."""

    ask: RequestAlternative
    candidate: CandidateDevice
    consumption: Consumption
    charged: bool
    """Whether its counters were charged. Only the first share of a device is charged."""


def static_share(ask: RequestAlternative, device: Device, features: Features) -> Consumption | Cause:
    """The capacity that a device would give for a request if it were free, or why it never can serve."""
    given: Consumption | Cause = {}
    # Without the feature every device is given whole, and its published capacities are ignored.
    if features.consumable_capacity:
        given = consumption_of(ask.amounts, device)
    if isinstance(given, Cause):
        return given
    if device.consumes_counters and not features.partitionable_devices:
        return Cause(CauseKind.COUNTERS, "the feature PartitionableDevices is off")
    taint = blocking_taint(device, ask.tolerations) if features.device_taints else None
    if taint is not None:
        value = f"={taint.value}" if taint.value else ""
        return Cause(CauseKind.TAINT, f"{taint.key}{value}:{taint.effect}")
    return given


_GROUPS_APART = Cause(CauseKind.COMPATIBILITY_GROUPS, "apart")
_COUNTERS_SHORT = Cause(CauseKind.COUNTERS, "short")
_ATTRIBUTE_MISSING = Cause(CauseKind.ATTRIBUTE_MISSING, "missing")
_CONSTRAINT_BROKEN = Cause(CauseKind.CONSTRAINT, "broken")


class AllocationLedger:
    """The state of one allocation while devices are chosen."""

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
        self._groups: dict[PoolKey, GroupBook] = {}
        self._before: dict[CandidateDevice, Cause | None] = {}
        """The earlier use of devices, or None. Kept because a search checks the same devices repeatedly."""
        self._holders: dict[CandidateDevice, list[int]] = {}
        self._taken: dict[DeviceId, dict[str, Fraction]] = {}
        self._shares: dict[CandidateDevice, int] = {}
        self._static: dict[Hashable, dict[CandidateDevice, Consumption | Cause]] = {}
        self._static_of: dict[RequestAlternative, dict[CandidateDevice, Consumption | Cause]] = {}
        self._covering: dict[RequestAlternative, list[Constraint]] = {}
        self.entries: list[DeviceAssignment] = []
        self.version = 0
        """Changes with every entry and every strike."""

    def in_use(self, ask: RequestAlternative, candidate: CandidateDevice) -> Cause | None:
        """The cause if the device is held in a way that keeps it from the request, or None.

        Admin access ignores use, but takes no device twice for one claim.
        """
        holders = self._holders.get(candidate, ())
        if ask.admin:
            return Cause(CauseKind.IN_USE, "by the same claim") if ask.claim in holders else None
        if holders:
            return Cause(CauseKind.IN_USE, "by this pod")
        return self._held_before(candidate)

    def _held_before(self, candidate: CandidateDevice) -> Cause | None:
        if candidate not in self._before:
            device, state = candidate.id, self._state
            # A device does not change between dedicated and shared while a claim holds it. A share of a
            # device that one claim holds whole would break that claim's isolation.
            held = device in state.dedicated
            if not candidate.shareable:
                held = held or device in state.shared or device in state.consumed
            cause = Cause(CauseKind.IN_USE, ", ".join(state.holders.get(device, ()))) if held else None
            self._before[candidate] = cause
        return self._before[candidate]

    def held(self, candidate: CandidateDevice) -> bool:
        """Whether this allocation gave the whole device away."""
        return bool(self._holders.get(candidate))

    def free_before(self, candidate: CandidateDevice) -> bool:
        """Whether no earlier allocation holds the device in a way that keeps others from it."""
        return self._held_before(candidate) is None

    def mark(self, candidate: CandidateDevice) -> Hashable:
        """A key that is equal for devices of one shape that this allocation used alike."""
        # The number of shares matters beside the capacity: only the first share is charged to counters.
        if candidate.shareable:
            return self._shares.get(candidate, 0), frozenset(self._gone(candidate.id).items())
        return frozenset(self._holders.get(candidate, ()))

    def suits(self, ask: RequestAlternative, candidate: CandidateDevice) -> Consumption | Cause:
        """The cached result of `static_share`. No use of the device changes it."""
        # Requests of one likeness share their results, because a claim often repeats a request.
        known = self._static_of.get(ask)
        if known is None:
            known = self._static_of[ask] = self._static.setdefault(ask.likeness, {})
        if candidate not in known:
            known[candidate] = static_share(ask, candidate.device, self._features)
        return known[candidate]

    def has_capacity(self, ask: RequestAlternative, candidate: CandidateDevice) -> bool:
        """Whether the device now has the capacity that the request wants."""
        if not self._features.consumable_capacity:
            return True
        # Unlike `suits`, this ignores taints and counters: it decides which devices mode All includes.
        given = consumption_of(ask.amounts, candidate.device)
        taken = self._gone(candidate.id)
        return not isinstance(given, Cause) and capacity_shortage(candidate.device, taken, given) is None

    def short(self, ask: RequestAlternative, candidate: CandidateDevice) -> Cause | None:
        """Why the free part of the device or of its pool's counters is too small for the request, or None."""
        given = self.suits(ask, candidate)
        if isinstance(given, Cause):
            return given
        # The order of `enter`: capacity, then groups, then counters.
        cause = capacity_shortage(candidate.device, self._gone(candidate.id), given)
        if cause is None and self._draws(candidate):
            groups = self.groups(candidate)
            conflict = groups.conflict(candidate.device) if groups else None
            if conflict is not None:
                return Cause(CauseKind.COMPATIBILITY_GROUPS, conflict)
            counters = self.book(candidate).short(candidate.device)
            cause = Cause(CauseKind.COUNTERS, counters) if counters else None
        return cause

    def _scarce(self, candidate: CandidateDevice, given: Consumption) -> Cause | None:
        """The same as `short`, but without the text for groups and counters."""
        # Searches call this at every step. Most devices have neither capacities nor counters.
        cause = capacity_shortage(candidate.device, self._gone(candidate.id), given) if given else None
        if cause is None and self._draws(candidate):
            groups = self.groups(candidate)
            if groups is not None and not groups.admits(candidate.device):
                return _GROUPS_APART
            if not self.book(candidate).suffices(candidate.device):
                return _COUNTERS_SHORT
        return cause

    def broken(self, ask: RequestAlternative, candidate: CandidateDevice) -> Cause | None:
        """The constraint that keeps the device from the request now, or None."""
        for constraint in self.constraints(ask):
            # Here an error is the cause for one device. In a search it would stop the attempt.
            try:
                values = constraint.values(ask, candidate)
            except AllocationStopped as stop:
                return Cause(CauseKind.DERIVED_FAILS, stop.reason)
            if values is None:
                return Cause(CauseKind.ATTRIBUTE_MISSING, constraint.attribute)
            if not constraint.allows(values):
                return Cause(CauseKind.CONSTRAINT, str(constraint))
        return None

    def constraints(self, ask: RequestAlternative) -> list[Constraint]:
        """The constraints that cover the request."""
        if ask not in self._covering:
            own = self._constraints[ask.claim]
            self._covering[ask] = [constraint for constraint in own if ask.named_in(constraint.requests)]
        return self._covering[ask]

    def enter(self, ask: RequestAlternative, candidate: CandidateDevice) -> Cause | None:
        """Give the device to the request, or return the cause and change nothing. Run selectors first.

        The cause does not name the short counter or the broken constraint, because searches call this often
        and never show it. Raises AllocationStopped if a derived attribute fails.
        """
        # The result that never changes comes first. It is kept, because a search often meets the same pair.
        given = self.suits(ask, candidate)
        if isinstance(given, Cause):
            return given
        cause = self.in_use(ask, candidate) or self._scarce(candidate, given)
        if cause is not None:
            return cause
        for constraint in self.constraints(ask):
            values = constraint.values(ask, candidate)
            if values is None:
                return _ATTRIBUTE_MISSING
            if not constraint.allows(values):
                return _CONSTRAINT_BROKEN
        # From here on nothing can fail. All books change together, and `strike` reverts them together.
        for constraint in self.constraints(ask):
            constraint.add(constraint.values(ask, candidate) or frozenset())
        charged = self._draws(candidate)
        if charged:
            self.book(candidate).charge(candidate.device)
            if (groups := self.groups(candidate)) is not None:
                groups.take(candidate.device)
        # A share takes capacity and leaves the rest to others. Any other device is held as a whole.
        if candidate.shareable:
            self._shares[candidate] = self._shares.get(candidate, 0) + 1
            self._move(candidate, given, 1)
        else:
            self._holders.setdefault(candidate, []).append(ask.claim)
        self.entries.append(DeviceAssignment(ask, candidate, given, charged))
        self.version += 1
        return None

    def strike(self) -> None:
        """Undo the last entry."""
        entry = self.entries.pop()
        self.version += 1
        candidate = entry.candidate
        # The stacks of constraints and groups end with this entry, because entries are undone in reverse.
        for constraint in self.constraints(entry.ask):
            constraint.undo()
        if entry.charged:
            self.book(candidate).refund(candidate.device)
            if (groups := self.groups(candidate)) is not None:
                groups.give_back()
        if candidate.shareable:
            self._shares[candidate] -= 1
            self._move(candidate, entry.consumption, -1)
        else:
            self._holders[candidate].pop()

    def clear(self, length: int = 0) -> None:
        """Undo entries until `length` are left."""
        while len(self.entries) > length:
            self.strike()

    def count_of(self, claim: int) -> int:
        """The number of devices that this allocation has given to a claim."""
        return sum(entry.ask.claim == claim for entry in self.entries)

    def book(self, candidate: CandidateDevice) -> CounterBook:
        """The counters of the device's pool."""
        return self._book(candidate.pool.key)

    def _book(self, pool: PoolKey) -> CounterBook:
        # Built when the first device draws: charging the devices in use reads all devices of the pool.
        if pool not in self._books:
            self._books[pool] = CounterBook(self._pools[pool], self.ever_held)
        return self._books[pool]

    def groups(self, candidate: CandidateDevice) -> GroupBook | None:
        """The compatibility groups of the device's pool, or None if none of its devices names any."""
        if not candidate.pool.has_groups:
            return None
        key = candidate.pool.key
        if key not in self._groups:
            self._groups[key] = GroupBook(self._pools[key], self.ever_held)
        return self._groups[key]

    def left_of(self, pool: PoolKey, counter: str) -> Fraction:
        """The amount that is left of the counters of one name, over all sets of a pool."""
        return sum(
            (left for (_, name), left in self._book(pool).left.items() if name == counter), Fraction(0)
        )

    def _gone(self, device: DeviceId) -> dict[str, Fraction]:
        """The capacity of a device that is taken, before or in this allocation."""
        # This is a copy, because this allocation adds to it and subtracts again.
        if device not in self._taken:
            self._taken[device] = {name: exact_value(used) for name, used in self.used_before(device).items()}
        return self._taken[device]

    def used_before(self, device: DeviceId) -> Mapping[str, Amount]:
        """The capacity of a device that earlier allocations took."""
        return self._state.consumed.get(device, {})

    def _draws(self, candidate: CandidateDevice) -> bool:
        """Whether giving the device charges its counters. Only the first share does."""
        if not candidate.device.consumes_counters:
            return False
        # Upstream charges a shared device once, for its first share, even if an earlier allocation took that.
        return not (
            candidate.shareable and (self._shares.get(candidate, 0) or self.charged_before(candidate))
        )

    def charged_before(self, candidate: CandidateDevice) -> bool:
        """Whether shares in use, even those that took no capacity, already charge the device's counters."""
        return candidate.id in self._state.consumed or candidate.id in self._state.shared

    def ever_held(self, device: DeviceId) -> bool:
        """Whether the device, or a share of it, was held before this allocation."""
        state = self._state
        return device in state.dedicated or device in state.shared or device in state.consumed

    def _move(self, candidate: CandidateDevice, given: Consumption, sign: int) -> None:
        book = self._gone(candidate.id)
        for name, amount in given.items():
            book[name] = book.get(name, Fraction(0)) + sign * exact_value(amount)
