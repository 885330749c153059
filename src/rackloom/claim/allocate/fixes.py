"""The nearest fix of a refusal: the first small change under which the real allocator says yes.

Nothing is guessed. Every change is made on a copy of the input and tried, so a fix that is named works on
that node as things stand.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from rackloom.claim.allocate.allocator import allocate, always
from rackloom.claim.allocate.features import Features
from rackloom.claim.allocate.objects import (
    DeviceClass,
    DeviceRequest,
    DeviceSubRequest,
    DeviceToleration,
    ExactDeviceRequest,
    Node,
    ResourceClaim,
)
from rackloom.claim.allocate.outcome import Allocation
from rackloom.claim.allocate.pools import SliceIndex
from rackloom.claim.allocate.requests import MAX_RESULTS, title
from rackloom.claim.allocate.use import InUse

Wanted = ExactDeviceRequest | DeviceSubRequest


class Fix(msgspec.Struct, frozen=True, kw_only=True):
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
    proceed: Callable[[], bool] = always,
) -> Fix | None:
    """The first change that helps, the smallest first; None where no single one does."""
    for fix in _changes(slices, tuple(claims), state):
        outcome = allocate(
            node, classes, slices, fix.claims, state=fix.state, features=features, proceed=proceed
        )
        if isinstance(outcome, Allocation):
            return fix
    return None


def _changes(slices: SliceIndex, claims: tuple[ResourceClaim, ...], state: InUse) -> Iterator[Fix]:
    for text, freed in _freed(state):
        yield Fix(text=text, claims=claims, state=freed)
    edits = [_tolerant(slices), _smaller, _unconstrained, _unselected]
    for edit in edits:
        for number, claim in enumerate(claims):
            for text, changed in edit(claim):
                edited = (*claims[:number], changed, *claims[number + 1 :])
                yield Fix(text=f"{text} of claim {title(claim)}", claims=edited, state=state)


def _freed(state: InUse) -> Iterator[tuple[str, InUse]]:
    """Without the devices of one claim."""
    for holder in dict.fromkeys(name for names in state.holders.values() for name in names):
        kept = frozenset(one for one in state.dedicated if holder not in state.holders.get(one, ()))
        if kept != state.dedicated:
            yield f"free the devices of claim {holder}", msgspec.structs.replace(state, dedicated=kept)


Edit = Callable[[ResourceClaim], Iterator[tuple[str, ResourceClaim]]]


def _tolerant(slices: SliceIndex) -> Edit:
    """With a toleration for one of the taints that devices have."""
    taints = dict.fromkeys((taint.key, taint.effect) for taint in slices.taints())

    def edit(claim: ResourceClaim) -> Iterator[tuple[str, ResourceClaim]]:
        for key, effect in taints:
            toleration = DeviceToleration(key=key, operator="Exists", effect=effect)
            change = partial(_tolerating, toleration)
            yield from _edited(claim, f"tolerate the taint {key}:{effect}", change)

    return edit


def _smaller(claim: ResourceClaim) -> Iterator[tuple[str, ResourceClaim]]:
    """With fewer devices in one request, as many as there can be."""
    most = max((_count(one) for one in claim.spec.devices.requests), default=0)
    for count in range(min(most - 1, MAX_RESULTS), 0, -1):
        yield from _edited(claim, f"ask for {count}", partial(_at_most, count))


def _unconstrained(claim: ResourceClaim) -> Iterator[tuple[str, ResourceClaim]]:
    constraints = claim.spec.devices.constraints
    for number, one in enumerate(constraints):
        rest = (*constraints[:number], *constraints[number + 1 :])
        kind = "matchAttribute" if one.match_attribute else "distinctAttribute"
        devices = msgspec.structs.replace(claim.spec.devices, constraints=rest)
        yield (
            f"leave out {kind} {one.match_attribute or one.distinct_attribute}",
            _with_devices(claim, devices),
        )


def _unselected(claim: ResourceClaim) -> Iterator[tuple[str, ResourceClaim]]:
    yield from _edited(claim, "leave out the selectors", _without_selectors)


def _tolerating(toleration: DeviceToleration, one: Wanted) -> Wanted:
    return msgspec.structs.replace(one, tolerations=(*one.tolerations, toleration))


def _at_most(count: int, one: Wanted) -> Wanted:
    return msgspec.structs.replace(one, count=count) if one.count > count else one


def _without_selectors(one: Wanted) -> Wanted:
    return msgspec.structs.replace(one, selectors=())


def _edited(
    claim: ResourceClaim, text: str, change: Callable[[Wanted], Wanted]
) -> Iterator[tuple[str, ResourceClaim]]:
    """The claim with one request changed, for every request that the change touches."""
    requests = claim.spec.devices.requests
    for number, request in enumerate(requests):
        changed = _changed(request, change)
        if changed != request:
            all_of_them = (*requests[:number], changed, *requests[number + 1 :])
            devices = msgspec.structs.replace(claim.spec.devices, requests=all_of_them)
            yield f"{text} in request {request.name}", _with_devices(claim, devices)


def _changed(request: DeviceRequest, change: Callable[[Wanted], Wanted]) -> DeviceRequest:
    if request.exactly is not None:
        return msgspec.structs.replace(request, exactly=change(request.exactly))
    return msgspec.structs.replace(
        request, first_available=tuple(change(one) for one in request.first_available)
    )


def _count(request: DeviceRequest) -> int:
    asked: Sequence[Wanted] = (request.exactly,) if request.exactly else request.first_available
    return max((one.count for one in asked), default=0)


def _with_devices(claim: ResourceClaim, devices: object) -> ResourceClaim:
    return msgspec.structs.replace(claim, spec=msgspec.structs.replace(claim.spec, devices=devices))
