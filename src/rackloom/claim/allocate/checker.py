"""Verifies an allocation against its claims without knowing how it was chosen.

Written from the API's rules and sharing no code with the search and its books, so that an error there shows
here. It judges validity only: any answer that breaks no rule passes, whichever of the possible ones it is.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations

from rackloom.claim.allocate import cel
from rackloom.claim.allocate.amounts import number
from rackloom.claim.allocate.candidates import Candidate, candidates_of
from rackloom.claim.allocate.features import Features
from rackloom.claim.allocate.nodes import reaches
from rackloom.claim.allocate.objects import (
    AllocationResult,
    DeviceClass,
    DeviceConstraint,
    DeviceResult,
    DeviceSubRequest,
    DeviceTaint,
    DeviceToleration,
    ExactDeviceRequest,
    Node,
    ResourceClaim,
    ResourceSlice,
)
from rackloom.claim.allocate.pools import Pool, SliceIndex, gather
from rackloom.claim.allocate.use import DeviceId, InUse

Wanted = ExactDeviceRequest | DeviceSubRequest
_LIMIT = 32


class Checker:
    """The cluster that answers are checked against."""

    def __init__(
        self,
        node: Node,
        classes: Sequence[DeviceClass],
        slices: Sequence[ResourceSlice],
        *,
        state: InUse = InUse(),  # noqa: B008 (a frozen value)
        features: Features = Features(),  # noqa: B008
    ) -> None:
        self._node = node
        self._classes = {one.metadata.name: one for one in classes}
        self._state = state
        self._features = features
        self._pools = gather(node, SliceIndex(slices), features)
        self._devices = {one.id: one for one in candidates_of(self._pools, features)}

    def violations(
        self, claims: Sequence[ResourceClaim], results: Sequence[AllocationResult]
    ) -> Iterator[str]:
        """Every rule that `results` (one per claim) break, as a sentence; none for a valid answer."""
        if len(claims) != len(results):
            yield f"{len(results)} results for {len(claims)} claims"
            return
        for claim, result in zip(claims, results, strict=True):
            yield from self._claim(claim, result)
        yield from self._use(results)
        yield from self._counters(results)
        yield from self._capacity(results)

    def _claim(self, claim: ResourceClaim, result: AllocationResult) -> Iterator[str]:
        """Requests, devices and constraints of one claim."""
        name, given = claim.metadata.name, result.devices.results
        if len(given) > _LIMIT:
            yield f"{name}: {len(given)} devices exceed {_LIMIT}"
        yield from (
            f"{name}: {_id(one)} is not a device here" for one in given if _id(one) not in self._devices
        )
        if any(_id(one) not in self._devices for one in given):
            return
        for request in claim.spec.devices.requests:
            yield from self._request(claim, request.name, _alternatives(claim, request.name), given)
        for constraint in claim.spec.devices.constraints:
            yield from self._constraint(name, constraint, given)

    def _request(
        self, claim: ResourceClaim, name: str, wanted: Mapping[str, Wanted], given: Sequence[DeviceResult]
    ) -> Iterator[str]:
        mine = [one for one in given if one.request in wanted]
        used = {one.request for one in mine}
        if len(used) > 1:
            yield f"{name}: several alternatives at once: {sorted(used)}"
        for title in used:
            devices = [self._devices[_id(one)] for one in mine if one.request == title]
            yield from self._ask(title, wanted[title], devices)
        if not used and not any(_count(ask) == 0 for ask in wanted.values()):
            yield f"{claim.metadata.name}: request {name} got nothing"

    def _ask(self, name: str, ask: Wanted, devices: Sequence[Candidate]) -> Iterator[str]:
        if len({one.id for one in devices}) != len(devices):
            yield f"{name}: a device twice"
        if _count(ask) is not None and len(devices) != _count(ask):
            yield f"{name}: {len(devices)} devices, not {_count(ask)}"
        for device in devices:
            if not self._matches(ask, device):
                yield f"{name}: {device.id} does not match"
            yield from self._taints(name, ask, device)
        if ask.allocation_mode == "All":
            yield from self._all(name, ask, devices)

    def _all(self, name: str, ask: Wanted, devices: Sequence[Candidate]) -> Iterator[str]:
        chosen = {one.id for one in devices}
        for device in self._devices.values():
            if device.id not in chosen and self._matches(ask, device):
                yield f"{name}: wants all, {device.id} is missing"

    def _matches(self, ask: Wanted, device: Candidate) -> bool:
        selectors = [*self._classes[ask.device_class_name].spec.selectors, *ask.selectors]
        expressions = [one.cel.expression for one in selectors if one.cel]
        if not all(cel.compile(expression).matches(device.view) for expression in expressions):
            return False
        one = device.device
        if one.binding_conditions and not self._features.device_binding_and_status:
            return False
        if not self._holds(ask, device):
            return False
        return not device.source.spec.per_device_node_selection or reaches(
            self._node, node_name=one.node_name, all_nodes=one.all_nodes, selector=one.node_selector
        )

    def _holds(self, ask: Wanted, device: Candidate) -> bool:
        """Whether what was left of the device before is enough for what is asked for by name."""
        before = self._state.consumed.get(device.id, {})
        capacity = device.device.capacity
        return all(
            name in capacity and number(amount) + number(before.get(name, 0)) <= number(capacity[name].value)
            for name, amount in (ask.capacity.requests if ask.capacity else {}).items()
        )

    def _taints(self, name: str, ask: Wanted, device: Candidate) -> Iterator[str]:
        for taint in device.device.taints if self._features.device_taints else ():
            blocks = taint.effect in ("NoSchedule", "NoExecute")
            if blocks and not any(_covers(one, taint) for one in ask.tolerations):
                yield f"{name}: {device.id} has the taint {taint.key}"

    def _constraint(
        self, claim: str, constraint: DeviceConstraint, given: Sequence[DeviceResult]
    ) -> Iterator[str]:
        covered = [
            one
            for one in given
            if not constraint.requests
            or {one.request, one.request.partition("/")[0]} & set(constraint.requests)
        ]
        attribute = constraint.match_attribute or constraint.distinct_attribute or ""
        values = [_values(self._devices[_id(one)], attribute) for one in covered]
        if any(value is None for value in values):
            yield f"{claim}: a device lacks {attribute}"
            return
        sets = [value for value in values if value is not None]
        if constraint.match_attribute is not None and len(sets) > 1 and not frozenset.intersection(*sets):
            yield f"{claim}: devices differ in {attribute}"
        if constraint.distinct_attribute is not None and any(a & b for a, b in combinations(sets, 2)):
            yield f"{claim}: devices share a value of {attribute}"

    def _use(self, results: Sequence[AllocationResult]) -> Iterator[str]:
        """No whole device is given to two, and none that is in use; admin access excepted."""
        given: Counter[DeviceId] = Counter()
        for result in results:
            for one in result.devices.results:
                device = self._devices.get(_id(one))
                if device is None or device.shareable or one.admin_access:
                    continue
                given[device.id] += 1
                if device.id in self._state.dedicated:
                    yield f"{device.id} is in use"
        yield from (f"{device} is given {times} times" for device, times in given.items() if times > 1)

    def _counters(self, results: Sequence[AllocationResult]) -> Iterator[str]:
        """No counter of a pool is overdrawn by what was given."""
        given = {_id(one) for result in results for one in result.devices.results}
        for pool in self._pools:
            before = _drawn(pool, self._held())
            after = _drawn(pool, self._held() | given)
            for key, total in _totals(pool).items():
                if after[key] > total and after[key] > before[key]:
                    yield f"counter {pool.key}/{key} is overdrawn"

    def _held(self) -> set[DeviceId]:
        return {*self._state.dedicated, *self._state.shared, *self._state.consumed}

    def _capacity(self, results: Sequence[AllocationResult]) -> Iterator[str]:
        """The shares of a device fit into it, and say what they take."""
        taken: dict[tuple[DeviceId, str], Fraction] = {
            (holder, name): number(amount)
            for holder, book in self._state.consumed.items()
            for name, amount in book.items()
        }
        for one in (one for result in results for one in result.devices.results):
            device = self._devices.get(_id(one))
            if device is None or not device.shareable:
                continue
            if one.share_id is None:
                yield f"{device.id}: a share without an id"
            for name, amount in (one.consumed_capacity or {}).items():
                taken[device.id, name] = taken.get((device.id, name), Fraction(0)) + number(amount)
        for (owner, name), total in taken.items():
            known = self._devices.get(owner)
            if known is not None and known.shareable and total > number(known.device.capacity[name].value):
                yield f"{owner}: {name} is overdrawn"


def _id(one: DeviceResult) -> DeviceId:
    return DeviceId(one.driver, one.pool, one.device)


def _alternatives(claim: ResourceClaim, name: str) -> dict[str, Wanted]:
    request = next(one for one in claim.spec.devices.requests if one.name == name)
    if request.exactly is not None:
        return {name: request.exactly}
    return {f"{name}/{one.name}": one for one in request.first_available}


def _count(ask: Wanted) -> int | None:
    return None if ask.allocation_mode == "All" else ask.count


def _covers(toleration: DeviceToleration, taint: DeviceTaint) -> bool:
    return (
        toleration.effect in ("", taint.effect)
        and toleration.key in ("", taint.key)
        and (toleration.operator == "Exists" or toleration.value == taint.value)
    )


def _values(device: Candidate, name: str) -> frozenset[object] | None:
    """All values of the attribute; None without it."""
    attribute = device.attribute(name)
    if attribute is None:
        return None
    listed = (attribute.ints, attribute.bools, attribute.strings, attribute.versions)
    single = (attribute.int_, attribute.bool_, attribute.string, attribute.version)
    found = [(kind, value) for kind, values in enumerate(listed) for value in values or ()]
    found += [(kind, value) for kind, value in enumerate(single) if value is not None]
    return frozenset(found)


def _totals(pool: Pool) -> dict[tuple[str, str], Fraction]:
    return {
        (one.name, name): number(counter.value)
        for one in pool.counter_sets.values()
        for name, counter in one.counters.items()
    }


def _drawn(pool: Pool, held: set[DeviceId]) -> Counter[tuple[str, str]]:
    drawn: Counter[tuple[str, str]] = Counter()
    for source in (*pool.slices, *pool.elsewhere):
        for device in source.spec.devices:
            for use in device.consumes_counters:
                for name, counter in use.counters.items():
                    if DeviceId(pool.driver, pool.name, device.name) in held:
                        drawn[use.counter_set, name] += number(counter.value)  # type: ignore[assignment]
    return drawn
