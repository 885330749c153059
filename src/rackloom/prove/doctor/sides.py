"""One fault that its cluster and the host itself see is one finding, tied by what both concern."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from rackloom.prove.doctor.findings import Finding, worse
from rackloom.prove.doctor.words import unique


def both_sides(cluster: Iterable[Finding], host: Sequence[Finding]) -> Iterator[Finding]:
    """All findings, those of one check about one thing as one, with the evidence of both sides.

    What a host found to be well stands as evidence beside what its cluster holds against it.
    """
    index = {(one.check, thing): number for number, one in enumerate(host) for thing in _things(one)}
    told: set[int] = set()
    for one in cluster:
        number = next(
            (at for thing in _things(one) if (at := index.get((one.check, thing))) is not None), None
        )
        if number is None or number in told:
            yield one
        else:
            told.add(number)
            yield _joined(one, host[number])
    yield from (one for number, one in enumerate(host) if number not in told)


def _things(one: Finding) -> tuple[str, ...]:
    """The devices that it concerns; where it is about none, all that it concerns."""
    return tuple(place for place in one.where if place.startswith("device ")) or one.where


def _joined(cluster: Finding, host: Finding) -> Finding:
    """The worse of the two, under the name that the cluster has for it."""
    return msgspec.structs.replace(
        worse(cluster, host),
        subject=cluster.subject,
        evidence=unique(*cluster.evidence, *host.evidence),
        where=unique(*cluster.where, *host.where),
        since=cluster.since if host.since is None else host.since,
    )
