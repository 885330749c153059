"""Verifies an allocation against its claims, no matter how it was chosen.

The checker is written from the API's rules. It gathers pools and runs selectors with the allocator's code,
but shares nothing with the search and its ledger, so it reveals their errors. It judges validity only: any
answer that breaks no rule passes.

For each claim it checks the number of devices, that one alternative per request was used, counts,
selectors, capacity, taints, mode All, and constraints. Over all claims it checks that no whole device
is given twice or is already in use, that no counter of a pool is overdrawn, that the devices of a
counter set have a compatibility group in common, and that the shares of a device fit into its capacity.
It reports each broken rule as a sentence.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations

from rackloom.core.allocate.cel import compiler
from rackloom.core.allocate.cel.derived import compile_derived
from rackloom.core.allocate.cel.errors import CompileError, EvaluationError
from rackloom.core.allocate.eligibility import CandidateDevice, candidates_of
from rackloom.core.allocate.inputs import DeviceId, Features, InUse
from rackloom.core.allocate.objects import (
    AllocationResult,
    DeviceClass,
    DeviceConstraint,
    DeviceRequest,
    DeviceResult,
    DeviceTaint,
    DeviceToleration,
    Node,
    RequestSpec,
    ResourceClaim,
    ResourceSlice,
)
from rackloom.core.allocate.pools import Pool, SliceIndex, gather_pools, node_is_selected
from rackloom.core.allocate.quantity import exact_value

_MAX_DEVICES = 32


class AllocationChecker:
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
        self._classes = {klass.metadata.name: klass for klass in classes}
        self._state = state
        self._features = features
        self._pools = gather_pools(node, SliceIndex(slices), features)
        self._devices = {candidate.id: candidate for candidate in candidates_of(self._pools, features)}

    def violations(
        self, claims: Sequence[ResourceClaim], results: Sequence[AllocationResult]
    ) -> Iterator[str]:
        """Every rule that `results` (one per claim) break, as a sentence. Empty for a valid answer."""
        if len(claims) != len(results):
            yield f"{len(results)} results for {len(claims)} claims"
            return
        for claim, result in zip(claims, results, strict=True):
            yield from self._claim(claim, result)
        yield from self._use(results)
        yield from self._counters(results)
        yield from self._groups(results)
        yield from self._capacity(results)

    def _claim(self, claim: ResourceClaim, result: AllocationResult) -> Iterator[str]:
        """Check the requests, devices and constraints of one claim."""
        name, given = claim.metadata.name, result.devices.results
        if len(given) > _MAX_DEVICES:
            yield f"{name}: {len(given)} devices exceed {_MAX_DEVICES}"
        unknown = [device for device in map(DeviceId.of, given) if device not in self._devices]
        if unknown:
            yield from (f"{name}: {device} is not a device here" for device in unknown)
            return
        for request in claim.spec.devices.requests:
            yield from self._request(claim, request.name, _alternatives(request), given)
        for constraint in claim.spec.devices.constraints:
            yield from self._constraint(claim, constraint, given)

    def _request(
        self,
        claim: ResourceClaim,
        name: str,
        wanted: Mapping[str, RequestSpec],
        given: Sequence[DeviceResult],
    ) -> Iterator[str]:
        mine = [result for result in given if result.request in wanted]
        used = {result.request for result in mine}
        if len(used) > 1:
            yield f"{name}: several alternatives at once: {sorted(used)}"
        for title in used:
            devices = [self._devices[DeviceId.of(result)] for result in mine if result.request == title]
            yield from self._ask(title, wanted[title], devices)
        if not used and not any(_count_of(ask) == 0 for ask in wanted.values()):
            yield f"{claim.metadata.name}: request {name} got nothing"

    def _ask(self, name: str, ask: RequestSpec, devices: Sequence[CandidateDevice]) -> Iterator[str]:
        if len({device.id for device in devices}) != len(devices):
            yield f"{name}: a device twice"
        if _count_of(ask) is not None and len(devices) != _count_of(ask):
            yield f"{name}: {len(devices)} devices, not {_count_of(ask)}"
        for device in devices:
            if not self._matches(ask, device):
                yield f"{name}: {device.id} does not match"
            for taint in device.device.taints if self._features.device_taints else ():
                blocks = taint.effect in ("NoSchedule", "NoExecute")
                if blocks and not any(_tolerates(toleration, taint) for toleration in ask.tolerations):
                    yield f"{name}: {device.id} has the taint {taint.key}"
        chosen = {device.id for device in devices}
        for device in self._devices.values() if ask.allocation_mode == "All" else ():
            if device.id not in chosen and self._matches(ask, device):
                yield f"{name}: wants all, {device.id} is missing"

    def _matches(self, ask: RequestSpec, device: CandidateDevice) -> bool:
        selectors = [*self._classes[ask.device_class_name].spec.selectors, *ask.selectors]
        expressions = [selector.cel.expression for selector in selectors if selector.cel]
        if not all(compiler.compile_selector(expression).matches(device.view) for expression in expressions):
            return False
        published = device.device
        if published.binding_conditions and not self._features.device_binding_and_status:
            return False
        # The capacity of the device that was left before must be enough for the named requests.
        before = self._state.consumed.get(device.id, {})
        for name, amount in (ask.capacity.requests if ask.capacity else {}).items():
            if name not in published.capacity:
                return False
            whole = exact_value(published.capacity[name].value)
            if exact_value(amount) + exact_value(before.get(name, 0)) > whole:
                return False
        return not device.source.spec.per_device_node_selection or node_is_selected(self._node, published)

    def _constraint(
        self, claim: ResourceClaim, constraint: DeviceConstraint, given: Sequence[DeviceResult]
    ) -> Iterator[str]:
        name = claim.metadata.name
        covered = [
            result
            for result in given
            if not constraint.requests
            or {result.request, result.request.partition("/")[0]} & set(constraint.requests)
        ]
        attribute = constraint.match_attribute or constraint.distinct_attribute or ""
        derived = _derived_by_request(claim, attribute)
        values = [
            _attribute_values(self._devices[DeviceId.of(result)], attribute, derived.get(result.request))
            for result in covered
        ]
        if any(value is None for value in values):
            yield f"{name}: a device lacks {attribute}"
            return
        sets = [value for value in values if value is not None]
        if constraint.match_attribute is not None and len(sets) > 1 and not frozenset.intersection(*sets):
            yield f"{name}: devices differ in {attribute}"
        if constraint.distinct_attribute is not None and any(a & b for a, b in combinations(sets, 2)):
            yield f"{name}: devices share a value of {attribute}"

    def _use(self, results: Sequence[AllocationResult]) -> Iterator[str]:
        """Check that no whole device is given twice or is in use already, except for admin access."""
        given: Counter[DeviceId] = Counter()
        for result in _device_results(results):
            device = self._devices.get(DeviceId.of(result))
            if device is None or device.shareable or result.admin_access:
                continue
            given[device.id] += 1
            if device.id in self._state.dedicated:
                yield f"{device.id} is in use"
        yield from (f"{device} is given {times} times" for device, times in given.items() if times > 1)

    def _counters(self, results: Sequence[AllocationResult]) -> Iterator[str]:
        """Check that the given devices overdraw no counter of a pool."""
        given = set(map(DeviceId.of, _device_results(results)))
        for pool in self._pools:
            before = _counters_drawn(pool, self._held())
            after = _counters_drawn(pool, self._held() | given)
            # A counter that was overdrawn before is not the answer's fault, unless it draws even more.
            for counter_set in pool.counter_sets.values():
                for name, counter in counter_set.counters.items():
                    key, total = (counter_set.name, name), exact_value(counter.value)
                    if after[key] > total and after[key] > before[key]:
                        yield f"counter {pool.key}/{key} is overdrawn"

    def _groups(self, results: Sequence[AllocationResult]) -> Iterator[str]:
        """Check that the devices in use of each counter set fit together, if they did so before."""
        given = set(map(DeviceId.of, _device_results(results)))
        for pool in self._pools:
            before = _groups_in_use(pool, self._held())
            for name, groups in _groups_in_use(pool, self._held() | given).items():
                if not _go_together(groups) and _go_together(before.get(name, [])):
                    yield f"devices of {pool.key}/{name} have no compatibility group in common"

    def _held(self) -> set[DeviceId]:
        return {*self._state.dedicated, *self._state.shared, *self._state.consumed}

    def _capacity(self, results: Sequence[AllocationResult]) -> Iterator[str]:
        """Check that the shares of a device fit into it and have an id."""
        taken: dict[tuple[DeviceId, str], Fraction] = {
            (holder, name): exact_value(amount)
            for holder, book in self._state.consumed.items()
            for name, amount in book.items()
        }
        for result in _device_results(results):
            device = self._devices.get(DeviceId.of(result))
            if device is None or not device.shareable:
                continue
            if result.share_id is None:
                yield f"{device.id}: a share without an id"
            for name, amount in (result.consumed_capacity or {}).items():
                taken[device.id, name] = taken.get((device.id, name), Fraction(0)) + exact_value(amount)
        for (owner, name), total in taken.items():
            known = self._devices.get(owner)
            if known and known.shareable and total > exact_value(known.device.capacity[name].value):
                yield f"{owner}: {name} is overdrawn"


def _device_results(results: Sequence[AllocationResult]) -> Iterator[DeviceResult]:
    return (device for result in results for device in result.devices.results)


def _alternatives(request: DeviceRequest) -> dict[str, RequestSpec]:
    if request.exactly is not None:
        return {request.name: request.exactly}
    return {f"{request.name}/{spec.name}": spec for spec in request.first_available}


def _count_of(ask: RequestSpec) -> int | None:
    return None if ask.allocation_mode == "All" else ask.count


def _tolerates(toleration: DeviceToleration, taint: DeviceTaint) -> bool:
    return (
        toleration.effect in ("", taint.effect)
        and toleration.key in ("", taint.key)
        and (toleration.operator == "Exists" or toleration.value == taint.value)
    )


def _derived_by_request(claim: ResourceClaim, attribute: str) -> dict[str, str]:
    """The expression that derives the attribute, by request or alternative."""
    return {
        title: derived.expression
        for request in claim.spec.devices.requests
        for title, spec in _alternatives(request).items()
        for derived in spec.derived_attributes
        if derived.name == attribute
    }


def _attribute_values(device: CandidateDevice, name: str, expression: str | None) -> frozenset[object] | None:
    """All values of the attribute, published or derived. None if it is absent or cannot be derived."""
    try:
        attribute = (
            device.attribute(name)
            if expression is None
            else compile_derived(expression).evaluate(device.view)
        )
    except (CompileError, EvaluationError):
        return None
    if attribute is None:
        return None
    listed = (attribute.ints, attribute.bools, attribute.strings, attribute.versions)
    single = (attribute.int_, attribute.bool_, attribute.string, attribute.version)
    found = [(kind, value) for kind, values in enumerate(listed) for value in values or ()]
    found += [(kind, value) for kind, value in enumerate(single) if value is not None]
    return frozenset(found)


def _counters_drawn(pool: Pool, held: set[DeviceId]) -> Counter[tuple[str, str]]:
    drawn: Counter[tuple[str, str]] = Counter()
    for source in (*pool.slices, *pool.elsewhere):
        for device in source.spec.devices:
            for use in device.consumes_counters:
                for name, counter in use.counters.items():
                    if DeviceId(pool.driver, pool.name, device.name) in held:
                        drawn[use.counter_set, name] += exact_value(counter.value)  # type: ignore[assignment]
    return drawn


def _groups_in_use(pool: Pool, held: set[DeviceId]) -> dict[str, list[set[str]]]:
    """The compatibility groups of every device in use that draws from a counter set, by counter set."""
    found: dict[str, list[set[str]]] = {}
    for source in (*pool.slices, *pool.elsewhere):
        for device in source.spec.devices:
            if DeviceId(pool.driver, pool.name, device.name) in held:
                for use in device.consumes_counters:
                    found.setdefault(use.counter_set, []).append(set(use.compatibility_groups))
    return found


def _go_together(groups: Sequence[set[str]]) -> bool:
    return not any(groups) or bool(set.intersection(*groups))
