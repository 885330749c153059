"""All checks of one snapshot: from values to a short list of causes, the worst first.

`examine` takes three steps:

1. Run every check. A layer that was not asked adds nothing; a layer that could not be read adds that it
   is unknown. Checks of the cluster run only where the cluster was read.
2. `merge_host_findings` unites what the cluster and a host's own files say of one fault. Findings of one
   check are tied by the device that they concern, those about an IMEX mesh by anything that they concern.
   The merged finding keeps the worse state and the evidence of both sides. What the host saw to be well
   overrules a cluster that does not know the same devices.
3. `fold_consequences` puts each finding under its cause. A cause is a finding whose check explains this
   one in the catalogue and that shares a place with it. A finding about places that differ from one
   another is explained only if at most one of its sides stays without a cause. The root takes the worst
   severity of all that follows from it.

`unfolded` returns the findings before step 3, for callers that judge by single checks, such as
`acceptance`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from rackloom.core.diagnosis.catalogue import EXPLAINS, MESH, SILENCE_EXPLAINS_FAILURES
from rackloom.core.diagnosis.checks.cliques import check_cliques
from rackloom.core.diagnosis.checks.devices import check_slices
from rackloom.core.diagnosis.checks.domains import check_domains
from rackloom.core.diagnosis.checks.fabric import check_controllers, check_fabric, check_layers
from rackloom.core.diagnosis.checks.identity import check_moved_trays, check_swapped_trays
from rackloom.core.diagnosis.checks.nics import check_nics, check_transfers
from rackloom.core.diagnosis.checks.partitions import check_partitions, check_spread
from rackloom.core.diagnosis.evidence import ClusterEvidence, ImexDaemonRecord
from rackloom.core.diagnosis.findings import (
    CheckState,
    Finding,
    severity_order,
    unique,
    worse_finding,
    worst_severity,
)
from rackloom.core.diagnosis.index import SnapshotIndex
from rackloom.core.diagnosis.snapshot import GpuChain, Layer, SiteSnapshot

# Consequences under their causes.


_CAUSES: Mapping[str, tuple[str, ...]] = {
    effect: tuple(cause for cause, effects in EXPLAINS.items() if effect in effects)
    for effect in {one for effects in EXPLAINS.values() for one in effects}
}


def fold_consequences(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings that are nobody's consequence, the worst first, each with what follows from it.

    A cause is as bad as the worst of what follows. What is only unknown explains no failure, but for silence.
    """
    ordered = sorted(findings, key=severity_order)
    index = _first_by_place(ordered)
    under: defaultdict[int, list[int]] = defaultdict(list)
    roots: list[int] = []
    for number, one in enumerate(ordered):
        cause = _cause_of(one, ordered, index)
        if cause is None:
            roots.append(number)
        else:
            under[cause].append(number)
    told = (
        _with_consequences(ordered[root], [ordered[at] for at in _descendants(root, under)]) for root in roots
    )
    return tuple(sorted(told, key=severity_order))


def _first_by_place(findings: list[Finding]) -> Mapping[tuple[str, str], int]:
    """The first finding of each check at each place."""
    found: dict[tuple[str, str], int] = {}
    for number, finding in enumerate(findings):
        for place in finding.where:
            found.setdefault((finding.check, place), number)
    return found


def _cause_of(finding: Finding, ordered: list[Finding], index: Mapping[tuple[str, str], int]) -> int | None:
    found = {
        place: cause
        for place in finding.where
        if (cause := _cause_at(place, finding, ordered, index)) is not None
    }
    unexplained = [side for side in finding.sides if not found.keys() >= set(side)]
    if len(unexplained) > 1:
        return None
    return min(found.values(), key=lambda cause: _cause_rank(ordered[cause], finding), default=None)


def _cause_at(
    place: str, finding: Finding, ordered: list[Finding], index: Mapping[tuple[str, str], int]
) -> int | None:
    """The first check in order that explains it there."""
    for check in _CAUSES.get(finding.check, ()):
        cause = index.get((check, place))
        if cause is not None and _explains(ordered[cause], finding):
            return cause
    return None


def _cause_rank(cause: Finding, effect: Finding) -> int:
    return _CAUSES[effect.check].index(cause.check)


def _explains(cause: Finding, effect: Finding) -> bool:
    return (
        cause.state is CheckState.FAILS
        or effect.state is CheckState.UNKNOWN
        or cause.check in SILENCE_EXPLAINS_FAILURES
    )


def _descendants(root: int, under: Mapping[int, list[int]]) -> Iterator[int]:
    """All that follows, also from what follows."""
    for one in under.get(root, ()):
        yield one
        yield from _descendants(one, under)


