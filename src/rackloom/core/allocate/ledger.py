"""Tentative assignments of a search: entered together, undone one by one in reverse order.

`AllocationLedger` holds all that changes while devices are chosen: who holds a device, consumed
capacity, counters, compatibility groups and constraints. `enter` checks what the device could give at
all (policy of its capacities, taints), then use, capacity, groups, counters and constraints. It then
updates all of them, or returns the cause and changes nothing. `strike` undoes the last entry exactly.
`version` changes with every step, so that derived values know when they are stale.

A `Constraint` is matchAttribute or distinctAttribute. A set of devices that breaks a constraint stays
broken whatever is added, so each device is checked as it is chosen. Matching devices must all share one
value (one that all have, not one per pair); distinct ones share none, pair by pair. A device without
the attribute breaks both. Where a request derives the attribute, its expression gives the value,
whatever the device publishes under that name; an error of the expression stops the allocation. The
constraint keeps a stack of value sets, and undoing pops it.

Three upstream rules shape the ledger. Admin access ignores use, but takes no device twice for one
claim. A device does not change between dedicated and shared while anybody holds it. Only the first
share of a device is charged to its counters.
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
"""Values of an attribute with their type; empty where no value of a known type is set."""


def attribute_values(attribute: DeviceAttribute, *, lists: bool) -> AttributeValues:
    """Values of an attribute. Lists count only where list attributes are on; a scalar is a list of one."""
    # Values keep their kind: the integer 1, the text "1" and the version 1 are three values.
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

    Matching devices all have one value in common (one that all of them have, not one per pair); distinct ones
    have none in common, pair by pair. A device without the attribute breaks both.
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
        """`known` is shared by constraints of one attribute: N pairs have N of them.

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
        """What the constraint compares where the device is given to `ask`; None when it lacks the attribute.

        Raises AllocationStopped where the ask derives the attribute and that fails.
        """
        if not ask.derived or self.attribute not in ask.derived:
            return self.published(candidate)
        values = self.derived(ask.derived[self.attribute], candidate)
        if isinstance(values, EvaluationError | CompileError):
            # An expression that does not compile fails alike on every device, so none is named.
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
        """What an expression derives from a device; errors come back as values."""
        found = self._derived.get((expression, candidate))
        if found is None:
            attribute = self._selectors.derive(expression, candidate.view)
            # An error is not kept here: the selectors remember it.
            if not isinstance(attribute, DeviceAttribute):
                return attribute
            found = self._derived[expression, candidate] = attribute_values(attribute, lists=self._lists)
        return found

    def published(self, candidate: CandidateDevice) -> AttributeValues | None:
        """The values that the device publishes; None when it lacks the attribute."""
        # None is an answer, too: the device lacks the attribute.
        if candidate not in self._known:
            found = candidate.attribute(self.attribute)
            self._known[candidate] = None if found is None else attribute_values(found, lists=self._lists)
        return self._known[candidate]

    def allows(self, values: AttributeValues | None) -> bool:
        """Whether a device of these values could be taken in now."""
        if values is None:
            return False
        if not self._stack:
            # Upstream compares a first device with nothing, so that even a value of a type it cannot compare
            # passes; only with list attributes does it look at it.
            return bool(values) or not self._lists
        # Distinct devices are compared pair by pair. Matching ones only with what all so far have in common.
        if self.distinct:
            return bool(values) and all(values.isdisjoint(earlier) for earlier in self._stack)
        return bool(self._stack[-1] & values)

    def add(self, values: AttributeValues) -> None:
        """Take in a device of these values, which `allows` let through."""
        # matchAttribute keeps the values still common to all; distinctAttribute keeps each device's own.
        together = values if self.distinct or not self._stack else self._stack[-1] & values
        self._stack.append(together)

    def undo(self) -> None:
        """Forget the device that was taken in last."""
        self._stack.pop()

    def values_so_far(self) -> AttributeValues:
        """All that the future depends on: the values still possible, or (distinct) those that are gone."""
        return frozenset().union(*self._stack) if self.distinct else frozenset(*self._stack[-1:])

    @property
    def started(self) -> bool:
        """Whether a device was taken in."""
        return bool(self._stack)


def constraints_of(
    claim: ResourceClaim, features: Features, selectors: SelectorCache
) -> tuple[Constraint, ...]:
    """The constraints of a claim. Raises AllocationStopped for one of an unknown kind."""
    known: defaultdict[str, dict[CandidateDevice, AttributeValues | None]] = defaultdict(dict)
    found = []
    for number, written in enumerate(claim.spec.devices.constraints):
        distinct = written.match_attribute is None
        attribute = written.distinct_attribute if distinct else written.match_attribute
        # A newer API may have kinds of constraints that this decoder drops. To ignore one would break it.
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
    """A device given to an ask."""

    ask: RequestAlternative
    candidate: CandidateDevice
    consumption: Consumption
    charged: bool
    """Whether its counters were charged: a further share of a device is not charged again."""


