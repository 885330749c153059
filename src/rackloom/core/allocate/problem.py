"""One allocation as a problem to solve, and its solution as the API writes it.

`AllocationProblem` joins a node's devices, the claims' requests, their constraints, eligibility and the
ledger. Search, mode best and explanation all work on it. Building it fixes the device list of each
request of mode All, and refuses a claim that needs more than 32 devices. For mode All every pool of the
node must be usable: otherwise the node has a fault, because the list would be wrong.

`NodeDevices` is the part that depends on slices alone. It serves many allocations on the same node.

`allocation_result` writes devices, configuration and node selector. Configuration of the classes comes
first, each class once and in order of first use, and that of the claim follows. The node selector names
the node if any device is local to it or binds to it. Otherwise it merges the node selectors of the devices'
slices.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import msgspec

from rackloom.core.allocate.eligibility import CandidateDevice, Eligibility, SelectorCache, candidates_of
from rackloom.core.allocate.inputs import (
    MAX_RESULTS,
    Alternatives,
    DeviceId,
    Features,
    InUse,
    RequestAlternative,
    alternatives_of,
    claim_title,
)
from rackloom.core.allocate.ledger import AllocationLedger, DeviceAssignment, constraints_of
from rackloom.core.allocate.objects import (
    AllocationResult,
    DeviceAllocationConfiguration,
    DeviceAllocationResult,
    DeviceClass,
    DeviceResult,
    Node,
    NodeSelector,
    ResourceClaim,
)
from rackloom.core.allocate.outcome import AllocationStopped, FaultScope
from rackloom.core.allocate.pools import (
    MalformedNodeSelector,
    Pool,
    PoolProblem,
    SliceIndex,
    gather_pools,
    merged_selector,
    selector_of_node,
)

# The problem: devices, requests, constraints and the ledger.


class NodeDevices(msgspec.Struct, frozen=True, eq=False):
    """The devices that a node reaches. They depend on slices alone, so they can serve many allocations."""

    node: Node
    pools: tuple[Pool, ...]
    candidates: tuple[CandidateDevice, ...]
    """The devices that the node may reach, in the order in which they are tried."""
    ids: tuple[DeviceId, ...]
    """Theirs, and then those of other nodes' devices that draw from the counters of these pools."""
    positions: dict[DeviceId, int]
    """The index of each of `ids`."""


def devices_on_node(node: Node, index: SliceIndex, features: Features) -> NodeDevices:
    """The devices that `node` reaches. Raises AllocationStopped if a node selector cannot be read."""
    try:
        pools = gather_pools(node, index, features)
    except MalformedNodeSelector as error:
        raise AllocationStopped(f"a node selector cannot be read: {error}") from error
    candidates = candidates_of(pools, features)
    elsewhere = (
        DeviceId(pool.driver, pool.name, device.name)
        for pool in pools
        for slice_ in pool.elsewhere
        for device in slice_.spec.devices
        if device.consumes_counters
    )
    # A device that its pool names on several nodes counts once, at the position of this node.
    ids = tuple(dict.fromkeys([*(candidate.id for candidate in candidates), *elsewhere]))
    return NodeDevices(node, pools, candidates, ids, {device: at for at, device in enumerate(ids)})


