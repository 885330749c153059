"""Claims placed one after the other on the first node that fits, with a nearest fix for each refusal.

`allocate_each` treats every claim as that of a separate pod. Claims with an allocation keep it, and
each new allocation counts as in use for the next claim. A fault of one node passes that node over; a
fault of the attempt refuses the claim. A refused claim carries the explanation of every node.

`nearest_fix` finds the first small change under which the allocator accepts the claims. It tries, in
this order: free the devices of one other claim, tolerate one taint, ask for fewer devices in one
request (as many as fit), leave out one constraint, leave out the selectors of one request. Every change
is made on a copy of the input and allocated. A named fix therefore works on that node as things stand.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec

from rackloom.core.allocate.allocator import SearchMode, allocate, unbounded
from rackloom.core.allocate.eligibility import SelectorCache
from rackloom.core.allocate.explanation import Explanation, explain
from rackloom.core.allocate.inputs import MAX_RESULTS, Features, InUse, claim_title, in_use_by
from rackloom.core.allocate.objects import (
    AllocationResult,
    DeviceClass,
    DeviceRequest,
    DeviceSubRequest,
    DeviceToleration,
    ExactDeviceRequest,
    Node,
    ResourceClaim,
    ResourceClaimStatus,
    ResourceSlice,
)
from rackloom.core.allocate.outcome import Allocation, Fault, FaultScope, Optimality
from rackloom.core.allocate.pools import SliceIndex

# The nearest fix: single changes, each tried by allocating.


RequestSpec = ExactDeviceRequest | DeviceSubRequest


class AllocationFix(msgspec.Struct, frozen=True, kw_only=True):
    """A change under which the claims can be met on the node."""

    text: str
    claims: tuple[ResourceClaim, ...]
    """The claims as they would have to be."""
    state: InUse
    """What would have to be in use."""


def nearest_fix(
    node: Node,
    classes: Sequence[DeviceClass],
    slices: SliceIndex,
    claims: Sequence[ResourceClaim],
    *,
    state: InUse = InUse(),  # noqa: B008 (a frozen value)
    features: Features = Features(),  # noqa: B008
    proceed: Callable[[], bool] = unbounded,
) -> AllocationFix | None:
    """The first change that helps, the smallest first; None where no single one does."""
    for fix in _single_changes(slices, tuple(claims), state):
        outcome = allocate(
            node, classes, slices, fix.claims, state=fix.state, features=features, proceed=proceed
        )
        if isinstance(outcome, Allocation):
            return fix
    return None


def _single_changes(
    slices: SliceIndex, claims: tuple[ResourceClaim, ...], state: InUse
) -> Iterator[AllocationFix]:
    for text, freed in _states_without_one_claim(state):
        yield AllocationFix(text=text, claims=claims, state=freed)
    edits = [
        _with_toleration(slices),
        _with_fewer_devices,
        _without_one_constraint,
        _claims_without_selectors,
    ]
    for edit in edits:
        for number, claim in enumerate(claims):
            for text, changed in edit(claim):
                edited = (*claims[:number], changed, *claims[number + 1 :])
                yield AllocationFix(text=f"{text} of claim {claim_title(claim)}", claims=edited, state=state)


def _states_without_one_claim(state: InUse) -> Iterator[tuple[str, InUse]]:
    """Without the devices of one claim."""
    for holder in dict.fromkeys(name for names in state.holders.values() for name in names):
        kept = frozenset(one for one in state.dedicated if holder not in state.holders.get(one, ()))
        if kept != state.dedicated:
            yield f"free the devices of claim {holder}", msgspec.structs.replace(state, dedicated=kept)


ClaimEdit = Callable[[ResourceClaim], Iterator[tuple[str, ResourceClaim]]]


def _with_toleration(slices: SliceIndex) -> ClaimEdit:
    """With a toleration for one of the taints that devices have."""
    taints = dict.fromkeys((taint.key, taint.effect) for taint in slices.taints())

    def edit(claim: ResourceClaim) -> Iterator[tuple[str, ResourceClaim]]:
        for key, effect in taints:
            toleration = DeviceToleration(key=key, operator="Exists", effect=effect)
            change = partial(_tolerating_taint, toleration)
            yield from _claims_with_one_request_changed(claim, f"tolerate the taint {key}:{effect}", change)

    return edit


def _with_fewer_devices(claim: ResourceClaim) -> Iterator[tuple[str, ResourceClaim]]:
    """With fewer devices in one request, as many as there can be."""
    most = max((_largest_count(request) for request in claim.spec.devices.requests), default=0)
    for count in range(min(most - 1, MAX_RESULTS), 0, -1):
        yield from _claims_with_one_request_changed(claim, f"ask for {count}", partial(_at_most, count))


def _without_one_constraint(claim: ResourceClaim) -> Iterator[tuple[str, ResourceClaim]]:
    constraints = claim.spec.devices.constraints
    for number, constraint in enumerate(constraints):
        rest = (*constraints[:number], *constraints[number + 1 :])
        kind = "matchAttribute" if constraint.match_attribute else "distinctAttribute"
        devices = msgspec.structs.replace(claim.spec.devices, constraints=rest)
        yield (
            f"leave out {kind} {constraint.match_attribute or constraint.distinct_attribute}",
            _with_devices(claim, devices),
        )


def _claims_without_selectors(claim: ResourceClaim) -> Iterator[tuple[str, ResourceClaim]]:
    yield from _claims_with_one_request_changed(claim, "leave out the selectors", _without_selectors)


def _tolerating_taint(toleration: DeviceToleration, request_spec: RequestSpec) -> RequestSpec:
    return msgspec.structs.replace(request_spec, tolerations=(*request_spec.tolerations, toleration))


def _at_most(count: int, request_spec: RequestSpec) -> RequestSpec:
    return msgspec.structs.replace(request_spec, count=count) if request_spec.count > count else request_spec


def _without_selectors(request_spec: RequestSpec) -> RequestSpec:
    return msgspec.structs.replace(request_spec, selectors=())


def _claims_with_one_request_changed(
    claim: ResourceClaim, text: str, change: Callable[[RequestSpec], RequestSpec]
) -> Iterator[tuple[str, ResourceClaim]]:
    """The claim with one request changed, for every request that the change touches."""
    requests = claim.spec.devices.requests
    for number, request in enumerate(requests):
        changed = _request_changed(request, change)
        if changed != request:
            all_of_them = (*requests[:number], changed, *requests[number + 1 :])
            devices = msgspec.structs.replace(claim.spec.devices, requests=all_of_them)
            yield f"{text} in request {request.name}", _with_devices(claim, devices)


def _request_changed(request: DeviceRequest, change: Callable[[RequestSpec], RequestSpec]) -> DeviceRequest:
    if request.exactly is not None:
        return msgspec.structs.replace(request, exactly=change(request.exactly))
    return msgspec.structs.replace(
        request, first_available=tuple(change(one) for one in request.first_available)
    )


def _largest_count(request: DeviceRequest) -> int:
    asked: Sequence[RequestSpec] = (request.exactly,) if request.exactly else request.first_available
    return max((one.count for one in asked), default=0)


def _with_devices(claim: ResourceClaim, devices: object) -> ResourceClaim:
    return msgspec.structs.replace(claim, spec=msgspec.structs.replace(claim.spec, devices=devices))


# Claims of several pods, one after the other.


class PlacedClaim(msgspec.Struct, frozen=True, kw_only=True, tag="placed", tag_field="outcome"):
    """A claim that has its devices."""

    claim: str
    node: str
    allocation: AllocationResult
    standing: Optimality | None = None
    """How good it is, in mode best."""


class RefusedClaim(msgspec.Struct, frozen=True, kw_only=True, tag="refused", tag_field="outcome"):
    """A claim that no node can serve, with the accounts of every node."""

    claim: str
    reason: str
    nodes: tuple[Explanation, ...]
    nearest_fix: str | None
    """What would make the first node that can be helped accept it; None where no single change does."""


def allocate_each(
    nodes: Sequence[Node],
    classes: Iterable[DeviceClass],
    slices: Iterable[ResourceSlice],
    claims: Sequence[ResourceClaim],
    *,
    mode: SearchMode = "exact",
    features: Features = Features(),  # noqa: B008 (a frozen value)
    proceed: Callable[[], bool] = unbounded,
) -> tuple[PlacedClaim | RefusedClaim, ...]:
    """Place each claim as the claim of a pod of its own. Claims that have an allocation keep it."""
    cluster = _Cluster(nodes, tuple(classes), SliceIndex(slices), claims, mode, features, proceed)
    return tuple(cluster.place(claim) for claim in claims if claim.status.allocation is None)


class _Cluster:
    """Nodes, and the claims that hold devices so far."""

    def __init__(
        self,
        nodes: Sequence[Node],
        classes: Sequence[DeviceClass],
        index: SliceIndex,
        claims: Iterable[ResourceClaim],
        mode: SearchMode,
        features: Features,
        proceed: Callable[[], bool],
    ) -> None:
        self._nodes = nodes
        self._classes = classes
        self._index = index
        self._mode: SearchMode = mode
        self._features = features
        self._proceed = proceed
        self._selectors = SelectorCache()
        self._holding = [claim for claim in claims if claim.status.allocation is not None]

    def place(self, claim: ResourceClaim) -> PlacedClaim | RefusedClaim:
        reason = "no node can serve it"
        for node in self._nodes:
            outcome = allocate(
                node,
                self._classes,
                self._index,
                [claim],
                mode=self._mode,
                state=self._in_use(),
                features=self._features,
                proceed=self._proceed,
                selectors=self._selectors,
            )
            if isinstance(outcome, Allocation):
                return self._hold(claim, outcome)
            if isinstance(outcome, Fault) and outcome.scope is FaultScope.ATTEMPT:
                reason = outcome.reason
                break
        return RefusedClaim(
            claim=claim_title(claim),
            reason=reason,
            nodes=self._explained(claim),
            nearest_fix=self._fix(claim),
        )

    def _in_use(self) -> InUse:
        return in_use_by(self._holding, shares=self._features.consumable_capacity)

    def _hold(self, claim: ResourceClaim, outcome: Allocation) -> PlacedClaim:
        status = ResourceClaimStatus(allocation=outcome.results[0])
        self._holding.append(msgspec.structs.replace(claim, status=status))
        return PlacedClaim(
            claim=claim_title(claim),
            node=outcome.node,
            allocation=outcome.results[0],
            standing=outcome.standing,
        )

    def _explained(self, claim: ResourceClaim) -> tuple[Explanation, ...]:
        state = self._in_use()
        return tuple(
            explain(
                node,
                self._classes,
                self._index,
                [claim],
                state=state,
                features=self._features,
                proceed=self._proceed,
            )
            for node in self._nodes
        )

    def _fix(self, claim: ResourceClaim) -> str | None:
        state = self._in_use()
        for node in self._nodes:
            fix = nearest_fix(
                node,
                self._classes,
                self._index,
                [claim],
                state=state,
                features=self._features,
                proceed=self._proceed,
            )
            if fix is not None:
                return f"{fix.text} (then {node.metadata.name} can serve it)"
        return None
