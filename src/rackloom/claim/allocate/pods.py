"""Claims of several pods, one after the other, each on the first node that can serve it."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from rackloom.claim.allocate.allocator import Mode, allocate, always
from rackloom.claim.allocate.cost import Standing
from rackloom.claim.allocate.eligibility import Selectors
from rackloom.claim.allocate.explain import Explanation, explain
from rackloom.claim.allocate.features import Features
from rackloom.claim.allocate.fixes import nearest_fix
from rackloom.claim.allocate.objects import (
    AllocationResult,
    DeviceClass,
    Node,
    ResourceClaim,
    ResourceClaimStatus,
    ResourceSlice,
)
from rackloom.claim.allocate.outcome import Allocation, Fault, Scope
from rackloom.claim.allocate.pools import SliceIndex
from rackloom.claim.allocate.requests import title
from rackloom.claim.allocate.use import InUse, in_use_by


class Placed(msgspec.Struct, frozen=True, kw_only=True, tag="placed", tag_field="outcome"):
    """A claim that has its devices."""

    claim: str
    node: str
    allocation: AllocationResult
    standing: Standing | None = None
    """How good it is, in mode best."""


class Unplaced(msgspec.Struct, frozen=True, kw_only=True, tag="refused", tag_field="outcome"):
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
    mode: Mode = "exact",
    features: Features = Features(),  # noqa: B008 (a frozen value)
    proceed: Callable[[], bool] = always,
) -> tuple[Placed | Unplaced, ...]:
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
        mode: Mode,
        features: Features,
        proceed: Callable[[], bool],
    ) -> None:
        self._nodes = nodes
        self._classes = classes
        self._index = index
        self._mode: Mode = mode
        self._features = features
        self._proceed = proceed
        self._selectors = Selectors()
        self._holding = [claim for claim in claims if claim.status.allocation is not None]

    def place(self, claim: ResourceClaim) -> Placed | Unplaced:
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
            if isinstance(outcome, Fault) and outcome.scope is Scope.ATTEMPT:
                reason = outcome.reason
                break
        return Unplaced(
            claim=title(claim),
            reason=reason,
            nodes=self._explained(claim),
            nearest_fix=self._fix(claim),
        )

    def _in_use(self) -> InUse:
        return in_use_by(self._holding, shares=self._features.consumable_capacity)

    def _hold(self, claim: ResourceClaim, outcome: Allocation) -> Placed:
        status = ResourceClaimStatus(allocation=outcome.results[0])
        self._holding.append(msgspec.structs.replace(claim, status=status))
        return Placed(
            claim=title(claim), node=outcome.node, allocation=outcome.results[0], standing=outcome.standing
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
