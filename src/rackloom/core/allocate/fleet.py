"""The allocator: places the claims of a pod on the first of many nodes that can serve them.

`Fleet.place` gives the answer of upstream's allocator, in upstream's order: the first node that can serve
the claims, and the devices that its first-fit search takes there. The result is the same as if each node
were tried in turn. Mode best tries every node, and takes the valid choice that adds the least `Cost`.

kube-scheduler searches on every node again for every pod. A fleet keeps its findings:

- `fleet_nodes`: the devices that each node reaches, gathered on the first visit, and those in use.
- `node_kinds`: nodes of one kind differ only in values that the claims do not read.
- `attribute_index`: the nodes with a device that has a certain UUID, or another value that selectors pin.
- `spec_view`: for each specification of claims, the nodes that may still serve, and one answer for each
  kind of node with the same positions in use.

A node is visited only if it comes before the one that serves, and has changed since it last refused.
Views and kinds are kept for the most recently used specifications, up to a memory limit.

`find` answers and records nothing. `answer_on` tries one node, and `explain_on` accounts for its devices.
Record a claim that the cluster allocated with `occupy`, and a changed slice with `replace_slice`. The state
is in memory only: after a restart, build the fleet again from slices and claims.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.allocator import (
    SearchMode,
    fault_of,
    numbered_ids,
    refusal_of,
    results_of,
    solved,
    unbounded,
)
from rackloom.core.allocate.attribute_index import AttributeIndexes
from rackloom.core.allocate.eligibility import SelectorCache
from rackloom.core.allocate.explanation import Explanation, accounts_of, conflict_of, fault_account
from rackloom.core.allocate.fleet_nodes import FleetNodes
from rackloom.core.allocate.inputs import DeviceId, Features, InUse
from rackloom.core.allocate.node_kinds import DeviceReads, NodeKinds, reads_of
from rackloom.core.allocate.objects import (
    AllocationResult,
    DeviceClass,
    Node,
    ObjectMeta,
    ResourceClaim,
    ResourceSlice,
)
from rackloom.core.allocate.outcome import (
    Allocation,
    AllocationStopped,
    Cost,
    Fault,
    FaultScope,
    Outcome,
    Refusal,
)
from rackloom.core.allocate.pools import SliceIndex
from rackloom.core.allocate.problem import AllocationProblem, FoundAnswer, NodeDevices
from rackloom.core.allocate.search import FirstFitSearch
from rackloom.core.allocate.spec_view import NodeAnswer, SpecView

if TYPE_CHECKING:
    from rackloom.core.allocate.best import NodeLocalities

KEPT_BYTES = 64 << 20
"""Memory for a fleet's findings by specification. The least recently used one is dropped first."""
_NO_HOLDERS: Mapping[DeviceId, tuple[str, ...]] = {}


