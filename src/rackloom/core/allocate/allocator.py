"""The entry point: allocates devices of one node to the claims of one pod, or reports why it cannot.

Mode exact gives the answer of upstream's first-fit search: the same devices in the same order, and the
same distinction between "not on this node" and an error. Mode best starts from that answer and looks
for the valid one of least `Cost`. If exact has no answer, best has none either.

A node that cannot meet the requests is refused. If one of its pools is invalid, the refusal becomes a
fault of the node, as upstream reports it. All input is passed in and nothing is kept between calls. For
many calls, pass one `SliceIndex` and one `SelectorCache`, so that their content is computed only once.

Share ids in results are consecutive numbers, so that planning is reproducible. They must never be stored
in a cluster.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Literal

from rackloom.core.allocate.eligibility import SelectorCache
from rackloom.core.allocate.inputs import Features, InUse
from rackloom.core.allocate.objects import AllocationResult, DeviceClass, Node, ResourceClaim, ResourceSlice
from rackloom.core.allocate.outcome import (
    Allocation,
    AllocationStopped,
    Cost,
    Fault,
    FaultScope,
    Outcome,
    Refusal,
)
from rackloom.core.allocate.pools import MalformedNodeSelector, PoolProblem, SliceIndex
from rackloom.core.allocate.problem import (
    AllocationProblem,
    FoundAnswer,
    allocation_result,
    devices_on_node,
)
from rackloom.core.allocate.search import FirstFitSearch

SearchMode = Literal["exact", "best"]


def numbered_ids() -> Callable[[], str]:
    """Consecutive share ids for planning: the same input gives the same answer. Never store them."""
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

    `proceed` is called before every step. When it returns False, the outcome is an undecided fault, or in
    mode best the best answer so far, with an `optimality` that is not proved. For many calls, pass one
    SliceIndex and one SelectorCache: they keep everything that doesn't change from call to call.
    """
    index = slices if isinstance(slices, SliceIndex) else SliceIndex(slices)
    # A fault before the search, such as a request that no node could meet, has taken no steps.
    try:
        devices = devices_on_node(node, index, features)
        named = {klass.metadata.name: klass for klass in classes}
        problem = AllocationProblem(devices, named, claims, state, features, selectors or SelectorCache())
        return solved(problem, proceed, mode, numbered_ids())
    except AllocationStopped as stop:
        return fault_of(node, stop, 0)


def solved(
    problem: AllocationProblem,
    proceed: Callable[[], bool],
    mode: SearchMode,
    new_id: Callable[[], str],
    below: Cost | None = None,
) -> Outcome:
    """The answer to one problem, or the best answer found in mode best.

    Mode best may skip answers that add `below` or more to the cost.
    """
    search = FirstFitSearch(problem, proceed)
    try:
        if not search.run():
            return refusal_of(problem, search.steps)
        # Mode best starts from this answer, and keeps it if it finds none that costs less.
        found, best = search.answer, None
        if mode == "best":
            # Most searches are in mode exact and never rank answers, so the module is loaded only here.
            from rackloom.core.allocate.best import BranchAndBound

            best = BranchAndBound(problem, found, proceed, below)
            best.run()
        results = results_of(problem.node, problem.claims, best.found if best else found, new_id)
    except AllocationStopped as stop:
        return fault_of(problem.node, stop, search.steps)
    return Allocation(
        node=problem.node.metadata.name,
        results=results,
        steps=search.steps + (best.trials if best else 0),
        optimality=best.optimality if best else None,
    )


def fault_of(node: Node, stop: AllocationStopped, steps: int) -> Fault:
    """The fault that the exception carries."""
    return Fault(
        node=node.metadata.name, scope=stop.scope, reason=stop.reason, undecided=stop.undecided, steps=steps
    )


def refusal_of(problem: AllocationProblem, steps: int) -> Refusal | Fault:
    """The refusal, or a fault of the node if one of its pools is invalid, as upstream reports it."""
    # An incomplete pool is no fault: its driver is still writing, and a later attempt may find the devices.
    invalid = [pool for pool in problem.pools if pool.trouble is PoolProblem.INVALID]
    if not invalid:
        return Refusal(node=problem.node.metadata.name, steps=steps)
    named = "; ".join(f"{'/'.join(pool.key)}: {pool.reason}" for pool in invalid)
    return Fault(
        node=problem.node.metadata.name,
        scope=FaultScope.NODE,
        reason=f"invalid resource pools were encountered: {named}",
        steps=steps,
    )


def results_of(
    node: Node,
    claims: Sequence[ResourceClaim],
    answer: FoundAnswer,
    new_id: Callable[[], str],
) -> tuple[AllocationResult, ...]:
    """One result per claim. Raises AllocationStopped if the node selector of a result cannot be made."""
    # The answer has the entries of all claims in one list. Each result gets those of its claim.
    try:
        return tuple(
            allocation_result(
                node.metadata.name,
                claim,
                [ask for ask in answer.chosen if ask.claim == number],
                [entry for entry in answer.entries if entry.ask.claim == number],
                new_id,
            )
            for number, claim in enumerate(claims)
        )
    except MalformedNodeSelector as error:
        raise AllocationStopped(f"the node selector of an allocation cannot be made: {error}") from error
