"""The allocation as the API writes it: devices, configuration, node selector."""

from collections.abc import Callable, Iterator, Sequence

from rackloom.claim.allocate.ledger import Entry
from rackloom.claim.allocate.nodes import merged, only
from rackloom.claim.allocate.objects import (
    AllocationResult,
    DeviceAllocationConfiguration,
    DeviceAllocationResult,
    DeviceResult,
    NodeSelector,
    ResourceClaim,
)
from rackloom.claim.allocate.requests import Ask


def result_of(
    node: str,
    claim: ResourceClaim,
    chosen: Sequence[Ask],
    entries: Sequence[Entry],
    new_id: Callable[[], str],
) -> AllocationResult:
    """What `claim` was given: `chosen` has one ask per request. Raises MalformedSelector."""
    return AllocationResult(
        devices=DeviceAllocationResult(
            results=tuple(_device(entry, new_id) for entry in entries),
            config=tuple(_cleared(config, chosen) for config in _configuration(claim, chosen)),
        ),
        node_selector=_node_selector(node, entries),
    )


def _device(entry: Entry, new_id: Callable[[], str]) -> DeviceResult:
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


def _configuration(claim: ResourceClaim, chosen: Sequence[Ask]) -> Iterator[DeviceAllocationConfiguration]:
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


def _cleared(config: DeviceAllocationConfiguration, chosen: Sequence[Ask]) -> DeviceAllocationConfiguration:
    """A list of requests that covers all of them is left out: none named means all."""
    if not all(ask.named_in(config.requests) for ask in chosen):
        return config
    return DeviceAllocationConfiguration(source=config.source, opaque=config.opaque)


def _node_selector(node: str, entries: Sequence[Entry]) -> NodeSelector | None:
    """The node, if any device is local to it or binds to it; else what the slices of the devices ask for."""
    selectors: list[NodeSelector] = []
    for entry in entries:
        device, spec = entry.candidate.device, entry.candidate.source.spec
        place = device if spec.per_device_node_selection else spec
        if place.node_name is not None or device.binds_to_node:
            return only(node)
        if place.node_selector is not None:
            selectors.append(place.node_selector)
    return merged(selectors)
