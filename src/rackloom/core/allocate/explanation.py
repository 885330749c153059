"""Explains why claims cannot be met on a node: the reason for each device, as a value and as text.

For every request, each device of the node is counted once, under the first rule that excludes it.
Rules are applied in the allocator's order: in use, selectors, capacity, counters, taints, constraints.
The request can choose from the remaining devices if it comes first.

For every constraint, the account shows how many remaining devices of each request have each value.

`conflict` names a minimal set of requests that cannot be met together. A deletion filter finds it by
leaving out each request in turn if the search still fails without it. The set is empty if all requests
can be met, or if the search was not decided.

`render_explanation` prints the account for the command line and for events.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import msgspec

from rackloom.core.allocate.allocator import unbounded
from rackloom.core.allocate.eligibility import CandidateDevice, SelectorCache
from rackloom.core.allocate.inputs import Alternatives, Features, InUse, RequestAlternative
from rackloom.core.allocate.objects import DeviceClass, Node, ResourceClaim, ResourceSlice
from rackloom.core.allocate.outcome import AllocationStopped, Cause, CauseKind
from rackloom.core.allocate.pools import SliceIndex
from rackloom.core.allocate.problem import AllocationProblem, devices_on_node
from rackloom.core.allocate.search import FirstFitSearch

# The account as a value.


class RemovedDevices(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that one cause excludes from a request."""

    cause: CauseKind
    detail: str
    devices: tuple[str, ...]
    """The `driver/pool/device` of each device."""


class ValueCount(msgspec.Struct, frozen=True, kw_only=True):
    """The number of devices of each request that have one value of a constrained attribute."""

    value: str
    devices: dict[str, int]


class ConstraintAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that each value of a constraint leaves to its requests."""

    constraint: str
    values: tuple[ValueCount, ...]


class RequestAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that one request or alternative lost and kept."""

    claim: str
    request: str
    wanted: int | None
    """The number of devices requested, or None for all that match."""
    devices: int
    """The number of devices in all pools that the node reaches."""
    removed: tuple[RemovedDevices, ...]
    left: tuple[str, ...]
    """The devices that could serve the request if it came first."""


class PoolAccount(msgspec.Struct, frozen=True, kw_only=True):
    """A pool that nothing is allocated from."""

    pool: str
    trouble: str
    reason: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The accounts of all requests on one node."""

    node: str
    requests: tuple[RequestAccount, ...]
    constraints: tuple[ConstraintAccount, ...]
    unusable_pools: tuple[PoolAccount, ...]
    conflict: tuple[str, ...]
    """A minimal set of requests that cannot be met together. Empty if all can be, or it was not decided."""
    fault: str | None = None
    """Set if the claims could not be processed at all."""


def explain(
    node: Node,
    classes: Iterable[DeviceClass],
    slices: Iterable[ResourceSlice] | SliceIndex,
    claims: Sequence[ResourceClaim],
    *,
    state: InUse = InUse(),  # noqa: B008 (a frozen value)
    features: Features = Features(),  # noqa: B008
    proceed: Callable[[], bool] = unbounded,
    selectors: SelectorCache | None = None,
) -> Explanation:
    """The accounts of `claims` on `node`, whether they can be met or not. The arguments are `allocate`'s."""
    index = slices if isinstance(slices, SliceIndex) else SliceIndex(slices)
    named = {klass.metadata.name: klass for klass in classes}
    try:
        devices = devices_on_node(node, index, features)
        problem = AllocationProblem(devices, named, claims, state, features, selectors or SelectorCache())
    except AllocationStopped as stop:
        return fault_account(node, stop)
    return accounts_of(problem, conflict_of(problem, proceed))


def fault_account(node: Node, stop: AllocationStopped) -> Explanation:
    """The account of claims that could not be processed at all."""
    return Explanation(
        node=node.metadata.name,
        fault=stop.reason,
        requests=(),
        constraints=(),
        unusable_pools=(),
        conflict=(),
    )


def accounts_of(problem: AllocationProblem, conflict: Sequence[int]) -> Explanation:
    """The accounts of a problem. `conflict` has the places in its plan of requests that conflict."""
    asks = list(chain.from_iterable(problem.plan))
    accounts = {
        ask: [(device, _cause(problem, ask, device)) for device in problem.candidates] for ask in asks
    }
    cuts = []
    for claim, constraints in enumerate(problem.constraints):
        for constraint in constraints:
            covered = [ask for ask in asks if ask.claim == claim and ask.named_in(constraint.requests)]
            # Count the devices that every other rule leaves, by value.
            counts: dict[tuple[str, object], dict[str, int]] = {}
            for ask in covered:
                for candidate, cause in accounts[ask]:
                    for value in (constraint.values(ask, candidate) or ()) if cause is None else ():
                        counts.setdefault(value, {request.name: 0 for request in covered})[ask.name] += 1
            values = tuple(
                ValueCount(value=str(value), devices=of)
                for (_, value), of in sorted(counts.items(), key=lambda item: str(item[0]))
            )
            cuts.append(ConstraintAccount(constraint=str(constraint), values=values))
    plan = problem.plan
    return Explanation(
        node=problem.node.metadata.name,
        requests=tuple(_request_account(problem, ask, accounts[ask]) for ask in asks),
        constraints=tuple(cuts),
        unusable_pools=tuple(
            PoolAccount(pool="/".join(pool.key), trouble=pool.trouble, reason=pool.reason)
            for pool in problem.pools
            if pool.trouble is not None
        ),
        conflict=tuple(f"{plan[at][0].claim_name}/{plan[at][0].request}" for at in conflict),
    )


