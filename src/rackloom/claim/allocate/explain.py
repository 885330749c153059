"""Why a claim cannot be met: for every request, where each device of the node went.

Every device is counted once, under the first rule that takes it away, in the order in which the allocator
checks: in use, selectors, capacity, counters, taints, constraints. What is left over is what the request can
choose from when it comes first.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import msgspec

from rackloom.claim.allocate.allocator import always
from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.causes import Cause, Kind
from rackloom.claim.allocate.constraints import Constraint
from rackloom.claim.allocate.desk import Desk, offer_of
from rackloom.claim.allocate.eligibility import Selectors
from rackloom.claim.allocate.features import Features
from rackloom.claim.allocate.objects import DeviceClass, Node, ResourceClaim, ResourceSlice
from rackloom.claim.allocate.outcome import Stop
from rackloom.claim.allocate.pools import SliceIndex
from rackloom.claim.allocate.requests import Ask, Choice
from rackloom.claim.allocate.use import InUse


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that one cause takes away from a request."""

    cause: Kind
    detail: str
    devices: tuple[str, ...]
    """`driver/pool/device` of each."""


class ValueCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many devices of each request have one value of a constrained attribute."""

    value: str
    devices: dict[str, int]


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """What a constraint leaves: its requests, by value."""

    constraint: str
    values: tuple[ValueCount, ...]


class RequestAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Where the devices went, for one request or alternative."""

    claim: str
    request: str
    wanted: int | None
    """Devices asked for; None: all that match."""
    devices: int
    """Devices of all pools that the node reaches."""
    removed: tuple[Removed, ...]
    left: tuple[str, ...]
    """Devices that could serve the request if it came first."""


class PoolAccount(msgspec.Struct, frozen=True, kw_only=True):
    """A pool that nothing is allocated from."""

    pool: str
    trouble: str
    reason: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The accounts of all requests on one node."""

    node: str
    requests: tuple[RequestAccount, ...]
    constraints: tuple[Cut, ...]
    unusable_pools: tuple[PoolAccount, ...]
    conflict: tuple[str, ...]
    """A smallest set of requests that cannot be met together; empty where all can (or it was not decided)."""
    fault: str | None = None
    """Set where the claims could not be worked on at all."""


def explain(
    node: Node,
    classes: Iterable[DeviceClass],
    slices: Iterable[ResourceSlice] | SliceIndex,
    claims: Sequence[ResourceClaim],
    *,
    state: InUse = InUse(),  # noqa: B008 (a frozen value)
    features: Features = Features(),  # noqa: B008
    proceed: Callable[[], bool] = always,
) -> Explanation:
    """The accounts of `claims` on `node`, whether they can be met or not. Takes what `allocate` takes."""
    index = slices if isinstance(slices, SliceIndex) else SliceIndex(slices)
    named = {one.metadata.name: one for one in classes}
    try:
        desk = Desk(offer_of(node, index, features), named, claims, state, features, Selectors())
    except Stop as stop:
        return _empty(node, stop.reason)
    asks = list(chain.from_iterable(chain.from_iterable(desk.choices)))
    accounts = {ask: _removed(desk, ask) for ask in asks}
    return Explanation(
        node=node.metadata.name,
        requests=tuple(_account(desk, ask, accounts[ask]) for ask in asks),
        constraints=tuple(_cuts(desk, asks, accounts)),
        unusable_pools=tuple(
            PoolAccount(pool="/".join(pool.key), trouble=pool.trouble, reason=pool.reason)
            for pool in desk.pools
            if pool.trouble is not None
        ),
        conflict=_conflict(desk, proceed),
    )


def _empty(node: Node, fault: str) -> Explanation:
    return Explanation(
        node=node.metadata.name, requests=(), constraints=(), unusable_pools=(), conflict=(), fault=fault
    )


Accounted = list[tuple[Candidate, Cause | None]]


def _removed(desk: Desk, ask: Ask) -> Accounted:
    return [(one, _cause(desk, ask, one)) for one in desk.candidates]


def _cause(desk: Desk, ask: Ask, candidate: Candidate) -> Cause | None:
    used = desk.ledger.in_use(ask, candidate)
    if used is not None:
        return used
    verdict = desk.eligibility.verdict(ask, candidate)
    if isinstance(verdict, Stop):
        return Cause(Kind.SELECTOR_FAILS, verdict.reason)
    return verdict or desk.ledger.short(ask, candidate) or desk.ledger.broken(ask, candidate)


def _account(desk: Desk, ask: Ask, accounted: Accounted) -> RequestAccount:
    removed: dict[Cause, list[str]] = {}
    for candidate, cause in accounted:
        if cause is not None:
            removed.setdefault(cause, []).append(str(candidate.id))
    order = list(Kind)
    return RequestAccount(
        claim=ask.claim_name,
        request=ask.name,
        wanted=None if ask.everything else ask.count,
        devices=len(desk.candidates),
        removed=tuple(
            Removed(cause=cause.kind, detail=cause.detail, devices=tuple(devices))
            for cause, devices in sorted(removed.items(), key=lambda item: order.index(item[0].kind))
        ),
        left=tuple(str(candidate.id) for candidate, cause in accounted if cause is None),
    )


def _cuts(desk: Desk, asks: Sequence[Ask], accounts: dict[Ask, Accounted]) -> Iterator[Cut]:
    for claim, constraints in enumerate(desk.constraints):
        for constraint in constraints:
            covered = [ask for ask in asks if ask.claim == claim and ask.named_in(constraint.requests)]
            yield Cut(constraint=str(constraint), values=_by_value(constraint, covered, accounts))


def _by_value(
    constraint: Constraint, covered: Sequence[Ask], accounts: dict[Ask, Accounted]
) -> tuple[ValueCount, ...]:
    counts: dict[tuple[str, object], dict[str, int]] = {}
    for ask in covered:
        for candidate, cause in accounts[ask]:
            for value in (constraint.values(candidate) or ()) if cause is None else ():
                of_value = counts.setdefault(value, {one.name: 0 for one in covered})
                of_value[ask.name] += 1
    return tuple(
        ValueCount(value=str(value), devices=of)
        for (_, value), of in sorted(counts.items(), key=lambda item: str(item[0]))
    )


def _conflict(desk: Desk, proceed: Callable[[], bool]) -> tuple[str, ...]:
    """Leaves out one request after the other for as long as the rest still cannot be met."""
    plan = list(chain.from_iterable(desk.choices))
    if _met(desk, plan, proceed) is not False:
        return ()
    for choice in list(plan):
        rest = [one for one in plan if one is not choice]
        if _met(desk, rest, proceed) is False:
            plan = rest
    return tuple(f"{choice[0].claim_name}/{choice[0].request}" for choice in plan)


def _met(desk: Desk, plan: Sequence[Choice], proceed: Callable[[], bool]) -> bool | None:
    """Whether the requests of `plan` can be met; None where an error or the bound comes first."""
    search = desk.search(proceed, plan)
    try:
        return search.run()
    except Stop:
        return None
    finally:
        while desk.ledger.entries:
            desk.ledger.strike()
