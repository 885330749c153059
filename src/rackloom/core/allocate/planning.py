"""Claims placed one after the other on the first node that fits, with a nearest fix for each refusal.

`allocate_each` treats every claim as that of a separate pod and places it with `Fleet`. Claims with an
allocation keep it, and each new allocation counts as in use for the next claim. A fault of one node
skips that node, and a fault of the attempt refuses the claim. A refused claim carries the explanation of
every node.

`nearest_fix` finds the first small change under which the allocator accepts the claims. It tries, in
this order: free the devices of one other claim, tolerate one taint, request fewer devices in one request
(as many as fit), leave out one constraint, leave out the selectors of one request. Every change is made on
a copy of the input and allocated. A named fix therefore works on that node as things stand.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.allocator import SearchMode, allocate, unbounded
from rackloom.core.allocate.eligibility import SelectorCache
from rackloom.core.allocate.explanation import Explanation
from rackloom.core.allocate.fleet import Fleet
from rackloom.core.allocate.inputs import MAX_RESULTS, DeviceId, Features, InUse, claim_title, in_use_by
from rackloom.core.allocate.objects import (
    AllocationResult,
    DeviceClass,
    DeviceToleration,
    Node,
    RequestSpec,
    ResourceClaim,
    ResourceClaimStatus,
    ResourceSlice,
)
from rackloom.core.allocate.outcome import Allocation, Fault, Optimality
from rackloom.core.allocate.pools import SliceIndex
from rackloom.core.progress import EachInTurn, in_turn

# The nearest fix: single changes, each tried by allocating.


class AllocationFix(msgspec.Struct, frozen=True, kw_only=True):
    """A change under which the claims can be met on the node."""

    text: str
    claims: tuple[ResourceClaim, ...]
    """The claims with the change."""
    state: InUse
    """The devices in use with the change, in the pools that the node may reach."""


def nearest_fix(
    node: Node,
    classes: Sequence[DeviceClass],
    slices: SliceIndex,
    claims: Sequence[ResourceClaim],
    *,
    state: InUse = InUse(),  # noqa: B008 (a frozen value)
    features: Features = Features(),  # noqa: B008
    proceed: Callable[[], bool] = unbounded,
    selectors: SelectorCache | None = None,
) -> AllocationFix | None:
    """The first single change that helps, smallest first, or None if there is none."""
    kept = selectors or SelectorCache()
    for fix in _single_changes(slices, tuple(claims), _state_near(node, slices, state)):
        outcome = allocate(
            node,
            classes,
            slices,
            fix.claims,
            state=fix.state,
            features=features,
            proceed=proceed,
            selectors=kept,
        )
        if isinstance(outcome, Allocation):
            return fix
    return None


def _state_near(node: Node, slices: SliceIndex, state: InUse) -> InUse:
    """The use of the pools that the node may reach. Nothing else matters to it."""
    pools = {(slice_.spec.driver, slice_.spec.pool.name) for slice_ in slices.near(node.metadata.name)}

    def near(device: DeviceId) -> bool:
        return (device.driver, device.pool) in pools

    return InUse(
        dedicated=frozenset(filter(near, state.dedicated)),
        shared=frozenset(filter(near, state.shared)),
        consumed={device: taken for device, taken in state.consumed.items() if near(device)},
        holders={device: names for device, names in state.holders.items() if near(device)},
    )


def _single_changes(
    slices: SliceIndex, claims: tuple[ResourceClaim, ...], state: InUse
) -> Iterator[AllocationFix]:
    for holder in dict.fromkeys(name for names in state.holders.values() for name in names):
        kept = frozenset(device for device in state.dedicated if holder not in state.holders.get(device, ()))
        # A claim that holds only shares is left out: the amounts of its shares are not known separately.
        if kept != state.dedicated:
            text, freed = f"free the devices of claim {holder}", replace(state, dedicated=kept)
            yield AllocationFix(text=text, claims=claims, state=freed)
    for edit in (_with_toleration(slices), _with_fewer_devices, _without_one_constraint, _without_selectors):
        for number, claim in enumerate(claims):
            for text, changed in edit(claim):
                edited = (*claims[:number], changed, *claims[number + 1 :])
                yield AllocationFix(text=f"{text} of claim {claim_title(claim)}", claims=edited, state=state)


ClaimEdit = Callable[[ResourceClaim], Iterator[tuple[str, ResourceClaim]]]


def _with_toleration(slices: SliceIndex) -> ClaimEdit:
    """With a toleration for one of the taints that devices have."""
    taints = dict.fromkeys((taint.key, taint.effect) for taint in slices.taints())

    def edit(claim: ResourceClaim) -> Iterator[tuple[str, ResourceClaim]]:
        for key, effect in taints:
            toleration = DeviceToleration(key=key, operator="Exists", effect=effect)

            def change(spec: RequestSpec, added: DeviceToleration = toleration) -> RequestSpec:
                return replace(spec, tolerations=(*spec.tolerations, added))

            yield from _with_one_request_changed(claim, f"tolerate the taint {key}:{effect}", change)

    return edit


def _with_fewer_devices(claim: ResourceClaim) -> Iterator[tuple[str, ResourceClaim]]:
    """With fewer devices in one request, as many as there can be."""
    most = max((spec.count for request in claim.spec.devices.requests for spec in request.specs), default=0)
    for count in range(min(most - 1, MAX_RESULTS), 0, -1):

        def change(spec: RequestSpec, count: int = count) -> RequestSpec:
            return replace(spec, count=min(count, spec.count))

        yield from _with_one_request_changed(claim, f"ask for {count}", change)


def _without_one_constraint(claim: ResourceClaim) -> Iterator[tuple[str, ResourceClaim]]:
    constraints = claim.spec.devices.constraints
    for number, constraint in enumerate(constraints):
        rest = (*constraints[:number], *constraints[number + 1 :])
        kind = "matchAttribute" if constraint.match_attribute else "distinctAttribute"
        text = f"leave out {kind} {constraint.match_attribute or constraint.distinct_attribute}"
        yield text, claim.with_devices(constraints=rest)


def _without_selectors(claim: ResourceClaim) -> Iterator[tuple[str, ResourceClaim]]:
    yield from _with_one_request_changed(
        claim, "leave out the selectors", lambda spec: replace(spec, selectors=())
    )


def _with_one_request_changed(
    claim: ResourceClaim, text: str, change: Callable[[RequestSpec], RequestSpec]
) -> Iterator[tuple[str, ResourceClaim]]:
    """The claim with one request changed, for every request that the change touches."""
    requests = claim.spec.devices.requests
    for number, request in enumerate(requests):
        if request.exactly is not None:
            changed = replace(request, exactly=change(request.exactly))
        else:
            changed = replace(request, first_available=tuple(map(change, request.first_available)))
        if changed != request:
            edited = (*requests[:number], changed, *requests[number + 1 :])
            yield f"{text} in request {request.name}", claim.with_devices(requests=edited)


# Claims of several pods, one after the other.


class PlacedClaim(msgspec.Struct, frozen=True, kw_only=True, tag="placed", tag_field="outcome"):
    """A claim that has its devices."""

    claim: str
    node: str
    allocation: AllocationResult
    optimality: Optimality | None = None
    """The quality of the answer, in mode best."""


class RefusedClaim(msgspec.Struct, frozen=True, kw_only=True, tag="refused", tag_field="outcome"):
    """A claim that no node can serve, with the explanation of every node."""

    claim: str
    reason: str
    nodes: tuple[Explanation, ...]
    nearest_fix: str | None
    """The fix for the first node that a single change can help, or None if there is no such node."""


def allocate_each(
    nodes: Sequence[Node],
    classes: Iterable[DeviceClass],
    slices: Iterable[ResourceSlice],
    claims: Sequence[ResourceClaim],
    *,
    mode: SearchMode = "exact",
    features: Features = Features(),  # noqa: B008 (a frozen value)
    proceed: Callable[[], bool] = unbounded,
    each: EachInTurn = in_turn,
) -> tuple[PlacedClaim | RefusedClaim, ...]:
    """Place each claim as if each belonged to a separate pod. Claims that have an allocation keep it.

    `each` is given the claims that have none, and may report their progress.
    """
    known = tuple(classes)
    fleet = Fleet(nodes, known, slices, features=features)
    holding = [claim for claim in claims if claim.status.allocation is not None]
    fleet.occupy([claim.status.allocation for claim in holding if claim.status.allocation is not None])
    answers: list[PlacedClaim | RefusedClaim] = []
    waiting = [claim for claim in claims if claim.status.allocation is None]
    for claim in each(waiting, "claims allocated"):
        outcome = fleet.place([claim], mode=mode, proceed=proceed)
        if isinstance(outcome, Allocation):
            given = outcome.results[0]
            placed = PlacedClaim(
                claim=claim_title(claim), node=outcome.node, allocation=given, optimality=outcome.optimality
            )
            answers.append(placed)
            holding.append(replace(claim, status=ResourceClaimStatus(allocation=given)))
            continue
        reason = outcome.reason if isinstance(outcome, Fault) else "no node can serve it"
        state = in_use_by(holding, shares=features.consumable_capacity)
        accounts = tuple(
            fleet.explain_on(node.metadata.name, [claim], holders=state.holders, proceed=proceed)
            for node in nodes
        )
        # The first node that a single change helps is enough: to try a change is to allocate.
        nearest = None
        for node in nodes:
            fix = nearest_fix(
                node,
                known,
                fleet.index,
                [claim],
                state=state,
                features=features,
                proceed=proceed,
                selectors=fleet.selectors,
            )
            if fix is not None:
                nearest = f"{fix.text} (then {node.metadata.name} can serve it)"
                break
        refused = RefusedClaim(claim=claim_title(claim), reason=reason, nodes=accounts, nearest_fix=nearest)
        answers.append(refused)
    return tuple(answers)