def _with_consequences(cause: Finding, effects: list[Finding]) -> Finding:
    told = tuple(dict.fromkeys(f"{one.check}: {one.subject}" for one in effects))
    every = (cause, *effects)
    return msgspec.structs.replace(
        cause,
        consequences=told,
        severity=worst_severity(every),
        instances=max(one.instances for one in every),
    )


# Cluster and host findings about one fault become one finding.


def merge_host_findings(cluster: Iterable[Finding], host: Sequence[Finding]) -> Iterator[Finding]:
    """All findings, those of one check about one thing as one, with the evidence of both sides.

    What a host found to be well stands as evidence beside what its cluster holds against it, and counts where
    the cluster does not know of a device.
    """
    index = {tie: number for number, one in enumerate(host) for tie in _merge_keys(one)}
    told: set[int] = set()
    for one in cluster:
        number = next((index[tie] for tie in _merge_keys(one) if tie in index), None)
        if number is None:
            yield one
        else:
            told.add(number)
            yield _merged(one, host[number])
    yield from (one for number, one in enumerate(host) if number not in told)


def _merge_keys(finding: Finding) -> Iterator[tuple[str, str]]:
    """Its check of each device that it concerns; of a mesh, which a node has one of, of all that it concerns.

    What else is of one node may be of different faults: a pod's wrong NIC, and a GPU without any near.
    """
    for thing in finding.where if finding.check == MESH else _device_places(finding):
        yield finding.check, thing


def _device_places(finding: Finding) -> tuple[str, ...]:
    return tuple(place for place in finding.where if place.startswith("device "))


def _merged(cluster: Finding, host: Finding) -> Finding:
    """What counts of the two, under the name that the cluster has for it."""
    return msgspec.structs.replace(
        host if _host_overrules(host, cluster) else worse_finding(cluster, host),
        subject=cluster.subject,
        evidence=unique(*cluster.evidence, *host.evidence),
        where=unique(*cluster.where, *host.where),
        since=cluster.since if host.since is None else host.since,
    )


def _host_overrules(host: Finding, cluster: Finding) -> bool:
    """Whether the host saw to be well every device of which its cluster does not know."""
    devices = _device_places(cluster)
    unseen = cluster.state is CheckState.UNKNOWN and host.state is CheckState.HOLDS
    return unseen and bool(devices) and set(devices) <= set(_device_places(host))


# All checks, in order.


def _do_nothing() -> None:
    pass


def examine(
    picture: SiteSnapshot,
    joined: tuple[GpuChain, ...] | None = None,
    *,
    host: Sequence[Finding] = (),
    between: Callable[[], object] = _do_nothing,
) -> tuple[Finding, ...]:
    """What does not hold or is unknown in `picture`; empty when all that was read is as it should be.

    A layer that was not asked adds nothing, and one that could not be read adds that it is unknown.
    `joined` are the chains of `picture`, where somebody has them already; `host` is what was found on one of
    its hosts, also what is well there. `between` is called before each check: there it may be held up.
    """
    found = merge_host_findings(unfolded(SnapshotIndex(picture, joined), between), host)
    return fold_consequences(one for one in found if one.state is not CheckState.HOLDS)


def unfolded(view: SnapshotIndex, between: Callable[[], object] = _do_nothing) -> tuple[Finding, ...]:
    """Every finding by itself, also what plainly follows from another: for who judges by single checks."""
    return tuple(one for one in _all(view, between) if one.state is not CheckState.HOLDS)


def _all(view: SnapshotIndex, between: Callable[[], object]) -> Iterator[Finding]:
    for check in _checks(view):
        between()
        yield from check


def _checks(view: SnapshotIndex) -> Iterator[Iterable[Finding]]:
    yield check_layers(view)
    yield check_controllers(view)
    yield check_moved_trays(view)
    yield check_fabric(view)
    yield check_partitions(view)
    yield check_spread(view)
    yield check_swapped_trays(view)
    if view.can_see(Layer.CLUSTER):
        yield check_slices(view)
        yield check_cliques(view)
        yield check_domains(cluster_evidence(view.picture))
        yield check_nics(view)
    yield check_transfers(view)


def cluster_evidence(picture: SiteSnapshot) -> ClusterEvidence:
    """What a picture shows of ComputeDomains and the pods that use them."""
    return ClusterEvidence(
        domains=picture.compute_domains,
        templates=picture.templates,
        claims=picture.claims,
        pods=picture.pods,
        daemons=tuple(
            ImexDaemonRecord(
                domain=mesh.domain,
                node=mesh.node,
                clique=mesh.clique,
                meshed=mesh.complete,
                missing=mesh.missing,
            )
            for mesh in picture.meshes
        ),
        daemons_in=picture.daemons_in,
        cliques={node.name: node.clique for node in picture.nodes if node.clique},
    )