class Fleet:
    """Nodes in order, their devices, and the devices that are in use."""

    def __init__(
        self,
        nodes: Sequence[Node],
        classes: Iterable[DeviceClass],
        slices: Iterable[ResourceSlice] | SliceIndex,
        *,
        features: Features = Features(),  # noqa: B008 (a frozen value)
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """`kept_bytes` bounds the memory that is kept between searches: the views and kinds of nodes."""
        self._nodes = FleetNodes(nodes, slices, features)
        self._classes = {klass.metadata.name: klass for klass in classes}
        self._features = features
        self.selectors = SelectorCache()
        """Results of selectors, for callers that explain the fleet's answers."""
        self._indexes = AttributeIndexes(self._nodes, self.selectors)
        self._new_id = numbered_ids()
        self._views: OrderedDict[bytes, SpecView] = OrderedDict()
        self._kinds: dict[DeviceReads, NodeKinds] = {}
        self._most_bytes = kept_bytes
        self.kept_bytes = 0
        """The approximate memory of views and kinds of nodes."""
        self._localities: NodeLocalities | None = None

    @property
    def index(self) -> SliceIndex:
        """All slices."""
        return self._nodes.index

    def place(
        self,
        claims: Sequence[ResourceClaim],
        *,
        mode: SearchMode = "exact",
        proceed: Callable[[], bool] = unbounded,
    ) -> Outcome:
        """Allocate devices for the claims of one pod on the first node that serves them. Record the use."""
        outcome = self.find(claims, mode=mode, proceed=proceed)
        if isinstance(outcome, Allocation):
            self._nodes.take(outcome.results)
        return outcome

    def find(
        self,
        claims: Sequence[ResourceClaim],
        *,
        among: Iterable[str] | None = None,
        mode: SearchMode = "exact",
        proceed: Callable[[], bool] = unbounded,
    ) -> Outcome:
        """The answer that `place` would give. If `among` is given, only these nodes are tried, in that order.

        In mode best, the best answer of all the nodes. A refusal names no node. As in upstream, a node with a
        fault is passed over. A fault of the attempt, or a search that `proceed` stopped, is the outcome.
        """
        view = self._view(claims)
        outcome: Outcome = Refusal(node="", steps=0)
        if mode == "best":
            outcome = self._best(view, claims, among, proceed)
        elif among is not None:
            for name in among:
                number = self._nodes.number[name]
                answer = self._answer(view, number, claims, proceed)
                if not _passes_over(answer):
                    outcome = self._outcome(number, claims, answer)
                    break
        else:
            # A node that refused stays closed until something changes there, so the next pod starts after it.
            view.open.catch_up()
            while (first := view.open.first()) is not None:
                answer = self._answer(view, first, claims, proceed)
                if not _passes_over(answer):
                    outcome = self._outcome(first, claims, answer)
                    break
                view.open.close_first()
        if view.grew:
            self._count(view)
        return outcome

    def answer_on(
        self, node: str, claims: Sequence[ResourceClaim], *, proceed: Callable[[], bool] = unbounded
    ) -> Outcome:
        """The devices that one node gives to the claims, or why it does not. Nothing is recorded."""
        number = self._nodes.number[node]
        return self._outcome(number, claims, self._searched(number, claims, proceed))

    def explain_on(
        self,
        node: str,
        claims: Sequence[ResourceClaim],
        *,
        holders: Mapping[DeviceId, tuple[str, ...]] = _NO_HOLDERS,
        proceed: Callable[[], bool] = unbounded,
    ) -> Explanation:
        """An account of the devices of one node. `holders` are the names of the claims that hold devices.

        The requests that exclude each other are found once for all nodes of one kind and use.
        """
        number = self._nodes.number[node]
        view = self._view(claims)
        try:
            devices, occupancy = self._nodes.devices(number), self._nodes.occupancy(number)
            problem = self._problem(devices, claims, replace(occupancy.as_in_use(), holders=holders))
        except AllocationStopped as stop:
            return fault_account(self._nodes.nodes[number], stop)
        condition = view.kinds.of(number, devices), occupancy.key()
        conflict = view.conflicts.get(condition)
        if conflict is None:
            conflict = conflict_of(problem, proceed)
            # A search that was cut short proves nothing.
            if proceed():
                view.conflicts[condition] = conflict
        self._count(view)
        return accounts_of(problem, conflict)

    def occupy(self, results: Sequence[AllocationResult]) -> None:
        """Record that claims that were allocated elsewhere hold devices."""
        self._nodes.take_outside(results)

    def release(self, results: Sequence[AllocationResult]) -> None:
        """Record that devices are free again."""
        self._nodes.free(results)

    def replace_slice(self, before: ResourceSlice | None, after: ResourceSlice | None) -> None:
        """Record that a slice changed, came (`before` is None) or went (`after` is None).

        The findings about other nodes stay. Raises ValueError if the fleet does not have the slice `before`.
        """
        for number in self._nodes.replace_slice(before, after):
            for kinds in self._kinds.values():
                kinds.forget(number)
            self._indexes.forget(number)
            if self._localities is not None:
                self._localities.forget(number)

    def _view(self, claims: Sequence[ResourceClaim]) -> SpecView:
        # Configuration is for drivers. The search ignores it, and JSON may not be able to express it.
        asked = [(claim.spec.devices.requests, claim.spec.devices.constraints) for claim in claims]
        key = msgspec.json.encode(asked)
        view = self._views.get(key)
        if view is not None:
            self._views.move_to_end(key)
            return view
        # A node without devices is enough to get the requests of the claims. If no node can process the
        # claims, there is no plan, and the search gives the reason.
        nothing = NodeDevices(Node(metadata=ObjectMeta()), (), (), (), {})
        try:
            plan = self._problem(nothing, claims, InUse()).plan
        except AllocationStopped:
            plan = []
        asks = [ask for alternatives in plan for ask in alternatives]
        reads = reads_of(asks, claims)
        kinds = self._kinds.setdefault(reads, NodeKinds(reads))
        kinds.views += 1
        constrained = any(claim.spec.devices.constraints for claim in claims)
        view = SpecView(self._nodes, kinds, plan, constrained, self._features, self.selectors, self._indexes)
        self._views[key] = view
        return view

    def _count(self, view: SpecView) -> None:
        """Update the size of a view, and drop others if all of them together have become too large."""
        for holder in (view, view.kinds):
            size = holder.size
            self.kept_bytes += size - holder.counted
            holder.counted = size
        view.grew = False
        # The view in use stays, whatever its size. Kinds of nodes go with the last view that uses them.
        while self.kept_bytes > self._most_bytes and len(self._views) > 1:
            _, oldest = self._views.popitem(last=False)
            self.kept_bytes -= oldest.counted
            kinds = oldest.kinds
            kinds.views -= 1
            if not kinds.views:
                self.kept_bytes -= kinds.counted
                del self._kinds[kinds.reads]

    def _problem(
        self, devices: NodeDevices, claims: Sequence[ResourceClaim], state: InUse
    ) -> AllocationProblem:
        return AllocationProblem(devices, self._classes, claims, state, self._features, self.selectors)

    def _answer(
        self, view: SpecView, number: int, claims: Sequence[ResourceClaim], proceed: Callable[[], bool]
    ) -> NodeAnswer:
        """The answer for nodes of the same kind and use, if it is known, or that of a search."""
        try:
            devices, occupancy = self._nodes.devices(number), self._nodes.occupancy(number)
        except AllocationStopped as stop:
            return fault_of(self._nodes.nodes[number], stop, 0)
        kind = view.kinds.of(number, devices)
        condition = kind, occupancy.key()
        answer = view.known(condition)
        if answer is None:
            answer = view.without_search(devices, kind, occupancy)
            if answer is None:
                answer = self._searched(number, claims, proceed)
            # A fault of the attempt may come from the caller's bound, and not from the node.
            if not (isinstance(answer, Fault) and answer.scope is FaultScope.ATTEMPT):
                view.remember(condition, answer)
        return answer

    def _searched(
        self, number: int, claims: Sequence[ResourceClaim], proceed: Callable[[], bool]
    ) -> NodeAnswer:
        steps = 0
        try:
            devices, occupancy = self._nodes.devices(number), self._nodes.occupancy(number)
            problem = self._problem(devices, claims, occupancy.as_in_use())
            search = FirstFitSearch(problem, proceed)
            found = search.run()
            steps = search.steps
            return search.answer if found else refusal_of(problem, steps)
        except AllocationStopped as stop:
            return fault_of(self._nodes.nodes[number], stop, steps)

    def _best(
        self,
        view: SpecView,
        claims: Sequence[ResourceClaim],
        among: Iterable[str] | None,
        proceed: Callable[[], bool],
    ) -> Outcome:
        """The best answer of all nodes, or of those `among` them. Nodes of equal cost are searched once."""
        # Mode exact never ranks answers, so the module is loaded only here.
        from rackloom.core.allocate.best import NodeLocalities, best_of_nodes

        localities = self._localities = self._localities or NodeLocalities()
        seen: set[Hashable] = set()

        def searches() -> Iterator[Callable[[Cost | None], Outcome]]:
            everywhere = range(len(self._nodes.nodes))
            for number in everywhere if among is None else map(self._nodes.number.__getitem__, among):
                answer = self._answer(view, number, claims, proceed)
                if _passes_over(answer):
                    continue
                # A fault is known already, so there is nothing left to search.
                if not isinstance(answer, FoundAnswer):
                    yield partial(_as_found, answer)
                    continue
                devices, occupancy = self._nodes.devices(number), self._nodes.occupancy(number)
                kind = view.kinds.of(number, devices), localities.of(number, devices.candidates)
                # Of nodes that differ only in names, the first one counts, because the others cost the same.
                if (condition := (kind, occupancy.key())) not in seen:
                    seen.add(condition)
                    problem = self._problem(devices, claims, occupancy.as_in_use())
                    yield partial(solved, problem, proceed, "best", self._new_id)

        return best_of_nodes(searches())

    def _outcome(self, number: int, claims: Sequence[ResourceClaim], answer: NodeAnswer) -> Outcome:
        if not isinstance(answer, FoundAnswer):
            return answer
        devices = self._nodes.devices(number)
        # The answer may come from another node of the same kind, so only its positions hold here.
        entries = tuple(
            replace(entry, candidate=devices.candidates[entry.candidate.position]) for entry in answer.entries
        )
        try:
            results = results_of(devices.node, claims, replace(answer, entries=entries), self._new_id)
        except AllocationStopped as stop:
            return fault_of(devices.node, stop, answer.steps)
        return Allocation(node=devices.node.metadata.name, results=results, steps=answer.steps)


def _as_found(answer: Outcome, below: Cost | None) -> Outcome:
    """A search that has its answer already."""
    return answer


def _passes_over(answer: NodeAnswer) -> bool:
    """Whether to try the next node, because this one refused or has a fault of the node."""
    return isinstance(answer, Refusal) or (isinstance(answer, Fault) and answer.scope is FaultScope.NODE)
