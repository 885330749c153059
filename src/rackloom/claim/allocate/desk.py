"""What an allocation works with: the devices of a node, the asks, the books."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import msgspec

from rackloom.claim.allocate.candidates import Candidate, candidates_of
from rackloom.claim.allocate.constraints import constraints_of
from rackloom.claim.allocate.eligibility import Eligibility, Selectors
from rackloom.claim.allocate.features import Features
from rackloom.claim.allocate.ledger import Ledger
from rackloom.claim.allocate.nodes import MalformedSelector
from rackloom.claim.allocate.objects import DeviceClass, Node, ResourceClaim
from rackloom.claim.allocate.outcome import Scope, Stop
from rackloom.claim.allocate.pools import Pool, SliceIndex, Trouble, gather
from rackloom.claim.allocate.requests import MAX_RESULTS, Ask, Choice, choices_of, title
from rackloom.claim.allocate.search import Search
from rackloom.claim.allocate.use import DeviceId, InUse


class Offer(msgspec.Struct, frozen=True, eq=False):
    """What a node reaches. It depends on slices alone, so it can serve many allocations."""

    node: Node
    pools: tuple[Pool, ...]
    candidates: tuple[Candidate, ...]
    positions: dict[DeviceId, int]


def offer_of(node: Node, index: SliceIndex, features: Features) -> Offer:
    """What `node` reaches. Raises Stop where a node selector cannot be read."""
    try:
        pools = gather(node, index, features)
    except MalformedSelector as error:
        raise Stop(f"a node selector cannot be read: {error}") from error
    candidates = candidates_of(pools, features)
    return Offer(node, pools, candidates, {one.id: one.position for one in candidates})


class Desk:
    """One allocation being worked on: the inputs in the shape that search and explanation share."""

    def __init__(
        self,
        offer: Offer,
        classes: Mapping[str, DeviceClass],
        claims: Sequence[ResourceClaim],
        state: InUse,
        features: Features,
        selectors: Selectors,
    ) -> None:
        """Raises Stop for claims that cannot be worked on."""
        self.node = offer.node
        self.claims = claims
        self.features = features
        self.pools = offer.pools
        self.candidates = offer.candidates
        self.choices = choices_of(claims, classes, features)
        self.constraints = [constraints_of(claim, features) for claim in claims]
        self.eligibility = Eligibility(offer.node, features, selectors)
        self.ledger = Ledger(self.pools, self.constraints, state, features)
        self.everything = {
            ask: self._everything(ask)
            for ask in chain.from_iterable(chain.from_iterable(self.choices))
            if ask.everything
        }
        for claim, choices in zip(claims, self.choices, strict=True):
            self._check_size(claim, choices)

    @property
    def plan(self) -> list[Choice]:
        """All requests of all claims, in order."""
        return list(chain.from_iterable(self.choices))

    def search(self, proceed: Callable[[], bool], plan: Sequence[Choice] | None = None) -> Search:
        """A search for what `plan` asks (all requests, if not given), with what lies on the desk."""
        asked = self.plan if plan is None else plan
        return Search(asked, self.candidates, self.everything, self.eligibility, self.ledger, proceed)

    def _everything(self, ask: Ask) -> list[Candidate]:
        """The devices that mode All means: fixed before the search, whoever holds them."""
        for pool in self.pools:
            if pool.trouble is not None:
                state = "being updated" if pool.trouble is Trouble.INCOMPLETE else "invalid"
                raise Stop(
                    f"claim {ask.claim_name}, request {ask.name}: asks for all devices, but the resource pool"
                    f" {'/'.join(pool.key)} is currently {state}: {pool.reason}",
                    scope=Scope.NODE,
                )
        selectable = [one for one in self.candidates if self.eligibility.matches(ask, one)]
        return [one for one in selectable if self.ledger.has_capacity(ask, one)]

    def _check_size(self, claim: ResourceClaim, choices: Sequence[Choice]) -> None:
        least = sum(
            min(len(self.everything[ask]) if ask.everything else ask.count for ask in choice)
            for choice in choices
        )
        if least > MAX_RESULTS:
            raise Stop(
                f"claim {title(claim)}: asks for {least} devices or more, which exceeds the claim limit"
                f" of {MAX_RESULTS}"
            )