class AllocationProblem:
    """One allocation being worked on: the inputs in the shape that search and explanation share."""

    def __init__(
        self,
        devices: NodeDevices,
        classes: Mapping[str, DeviceClass],
        claims: Sequence[ResourceClaim],
        state: InUse,
        features: Features,
        selectors: SelectorCache,
    ) -> None:
        """Raises AllocationStopped for claims that cannot be worked on."""
        self.node = devices.node
        self.claims = claims
        self.features = features
        self.pools = devices.pools
        self.candidates = devices.candidates
        self.choices = alternatives_of(claims, classes, features)
        self.constraints = [constraints_of(claim, features, selectors) for claim in claims]
        self.eligibility = Eligibility(devices.node, features, selectors)
        self.ledger = AllocationLedger(self.pools, self.constraints, state, features)
        # Mode All means a list of devices that is fixed before the search.
        self.everything = {
            ask: self._everything(ask) for ask in chain.from_iterable(self.plan) if ask.everything
        }
        # The lists of mode All must exist before sizes are known, because they count towards the limit.
        for claim, choices in zip(claims, self.choices, strict=True):
            least = sum(min(map(self.devices_needed, choice)) for choice in choices)
            if least > MAX_RESULTS:
                raise AllocationStopped(
                    f"claim {claim_title(claim)}: asks for {least} devices or more, which exceeds the claim"
                    f" limit of {MAX_RESULTS}"
                )

    def devices_needed(self, ask: RequestAlternative) -> int:
        """The number of devices that the request alternative takes."""
        return len(self.everything[ask]) if ask.everything else ask.count

    def has_room(self, ask: RequestAlternative) -> bool:
        """Whether the claim can also hold the devices of this alternative. Mode All needs at least one."""
        need = self.devices_needed(ask)
        return self.ledger.count_of(ask.claim) + need <= MAX_RESULTS and (need > 0 or not ask.everything)

    @property
    def plan(self) -> list[Alternatives]:
        """All requests of all claims, in order."""
        return list(chain.from_iterable(self.choices))

    def _everything(self, ask: RequestAlternative) -> list[CandidateDevice]:
        """The devices of mode All, fixed before the search. Devices in use count too."""
        for pool in self.pools:
            if pool.trouble is not None:
                state = "being updated" if pool.trouble is PoolProblem.INCOMPLETE else "invalid"
                raise AllocationStopped(
                    f"claim {ask.claim_name}, request {ask.name}: asks for all devices, but the resource pool"
                    f" {'/'.join(pool.key)} is currently {state}: {pool.reason}",
                    scope=FaultScope.NODE,
                )
        selectable = [candidate for candidate in self.candidates if self.eligibility.matches(ask, candidate)]
        return [candidate for candidate in selectable if self.ledger.has_capacity(ask, candidate)]


# The result, as the API writes it.


class FoundAnswer(msgspec.Struct, frozen=True):
    """A complete answer: one alternative per request, and the devices of each."""

    chosen: tuple[RequestAlternative, ...]
    entries: tuple[DeviceAssignment, ...]
    steps: int = 0
    """Search steps that it took."""


def allocation_result(
    node: str,
    claim: ResourceClaim,
    chosen: Sequence[RequestAlternative],
    entries: Sequence[DeviceAssignment],
    new_id: Callable[[], str],
) -> AllocationResult:
    """The result of `claim`. `chosen` has one alternative per request. Raises MalformedNodeSelector."""
    configuration = []
    for config in _configuration(claim, chosen):
        # A list of requests that covers all of them is left out: none named means all.
        covers_all = all(ask.named_in(config.requests) for ask in chosen)
        configuration.append(msgspec.structs.replace(config, requests=()) if covers_all else config)
    # The pod goes where all devices are reached: to the node, if any device is local to it or binds to it,
    # or else to any node that the slices of the devices select.
    selectors: list[NodeSelector] = []
    selector: NodeSelector | None = None
    for entry in entries:
        device, spec = entry.candidate.device, entry.candidate.source.spec
        place = device if spec.per_device_node_selection else spec
        if place.node_name is not None or device.binds_to_node:
            selector = selector_of_node(node)
            break
        if place.node_selector is not None:
            selectors.append(place.node_selector)
    return AllocationResult(
        devices=DeviceAllocationResult(
            results=tuple(_device_result(entry, new_id) for entry in entries), config=tuple(configuration)
        ),
        node_selector=selector or merged_selector(selectors),
    )


def _device_result(entry: DeviceAssignment, new_id: Callable[[], str]) -> DeviceResult:
    ask, candidate = entry.ask, entry.candidate
    shared = candidate.shareable
    return DeviceResult(
        request=ask.name,
        driver=candidate.id.driver,
        pool=candidate.id.pool,
        device=candidate.id.device,
        admin_access=True if ask.admin else None,
        tolerations=ask.tolerations,
        binding_conditions=candidate.device.binding_conditions,
        binding_failure_conditions=candidate.device.binding_failure_conditions,
        share_id=new_id() if shared else None,
        consumed_capacity=(entry.consumption or None) if shared else None,
    )


def _configuration(
    claim: ResourceClaim, chosen: Sequence[RequestAlternative]
) -> Iterator[DeviceAllocationConfiguration]:
    """That of the classes, each once and in order of first use, then that of the claim."""
    for name in dict.fromkeys(ask.device_class.metadata.name for ask in chosen):
        users = [ask for ask in chosen if ask.device_class.metadata.name == name]
        for config in users[0].device_class.spec.config:
            yield DeviceAllocationConfiguration(
                source="FromClass", requests=tuple(ask.name for ask in users), opaque=config.opaque
            )
    for own in claim.spec.devices.config:
        if not own.requests or any(ask.named_in(own.requests) for ask in chosen):
            yield DeviceAllocationConfiguration(source="FromClaim", requests=own.requests, opaque=own.opaque)
