"""The entry point: what one node can give to the claims of one pod, or why not.

Mode exact gives the answer of upstream's first-fit search: the same devices in the same order, and the
same distinction between "not on this node" and an error. Mode best starts from that answer and looks
for the valid one of least `Cost`. Where exact has no answer, best has none either.

A node on which the requests cannot be met is refused. If one of its pools is invalid, the refusal
becomes a fault of the node, as upstream reports it. All input is passed in and nothing is kept between
calls. Callers with many calls pass a `SliceIndex` and a `SelectorCache` to keep what stays the same.

Share ids in results are counted, so that planning is reproducible. They must never be stored in a
cluster.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Literal

from rackloom.core.allocate.best import BranchAndBound, FoundAnswer
from rackloom.core.allocate.eligibility import SelectorCache
from rackloom.core.allocate.inputs import Features, InUse, RequestAlternative
from rackloom.core.allocate.ledger import DeviceAssignment
from rackloom.core.allocate.objects import AllocationResult, DeviceClass, Node, ResourceClaim, ResourceSlice
from rackloom.core.allocate.outcome import Allocation, AllocationStopped, Fault, FaultScope, Outcome, Refusal
from rackloom.core.allocate.pools import MalformedNodeSelector, PoolProblem, SliceIndex
from rackloom.core.allocate.problem import AllocationProblem, allocation_result, node_devices

SearchMode = Literal["exact", "best"]


def numbered_ids() -> Callable[[], str]:
    """Share ids for planning: counted, so that the same input gives the same answer. Never store them."""
    numbers = count(1)
    return lambda: f"00000000-0000-4000-8000-{next(numbers):012x}"


def unbounded() -> bool:
    """No bound on the search."""
    return True


def allocate(
    node: Node,
    classes: Iterable[DeviceClass],
    slices: Iterable[ResourceSlice] | SliceIndex,
    claims: Sequence[ResourceClaim],
    *,
    mode: SearchMode = "exact",
    state: InUse = InUse(),  # noqa: B008 (a frozen value)
    features: Features = Features(),  # noqa: B008
    proceed: Callable[[], bool] = unbounded,
    selectors: SelectorCache | None = None,
) -> Outcome:
    """Devices for all `claims` of a pod on `node`, a refusal, or a fault.

    `proceed` is asked before every step; when it says no, the outcome is an undecided fault, or in mode best
    the best answer so far, whose standing says that it is not proved. Pass a SliceIndex and one Selectors
    for all calls where there are many: they keep what is the same from call to call.
    """
    index = slices if isinstance(slices, SliceIndex) else SliceIndex(slices)
    try:
        offer = node_devices(node, index, features)
        named = {klass.metadata.name: klass for klass in classes}
        desk = AllocationProblem(offer, named, claims, state, features, selectors or SelectorCache())
        return _solve(desk, proceed, mode)
    except AllocationStopped as stop:
        return fault_of(node, stop, 0)


def _solve(desk: AllocationProblem, proceed: Callable[[], bool], mode: SearchMode) -> Outcome:
    """The answer for what lies on the desk."""
    search = desk.search(proceed)
    try:
        if not search.run():
            return refusal_of(desk, search.steps)
        found = FoundAnswer(tuple(search.chosen), tuple(desk.ledger.entries))
        best = _improved(desk, found, proceed) if mode == "best" else None
        answer = best.found if best else found
        results = results_of(desk.node, desk.claims, answer.chosen, answer.entries, numbered_ids())
    except AllocationStopped as stop:
        return fault_of(desk.node, stop, search.steps)
    return Allocation(
        node=desk.node.metadata.name,
        results=results,
        steps=search.steps + (best.trials if best else 0),
        standing=best.standing if best else None,
    )


def _improved(desk: AllocationProblem, first: FoundAnswer, proceed: Callable[[], bool]) -> BranchAndBound:
    """The search for something better than the first fit, when it is over."""
    desk.ledger.clear()
    best = BranchAndBound(desk, first, proceed)
    best.run()
    return best


def fault_of(node: Node, stop: AllocationStopped, steps: int) -> Fault:
    """The fault that a Stop reports."""
    return Fault(
        node=node.metadata.name, scope=stop.scope, reason=stop.reason, undecided=stop.undecided, steps=steps
    )


def refusal_of(desk: AllocationProblem, steps: int) -> Refusal | Fault:
    """The no for a desk. Upstream calls it an error of the node if a pool contradicts itself."""
    invalid = [pool for pool in desk.pools if pool.trouble is PoolProblem.INVALID]
    if not invalid:
        return Refusal(node=desk.node.metadata.name, steps=steps)
    named = "; ".join(f"{'/'.join(pool.key)}: {pool.reason}" for pool in invalid)
    return Fault(
        node=desk.node.metadata.name,
        scope=FaultScope.NODE,
        reason=f"invalid resource pools were encountered: {named}",
        steps=steps,
    )


def results_of(
    node: Node,
    claims: Sequence[ResourceClaim],
    chosen: Sequence[RequestAlternative],
    entries: Sequence[DeviceAssignment],
    new_id: Callable[[], str],
) -> tuple[AllocationResult, ...]:
    """One result per claim. Raises Stop where the node selector of one cannot be made."""
    try:
        return tuple(
            allocation_result(
                node.metadata.name,
                claim,
                [ask for ask in chosen if ask.claim == number],
                [entry for entry in entries if entry.ask.claim == number],
                new_id,
            )
            for number, claim in enumerate(claims)
        )
    except MalformedNodeSelector as error:
        raise AllocationStopped(f"the node selector of an allocation cannot be made: {error}") from error
