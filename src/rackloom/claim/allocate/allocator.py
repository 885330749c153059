"""The door of the allocator: what a node can give to the claims of one pod, or why not.

Mode exact gives the answer of upstream's first-fit search: the same devices, in the same order, and the same
distinction between "not here" and an error. Mode best starts from it and looks for the valid answer of least
`Cost`; where exact has none, best has none either. All that is needed is passed in; nothing is kept.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Literal

from rackloom.claim.allocate.best import Best, Found
from rackloom.claim.allocate.desk import Desk, offer_of
from rackloom.claim.allocate.eligibility import Selectors
from rackloom.claim.allocate.features import Features
from rackloom.claim.allocate.ledger import Entry
from rackloom.claim.allocate.nodes import MalformedSelector
from rackloom.claim.allocate.objects import AllocationResult, DeviceClass, Node, ResourceClaim, ResourceSlice
from rackloom.claim.allocate.outcome import Allocation, Fault, Outcome, Refusal, Scope, Stop
from rackloom.claim.allocate.pools import SliceIndex, Trouble
from rackloom.claim.allocate.requests import Ask
from rackloom.claim.allocate.results import result_of
from rackloom.claim.allocate.use import InUse

Mode = Literal["exact", "best"]


def numbered_ids() -> Callable[[], str]:
    """Share ids for planning: counted, so that the same input gives the same answer. Never store them."""
    numbers = count(1)
    return lambda: f"00000000-0000-4000-8000-{next(numbers):012x}"


def always() -> bool:
    """No bound on the search."""
    return True


def allocate(
    node: Node,
    classes: Iterable[DeviceClass],
    slices: Iterable[ResourceSlice] | SliceIndex,
    claims: Sequence[ResourceClaim],
    *,
    mode: Mode = "exact",
    state: InUse = InUse(),  # noqa: B008 (a frozen value)
    features: Features = Features(),  # noqa: B008
    proceed: Callable[[], bool] = always,
    selectors: Selectors | None = None,
) -> Outcome:
    """Devices for all `claims` of a pod on `node`, a refusal, or a fault.

    `proceed` is asked before every step; when it says no, the outcome is an undecided fault, or in mode best
    the best answer so far, whose standing says that it is not proved. Pass a SliceIndex and one Selectors
    for all calls where there are many: they keep what is the same from call to call.
    """
    index = slices if isinstance(slices, SliceIndex) else SliceIndex(slices)
    try:
        offer = offer_of(node, index, features)
        named = {one.metadata.name: one for one in classes}
        desk = Desk(offer, named, claims, state, features, selectors or Selectors())
        return _answer_at(desk, proceed, mode)
    except Stop as stop:
        return fault_of(node, stop, 0)


def _answer_at(desk: Desk, proceed: Callable[[], bool], mode: Mode) -> Outcome:
    """The answer for what lies on the desk."""
    search = desk.search(proceed)
    try:
        if not search.run():
            return refusal_at(desk, search.steps)
        found = Found(tuple(search.chosen), tuple(desk.ledger.entries))
        best = _improved(desk, found, proceed) if mode == "best" else None
        answer = best.found if best else found
        results = results_of(desk.node, desk.claims, answer.chosen, answer.entries, numbered_ids())
    except Stop as stop:
        return fault_of(desk.node, stop, search.steps)
    return Allocation(
        node=desk.node.metadata.name,
        results=results,
        steps=search.steps + (best.trials if best else 0),
        standing=best.standing if best else None,
    )


def _improved(desk: Desk, first: Found, proceed: Callable[[], bool]) -> Best:
    """The search for something better than the first fit, when it is over."""
    desk.ledger.clear()
    best = Best(desk, first, proceed)
    best.run()
    return best


def fault_of(node: Node, stop: Stop, steps: int) -> Fault:
    """The fault that a Stop reports."""
    return Fault(
        node=node.metadata.name, scope=stop.scope, reason=stop.reason, undecided=stop.undecided, steps=steps
    )


def refusal_at(desk: Desk, steps: int) -> Refusal | Fault:
    """The no for a desk. Upstream calls it an error of the node if a pool contradicts itself."""
    invalid = [pool for pool in desk.pools if pool.trouble is Trouble.INVALID]
    if not invalid:
        return Refusal(node=desk.node.metadata.name, steps=steps)
    named = "; ".join(f"{'/'.join(pool.key)}: {pool.reason}" for pool in invalid)
    return Fault(
        node=desk.node.metadata.name,
        scope=Scope.NODE,
        reason=f"invalid resource pools were encountered: {named}",
        steps=steps,
    )


def results_of(
    node: Node,
    claims: Sequence[ResourceClaim],
    chosen: Sequence[Ask],
    entries: Sequence[Entry],
    new_id: Callable[[], str],
) -> tuple[AllocationResult, ...]:
    """One result per claim. Raises Stop where the node selector of one cannot be made."""
    try:
        return tuple(
            result_of(
                node.metadata.name,
                claim,
                [ask for ask in chosen if ask.claim == number],
                [entry for entry in entries if entry.ask.claim == number],
                new_id,
            )
            for number, claim in enumerate(claims)
        )
    except MalformedSelector as error:
        raise Stop(f"the node selector of an allocation cannot be made: {error}") from error
