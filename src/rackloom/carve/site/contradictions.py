"""What two readings say that cannot both be true: of one domain, or of the hardware of two. Pure.

Healths, limits and multicast groups are measurements, which change between two looks; which GPUs there are,
and which partition holds which, is what a domain is.
"""

from collections.abc import Sequence

import msgspec

from rackloom.carve.plan.values import Observation, ObservedPartition

TOLD = 3
"""Partitions that are told one by one."""


class Reading(msgspec.Struct, frozen=True):
    """What a switch controller showed when it was last read."""

    url: str
    seen: Observation


def contradiction(one: Reading, other: Reading, changed_at: float) -> str | None:
    """What differs between two readings of about the same time; None when nothing does.

    Operations move no hardware, so the GPUs are compared in any case. Partitions are only where both looked
    after `changed_at`, when the site last changed some: before, one of the two shows what was. One that lists
    no GPU at all says nothing: a standby answers for its domain before it knows what is in it.
    """
    if not (one.seen.gpus and other.seen.gpus):
        return None
    told = _gpus(one, other)
    if min(one.seen.observed_at, other.seen.observed_at) > changed_at:
        told += _partitions(one, other)
    if not told:
        return None
    return f"switch controllers {one.url} and {other.url} contradict one another: {'; '.join(told)}"


def doubled(one: Reading, other: Reading) -> str | None:
    """That controllers of two domains list the same GPUs in the same places; None when they do not.

    A GPU is on one switch fabric. One that stands in the same place under another GUID is another GPU.
    """
    both = len(_listed(one.seen) & _listed(other.seen))
    if not both:
        return None
    first, second = (
        f"{reading.url} of domain {reading.seen.domain}"
        for reading in sorted((one, other), key=lambda reading: reading.url)
    )
    return f"switch controllers {first} and {second} contradict one another: both list the same {both} GPUs"


def _gpus(one: Reading, other: Reading) -> list[str]:
    first, second = _listed(one.seen), _listed(other.seen)
    pairs = ((one.url, first - second), (other.url, second - first))
    return [f"only {url} lists {len(more)} of the GPUs" for url, more in pairs if more]


def _listed(seen: Observation) -> set[tuple[int, str, int, int]]:
    return {(gpu.guid, gpu.chassis_serial, gpu.slot, gpu.module_id) for gpu in seen.gpus}


def _partitions(one: Reading, other: Reading) -> list[str]:
    first, second = ({part.id: part for part in reading.seen.partitions} for reading in (one, other))
    # By number: the name of a partition says whose it is, and several operate a domain.
    told = [
        f"partition {number} {_difference(first.get(number), second.get(number))}"
        for number in sorted(first.keys() | second.keys())
        if _held(first.get(number)) != _held(second.get(number))
    ]
    return _shortened(told)


def _held(partition: ObservedPartition | None) -> tuple[str, frozenset[int]] | None:
    return None if partition is None else (partition.name, partition.members)


def _difference(first: ObservedPartition | None, second: ObservedPartition | None) -> str:
    sizes = [0 if one is None else len(one.members) for one in (first, second)]
    told = f"has {sizes[0]} and {sizes[1]} members"
    if first is None or second is None or sizes[0] != sizes[1]:
        return told
    return f"{told}, of which some differ" if first.members != second.members else f"{told} and two names"


def _shortened(told: Sequence[str]) -> list[str]:
    more = len(told) - TOLD
    return [*told[:TOLD], f"{more} more partitions differ"] if more > 0 else list(told)
