"""Claims over many nodes at a cost that does not grow with their number.

Upstream works on every node anew for every pod. Nodes of one machine type differ in names, addresses and
uuids, which few claims read, so to a claim most nodes are copies of each other: same devices, position by
position, X holds for all. The chosen node is the first in order that can serve, as if each were asked.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence

import msgspec

from rackloom.claim.allocate.allocator import always, fault_of, numbered_ids, refusal_at, results_of
from rackloom.claim.allocate.conditions import Kinds, View
from rackloom.claim.allocate.desk import Desk, Offer, offer_of
from rackloom.claim.allocate.eligibility import Selectors
from rackloom.claim.allocate.features import Features
from rackloom.claim.allocate.ledger import Entry
from rackloom.claim.allocate.objects import AllocationResult, DeviceClass, Node, ResourceClaim, ResourceSlice
from rackloom.claim.allocate.occupancy import Occupancy
from rackloom.claim.allocate.outcome import Allocation, Fault, Outcome, Refusal, Scope, Stop
from rackloom.claim.allocate.pools import SliceIndex
from rackloom.claim.allocate.requests import Ask


class Pattern(msgspec.Struct, frozen=True):
    """An answer that holds on every node of a condition."""

    chosen: tuple[Ask, ...]
    entries: tuple[Entry, ...]
    """Only asks, positions and amounts count; the devices are those of the node that was searched."""
    steps: int


class Fleet:
    """Nodes with devices of their own, and what is in use on them.

    Slices must name their node. Devices that several nodes reach tie nodes together; `allocate` is for those.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        classes: Iterable[DeviceClass],
        slices: Iterable[ResourceSlice],
        *,
        features: Features = Features(),  # noqa: B008 (a frozen value)
    ) -> None:
        """Raises Stop for slices that do not name their node."""
        index = SliceIndex(slices)
        if index.unbound():
            raise Stop("a fleet takes slices that name their node")
        self._offers = [offer_of(node, index, features) for node in nodes]
        self._number = {node.metadata.name: number for number, node in enumerate(nodes)}
        self._used = [Occupancy() for _ in nodes]
        self._classes = {one.metadata.name: one for one in classes}
        self._features = features
        self._selectors = Selectors()
        self._new_id = numbered_ids()
        self._views: dict[bytes, View[Pattern | Refusal | Fault]] = {}

    def place(self, claims: Sequence[ResourceClaim], *, proceed: Callable[[], bool] = always) -> Outcome:
        """Give the claims of one pod their devices on the first node that can serve them, and note the use.

        A refusal names no node. A fault of a node passes the node over, like upstream; one of the attempt, or
        a search that `proceed` stopped, is the outcome.
        """
        view = self._view(claims)
        while (found := view.first()) is not None:
            number, condition = found
            answer = view.answers.get(condition) or self._searched(number, claims, proceed)
            if isinstance(answer, Fault) and answer.scope is Scope.ATTEMPT:
                return answer
            view.answers[condition] = answer
            if isinstance(answer, Pattern):
                return self._taken(number, claims, answer)
            view.close(condition)
        return Refusal(node="", steps=0)

    def occupy(self, node: str, results: Iterable[AllocationResult]) -> None:
        """Note that claims that were allocated elsewhere hold devices of `node`."""
        number = self._number[node]
        self._used[number].add(self._offers[number], results)
        self._moved(number)

    def release(self, node: str, results: Iterable[AllocationResult]) -> None:
        """Note that devices of `node` are free again."""
        number = self._number[node]
        self._used[number].remove(self._offers[number], results)
        self._moved(number)

    def _view(self, claims: Sequence[ResourceClaim]) -> View[Pattern | Refusal | Fault]:
        key = msgspec.json.encode([claim.spec for claim in claims])
        if key not in self._views:
            looks = Kinds()
            kinds = [self._kind(offer, claims, looks) for offer in self._offers]
            self._views[key] = View(kinds, [used.key() for used in self._used])
        return self._views[key]

    def _kind(self, offer: Offer, claims: Sequence[ResourceClaim], looks: Kinds) -> Hashable:
        try:
            desk = Desk(
                offer, self._classes, claims, Occupancy().as_in_use(offer), self._features, self._selectors
            )
        except Stop as stop:
            return stop.reason
        return looks.of(desk)

    def _searched(
        self, number: int, claims: Sequence[ResourceClaim], proceed: Callable[[], bool]
    ) -> Pattern | Refusal | Fault:
        offer = self._offers[number]
        steps = 0
        try:
            state = self._used[number].as_in_use(offer)
            desk = Desk(offer, self._classes, claims, state, self._features, self._selectors)
            search = desk.search(proceed)
            found = search.run()
            steps = search.steps
            return (
                Pattern(tuple(search.chosen), tuple(desk.ledger.entries), steps)
                if found
                else refusal_at(desk, steps)
            )
        except Stop as stop:
            return fault_of(offer.node, stop, steps)

    def _taken(self, number: int, claims: Sequence[ResourceClaim], answer: Pattern) -> Outcome:
        offer = self._offers[number]
        entries = [
            Entry(one.ask, offer.candidates[one.candidate.position], one.consumption, one.charged)
            for one in answer.entries
        ]
        try:
            results = results_of(offer.node, claims, answer.chosen, entries, self._new_id)
        except Stop as stop:
            return fault_of(offer.node, stop, answer.steps)
        self.occupy(offer.node.metadata.name, results)
        return Allocation(node=offer.node.metadata.name, results=results, steps=answer.steps)

    def _moved(self, number: int) -> None:
        key = self._used[number].key()
        for view in self._views.values():
            view.moved(number, key)
