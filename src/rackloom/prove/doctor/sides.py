"""One fault that its cluster and the host itself see is one finding, tied by what both concern."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from rackloom.prove.doctor.findings import Finding, State, worse
from rackloom.prove.doctor.names import MESH
from rackloom.prove.doctor.words import unique


def both_sides(cluster: Iterable[Finding], host: Sequence[Finding]) -> Iterator[Finding]:
    """All findings, those of one check about one thing as one, with the evidence of both sides.

    What a host found to be well stands as evidence beside what its cluster holds against it, and counts where
    the cluster does not know of a device.
    """
    index = {tie: number for number, one in enumerate(host) for tie in _ties(one)}
    told: set[int] = set()
    for one in cluster:
        number = next((index[tie] for tie in _ties(one) if tie in index), None)
        if number is None:
            yield one
        else:
            told.add(number)
            yield _joined(one, host[number])
    yield from (one for number, one in enumerate(host) if number not in told)


def _ties(one: Finding) -> Iterator[tuple[str, str]]:
    """Its check of each device that it concerns; of a mesh, which a node has one of, of all that it concerns.

    What else is of one node may be of different faults: a pod's wrong NIC, and a GPU without any near.
    """
    for thing in one.where if one.check == MESH else _devices(one):
        yield one.check, thing


def _devices(one: Finding) -> tuple[str, ...]:
    return tuple(place for place in one.where if place.startswith("device "))


def _joined(cluster: Finding, host: Finding) -> Finding:
    """What counts of the two, under the name that the cluster has for it."""
    return msgspec.structs.replace(
        host if _clears(host, cluster) else worse(cluster, host),
        subject=cluster.subject,
        evidence=unique(*cluster.evidence, *host.evidence),
        where=unique(*cluster.where, *host.where),
        since=cluster.since if host.since is None else host.since,
    )


def _clears(host: Finding, cluster: Finding) -> bool:
    """Whether the host saw to be well every device of which its cluster does not know."""
    devices = _devices(cluster)
    unseen = cluster.state is State.UNKNOWN and host.state is State.HOLDS
    return unseen and bool(devices) and set(devices) <= set(_devices(host))