CausesByDevice = list[tuple[CandidateDevice, Cause | None]]


def _cause(problem: AllocationProblem, ask: RequestAlternative, candidate: CandidateDevice) -> Cause | None:
    used = problem.ledger.in_use(ask, candidate)
    if used is not None:
        return used
    verdict = problem.eligibility.verdict(ask, candidate)
    if isinstance(verdict, AllocationStopped):
        return Cause(CauseKind.SELECTOR_FAILS, verdict.reason)
    return verdict or problem.ledger.short(ask, candidate) or problem.ledger.broken(ask, candidate)


def _request_account(
    problem: AllocationProblem, ask: RequestAlternative, accounted: CausesByDevice
) -> RequestAccount:
    removed: dict[Cause, list[str]] = {}
    for candidate, cause in accounted:
        if cause is not None:
            removed.setdefault(cause, []).append(str(candidate.id))
    order = list(CauseKind)
    return RequestAccount(
        claim=ask.claim_name,
        request=ask.name,
        wanted=None if ask.everything else ask.count,
        devices=len(problem.candidates),
        removed=tuple(
            RemovedDevices(cause=cause.kind, detail=cause.detail, devices=tuple(devices))
            for cause, devices in sorted(removed.items(), key=lambda item: order.index(item[0].kind))
        ),
        left=tuple(str(candidate.id) for candidate, cause in accounted if cause is None),
    )


def conflict_of(problem: AllocationProblem, proceed: Callable[[], bool]) -> tuple[int, ...]:
    """A minimal set of requests that cannot be met together, by their places in the plan.

    Leaves out each request in turn if the rest still cannot be met.
    """
    plan = dict(enumerate(problem.plan))
    if _can_be_met(problem, list(plan.values()), proceed) is not False:
        return ()
    for at in list(plan):
        rest = {kept: choice for kept, choice in plan.items() if kept != at}
        if _can_be_met(problem, list(rest.values()), proceed) is False:
            plan = rest
    return tuple(plan)


def _can_be_met(
    problem: AllocationProblem, plan: Sequence[Alternatives], proceed: Callable[[], bool]
) -> bool | None:
    """Whether the requests of `plan` can be met, or None if an error or the bound comes first."""
    try:
        return FirstFitSearch(problem, proceed, plan).run()
    except AllocationStopped:
        return None
    finally:
        problem.ledger.clear()


# The account as text.


_CAUSE_TEXTS = {
    CauseKind.IN_USE: "in use",
    CauseKind.BINDING_CONDITIONS: "has binding conditions",
    CauseKind.CLASS_SELECTOR: "not of the class",
    CauseKind.REQUEST_SELECTOR: "selector is false",
    CauseKind.SELECTOR_FAILS: "selector fails",
    CauseKind.OTHER_NODE: "other node",
    CauseKind.CAPACITY: "capacity",
    CauseKind.COMPATIBILITY_GROUPS: "compatibility groups",
    CauseKind.COUNTERS: "counters",
    CauseKind.TAINT: "taint",
    CauseKind.DERIVED_FAILS: "derived attribute fails",
    CauseKind.CONSTRAINT: "constraint",
    CauseKind.ATTRIBUTE_MISSING: "attribute missing",
}
_SHOWN_VALUES = 8


def render_explanation(explanation: Explanation) -> str:
    """The explanation as lines of text."""
    lines = [f"node {explanation.node}"]
    if explanation.fault is not None:
        lines.append(f"  {explanation.fault}")
    pools = explanation.unusable_pools
    lines += [f"  pool {pool.pool} is {pool.trouble}: {pool.reason}" for pool in pools]
    for account in explanation.requests:
        wanted = "all devices" if account.wanted is None else account.wanted
        left = f"{len(account.left)} of {account.devices} devices are left"
        lines.append(f"  {account.claim}, request {account.request}: wants {wanted}, {left}")
        for removed in account.removed:
            detail = f": {removed.detail}" if removed.detail else ""
            lines.append(f"    {len(removed.devices):>4} {_CAUSE_TEXTS[removed.cause]}{detail}")
    for cut in explanation.constraints:
        lines.append(f"  {cut.constraint}: {'' if cut.values else 'no device is left to compare'}".rstrip())
        for count in cut.values[:_SHOWN_VALUES]:
            devices = ", ".join(f"{request} {number}" for request, number in count.devices.items())
            lines.append(f"    {count.value}: {devices}")
        if len(cut.values) > _SHOWN_VALUES:
            lines.append(f"    and {len(cut.values) - _SHOWN_VALUES} more values")
    if explanation.conflict:
        together = " with ".join(explanation.conflict)
        lines.append(f"  cannot be met{' together' if len(explanation.conflict) > 1 else ''}: {together}")
    return "\n".join(lines)