def static_share(ask: RequestAlternative, device: Device, features: Features) -> Consumption | Cause:
    """What a device would give for `ask` if nobody held it, or why it never can."""
    given: Consumption | Cause = {}
    # Without the feature every device is given whole, whatever its driver publishes of capacities.
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
        self._groups: dict[PoolKey, GroupBook] = {}
        self._before: dict[CandidateDevice, Cause | None] = {}
        """Who held devices before: a search asks for the same ones over and over."""
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
        """Whether somebody holds the device in a way that keeps it from `ask`.

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
            # A device does not change between dedicated and shared while a claim holds it: a share of a
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
        """Whether nobody held the device before this allocation in a way that keeps others from it."""
        return self._held_before(candidate) is None

    def mark(self, candidate: CandidateDevice) -> Hashable:
        """What this allocation did to the device: equal for devices of one shape that were used alike."""
        # The number of shares counts beside the capacity: only the first share is charged to counters.
        if candidate.shareable:
            return self._shares.get(candidate, 0), frozenset(self._gone(candidate.id).items())
        return frozenset(self._holders.get(candidate, ()))

    def suits(self, ask: RequestAlternative, candidate: CandidateDevice) -> Consumption | Cause:
        """What the device would give for `ask` if it were free, or why it never can: nothing here changes."""
        # Requests of one likeness share their answers: a claim often repeats a request.
        known = self._static_of.get(ask)
        if known is None:
            known = self._static_of[ask] = self._static.setdefault(ask.likeness, {})
        if candidate not in known:
            known[candidate] = static_share(ask, candidate.device, self._features)
        return known[candidate]

    def has_capacity(self, ask: RequestAlternative, candidate: CandidateDevice) -> bool:
        """Whether the device has the capacity that `ask` wants, as things stand."""
        if not self._features.consumable_capacity:
            return True
        # Without taints and counters, unlike `suits`: this decides which devices mode All means.
        given = consumption_of(ask.amounts, candidate.device)
        taken = self._gone(candidate.id)
        return not isinstance(given, Cause) and capacity_shortage(candidate.device, taken, given) is None

    def short(self, ask: RequestAlternative, candidate: CandidateDevice) -> Cause | None:
        """Why what is left of the device or of its pool's counters is not enough for `ask` now."""
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
        """`short`, without a text for counters."""
        # Searches come here at every step. Most devices have neither capacities nor counters.
        cause = capacity_shortage(candidate.device, self._gone(candidate.id), given) if given else None
        if cause is None and self._draws(candidate):
            groups = self.groups(candidate)
            if groups is not None and not groups.admits(candidate.device):
                return _GROUPS_APART
            if not self.book(candidate).suffices(candidate.device):
                return _COUNTERS_SHORT
        return cause

    def broken(self, ask: RequestAlternative, candidate: CandidateDevice) -> Cause | None:
        """Which constraint keeps the device from `ask` now."""
        for constraint in self.constraints(ask):
            # Here an error is an account of one device. In a search it would stop the attempt.
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
        """The constraints that cover `ask`."""
        if ask not in self._covering:
            own = self._constraints[ask.claim]
            self._covering[ask] = [constraint for constraint in own if ask.named_in(constraint.requests)]
        return self._covering[ask]

    def enter(self, ask: RequestAlternative, candidate: CandidateDevice) -> Cause | None:
        """Give the device to `ask`, or return the cause and change nothing. The caller ran the selectors.

        The cause does not say which counter is short, nor which constraint is broken: searches ask often and
        show nobody. Raises AllocationStopped where a derived attribute fails.
        """
        # The answer that never changes comes first. A search comes to the same pair often, and it is kept.
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
        # From here on nothing can fail: all books change together, and `strike` reverts them together.
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
        # The stacks of constraints and groups end with this entry, because entries go in reverse order.
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
        """How many devices this allocation has given to a claim."""
        return sum(entry.ask.claim == claim for entry in self.entries)

    def book(self, candidate: CandidateDevice) -> CounterBook:
        """The counters of the device's pool."""
        return self._book(candidate.pool.key)

    def _book(self, pool: PoolKey) -> CounterBook:
        # Made when the first device draws: to charge what is in use reads all devices of the pool.
        if pool not in self._books:
            self._books[pool] = CounterBook(self._pools[pool], self.ever_held)
        return self._books[pool]

    def groups(self, candidate: CandidateDevice) -> GroupBook | None:
        """The compatibility groups of the device's pool; None where no device of it names any."""
        if not candidate.pool.has_groups:
            return None
        key = candidate.pool.key
        if key not in self._groups:
            self._groups[key] = GroupBook(self._pools[key], self.ever_held)
        return self._groups[key]

    def left_of(self, pool: PoolKey, counter: str) -> Fraction:
        """What is left of the counters of one name, over all sets of a pool."""
        return sum(
            (left for (_, name), left in self._book(pool).left.items() if name == counter), Fraction(0)
        )

    def _gone(self, device: DeviceId) -> dict[str, Fraction]:
        """Capacity of a device that is taken, before or now."""
        # A copy, because this allocation adds to it and takes away again.
        if device not in self._taken:
            self._taken[device] = {name: exact_value(used) for name, used in self.used_before(device).items()}
        return self._taken[device]

    def used_before(self, device: DeviceId) -> Mapping[str, Amount]:
        """Capacity of a device that earlier allocations took."""
        return self._state.consumed.get(device, {})

    def _draws(self, candidate: CandidateDevice) -> bool:
        """Whether giving the device charges its counters: the first share of it does."""
        if not candidate.device.consumes_counters:
            return False
        # Upstream charges a shared device once, whoever comes first, also in an earlier allocation.
        return not (
            candidate.shareable and (self._shares.get(candidate, 0) or self.charged_before(candidate))
        )

    def charged_before(self, candidate: CandidateDevice) -> bool:
        """Whether shares in use already pay for the device's counters, also those that took no capacity."""
        return candidate.id in self._state.consumed or candidate.id in self._state.shared

    def ever_held(self, device: DeviceId) -> bool:
        """Whether anybody held the device, or a share of it, before this allocation."""
        state = self._state
        return device in state.dedicated or device in state.shared or device in state.consumed

    def _move(self, candidate: CandidateDevice, given: Consumption, sign: int) -> None:
        book = self._gone(candidate.id)
        for name, amount in given.items():
            book[name] = book.get(name, Fraction(0)) + sign * exact_value(amount)
