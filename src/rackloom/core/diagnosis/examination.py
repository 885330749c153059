"""All checks of one snapshot: from values to a short list of causes, the worst first.

`examine` takes four steps:

1. Run every check. A layer that was not selected adds nothing. A layer that could not be read adds an unknown
   finding. Checks of the cluster run only if the cluster was read.
2. `merge_host_findings` unites findings of the cluster and of a host's own files about one fault. Findings of
   one check are tied by the device that they concern, those about an IMEX mesh by anything that they concern.
   The merged finding keeps the worse state and the evidence of both sides. A host that saw healthy devices
   overrules a cluster that does not know the same devices.
3. `fold_consequences` puts each finding under its cause. A cause is a finding that shares a place with this
   one and has a check that explains it in the catalogue. A finding about places that differ from one another
   is explained only if at most one of its sides stays without a cause. The root takes the worst severity of
   all that follows from it.

`unfolded` returns the findings before step 3, for callers that judge by single checks, such as
`acceptance`.

Most checks look at one part of a site only, such as a rack (`check_part`). Here the part is all of it.
`reexamination` runs the same checks part by part, and repeats only those of parts that differ.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rackloom.core.diagnosis.catalogue import EXPLAINS, SILENCE_EXPLAINS_FAILURES, Check
from rackloom.core.diagnosis.checks.cliques import check_cliques, cluster_votes, domain_of_clusters
from rackloom.core.diagnosis.checks.devices import (
    DeviceFaults,
    check_devices,
    check_gone_nodes,
    check_nodes,
    device_faults,
    expected_drivers,
)
from rackloom.core.diagnosis.checks.domains import check_domains
from rackloom.core.diagnosis.checks.fabric import check_controllers, check_fabric, check_layers
from rackloom.core.diagnosis.checks.identity import check_moved_trays, check_swapped_trays
from rackloom.core.diagnosis.checks.nics import check_nics, check_pods, check_transfers
from rackloom.core.diagnosis.checks.partitions import (
    MisplacedGpu,
    check_lost_partitions,
    check_partitions,
    check_requests,
    check_spread,
    misplaced_gpus,
)
from rackloom.core.diagnosis.evidence import ClusterEvidence
from rackloom.core.diagnosis.findings import (
    CheckState,
    Finding,
    severity_order,
    unique,
    worst_severity,
)
from rackloom.core.diagnosis.index import SnapshotIndex
from rackloom.core.diagnosis.snapshot import GpuChain, Layer, SiteSnapshot, grouped
from rackloom.core.diagnosis.titles import explained

# Consequences under their causes.


_CAUSES: Mapping[str, Sequence[str]] = grouped(
    (effect, cause) for cause, effects in EXPLAINS.items() for effect in effects
)
"""The graph of the catalogue inverted: the checks that explain each check, in the catalogue's order."""


def fold_consequences(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings without a cause, the worst first, each with the findings that follow from it.

    Each finding has at most one cause, so findings form trees. A root gets the worst severity of its tree.
    An unknown finding explains no failure, except for the checks that the catalogue lists.
    """
    # Sorted first, so that among findings of one check at one place the worst is taken as the cause.
    ordered = sorted(findings, key=_full_order)
    first_at: dict[tuple[str, str], int] = {}
    for number, finding in enumerate(ordered):
        for place in finding.where:
            first_at.setdefault((finding.check, place), number)
    causes = [_cause_of(finding, ordered, first_at) for finding in ordered]
    # EXPLAINS has no cycle and a cause has another check than its effect, so the edges form a forest.
    effects = grouped((cause, number) for number, cause in enumerate(causes))
    folded = (
        _with_consequences(ordered[root], [ordered[number] for number in _descendants(root, effects)])
        for root in effects[None]
    )
    return tuple(sorted(folded, key=_full_order))


def _full_order(finding: Finding) -> tuple[Any, ...]:
    """`severity_order`, and an order among equals, so that the order of the checks does not matter."""
    since = (finding.since is not None, finding.since or 0.0)
    return (*severity_order(finding), finding.message, finding.where, finding.evidence, finding.fix, since)


def _cause_of(
    finding: Finding, ordered: list[Finding], first_at: Mapping[tuple[str, str], int]
) -> int | None:
    """The cause with the first check in the catalogue, as an index of `ordered`."""
    checks = _CAUSES.get(finding.check, ())
    found: dict[str, int] = {}
    for place in finding.where:
        for check in checks:
            cause = first_at.get((check, place))
            # Silence explains silence. It explains a failure only if the catalogue allows it.
            if cause is not None and (
                ordered[cause].state is CheckState.FAILS
                or finding.state is CheckState.UNKNOWN
                or check in SILENCE_EXPLAINS_FAILURES
            ):
                found[place] = cause
                break
    # Causes at all sides but one explain why the sides differ.
    unexplained = [side for side in finding.sides if not found.keys() >= set(side)]
    if len(unexplained) > 1:
        return None
    return min(found.values(), key=lambda cause: checks.index(ordered[cause].check), default=None)


def _descendants(root: int, effects: Mapping[int | None, list[int]]) -> Iterator[int]:
    for effect in effects.get(root, ()):
        yield effect
        yield from _descendants(effect, effects)


def _with_consequences(cause: Finding, effects: list[Finding]) -> Finding:
    every = (cause, *effects)
    return msgspec.structs.replace(
        cause,
        consequences=unique(*(f"{effect.check}: {effect.subject}" for effect in effects)),
        severity=worst_severity(every),
        instances=max(finding.instances for finding in every),
    )


# Cluster and host findings about one fault become one finding.


def merge_host_findings(cluster: Iterable[Finding], host: Sequence[Finding]) -> Iterator[Finding]:
    """All findings, with a cluster's and a host's merged if they are of one check about one device.

    The merged finding has the evidence of both. A host finding that holds is evidence beside the cluster's
    finding. It overrules the cluster only if the cluster's finding is unknown.
    """
    numbers = {key: number for number, finding in enumerate(host) for key in _merge_keys(finding)}
    merged: set[int] = set()
    for finding in cluster:
        number = next((numbers[key] for key in _merge_keys(finding) if key in numbers), None)
        if number is None:
            yield finding
        else:
            merged.add(number)
            yield _merged(finding, host[number])
    yield from (finding for number, finding in enumerate(host) if number not in merged)


def _merge_keys(finding: Finding) -> Iterator[tuple[str, str]]:
    """The check with each device that the finding concerns, or for a mesh with everything that it concerns.

    A node has one mesh. Other findings of one check at one node may describe different faults, such as a pod
    with a wrong NIC and a GPU without a near NIC.
    """
    for place in finding.where if finding.check == Check.MESH else _device_places(finding):
        yield finding.check, place


def _device_places(finding: Finding) -> tuple[str, ...]:
    return tuple(place for place in finding.where if place.startswith("device "))


def _merged(cluster: Finding, host: Finding) -> Finding:
    """The worse of the two (the host's, if it overrules), under the cluster's subject."""
    main = cluster if worst_severity((cluster, host)) is cluster.severity else host
    # The host overrules an unknown finding of the cluster if it saw that all its devices hold.
    devices = _device_places(cluster)
    if cluster.state is CheckState.UNKNOWN and host.state is CheckState.HOLDS:
        main = host if devices and set(devices) <= set(_device_places(host)) else main
    return msgspec.structs.replace(
        main,
        subject=cluster.subject,
        evidence=unique(*cluster.evidence, *host.evidence),
        where=unique(*cluster.where, *host.where),
        since=cluster.since if host.since is None else host.since,
    )


# All checks: those of each part of a site, then those across its parts.


def _do_nothing() -> None:
    pass


def examine(
    snapshot: SiteSnapshot,
    joined: tuple[GpuChain, ...] | None = None,
    *,
    host: Sequence[Finding] = (),
    between: Callable[[], object] = _do_nothing,
) -> tuple[Finding, ...]:
    """The findings of `snapshot` that fail or are unknown. Empty if everything that was read holds.

    A layer that was not selected adds nothing, and one that could not be read adds an unknown finding.
    `joined` are the chains of `snapshot`, if the caller has them. `host` are all findings of one of its
    hosts, including those that hold. `between` is called before each check and may block, to yield the
    processor.
    """
    index = SnapshotIndex(snapshot, joined)
    found = merge_host_findings(unfolded(index, between), host)
    return explained(fold_consequences(not_holding(found)), index)


def steps_of(snapshot: SiteSnapshot) -> int:
    """How often `examine` calls `between`."""
    return 15 if SnapshotIndex(snapshot).can_see(Layer.CLUSTER) else 10


def unfolded(index: SnapshotIndex, between: Callable[[], object] = _do_nothing) -> tuple[Finding, ...]:
    """Every finding that does not hold, consequences too, for callers that judge by single checks."""
    snapshot = index.snapshot
    sees_cluster = index.can_see(Layer.CLUSTER)
    facts = SiteFacts(
        sees_cluster=sees_cluster,
        clusters=domain_of_clusters([cluster_votes(index)]) if sees_cluster else {},
        drivers=expected_drivers(snapshot.nodes, snapshot.pools) if sees_cluster else (),
    )
    part = check_part(index, facts, between)
    across = not_holding(check_across(index, [part], between))
    between()
    domains = not_holding(check_domains(cluster_evidence(snapshot)) if sees_cluster else ())
    return (*part.findings, *across, *domains)


class SiteFacts(NamedTuple):
    """Facts about the whole site that the checks of a part need, as far as they concern the part."""

    sees_cluster: bool
    """Whether the cluster was read."""
    clusters: Mapping[str, str]
    """The NVLink domain of cluster UUIDs."""
    drivers: tuple[str, ...]
    """Those that should publish devices of every node with a clique."""
    is_settled: bool = True
    """Whether no recorded GPU has left its machine: such a GPU may be listed in any part."""
    shared_pods: frozenset[str] = frozenset()
    """Pods, `namespace/name`, with devices in other parts as well."""


class PartFindings(NamedTuple):
    """The results of the checks of a part of a site."""

    findings: tuple[Finding, ...]
    misplaced: tuple[MisplacedGpu, ...]
    devices: DeviceFaults


def check_part(
    index: SnapshotIndex, facts: SiteFacts, between: Callable[[], object] = _do_nothing
) -> PartFindings:
    """The findings in a part of a site, or in all of it, and the input from which `check_across` makes more.

    The outcome depends on the part and on `facts` alone, and not on the time. Checks that need anything else
    run across the parts.
    """
    checks: list[Iterable[Finding]] = [
        check_fabric(index),
        check_partitions(index),
        check_swapped_trays(index),
    ]
    if facts.is_settled:
        checks.append(check_moved_trays(index))
    if facts.sees_cluster:
        checks += (
            check_nodes(index, facts.drivers),
            check_cliques(index, facts.clusters),
            check_nics(index),
            check_pods(index, lambda pod: pod not in facts.shared_pods),
        )
    found: list[Finding] = []
    for check in checks:
        between()
        found += not_holding(check)
    devices = device_faults(index) if facts.sees_cluster else DeviceFaults((), ())
    return PartFindings(tuple(found), misplaced_gpus(index), devices)


def check_across(
    index: SnapshotIndex, parts: Sequence[PartFindings], between: Callable[[], object] = _do_nothing
) -> Iterator[Finding]:
    """The findings that concern more than one part of a site, or depend on the time. `index` is all of it."""
    for check in (check_layers, check_controllers, check_lost_partitions, check_spread, check_transfers):
        between()
        yield from check(index)
    yield from check_requests([gpu for part in parts for gpu in part.misplaced], index)
    if index.can_see(Layer.CLUSTER):
        between()
        yield from check_gone_nodes(index.snapshot.nodes, index.snapshot.pools)
        yield from check_devices([part.devices for part in parts], index)


def not_holding(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Those that fail or are unknown."""
    return (finding for finding in findings if finding.state is not CheckState.HOLDS)


def cluster_evidence(snapshot: SiteSnapshot) -> ClusterEvidence:
    """The part of a snapshot that concerns ComputeDomains and the pods that use them."""
    return ClusterEvidence(
        domains=snapshot.compute_domains,
        templates=snapshot.templates,
        claims=snapshot.claims,
        pods=snapshot.pods,
        reported=snapshot.reported,
        daemons=snapshot.meshes,
        daemons_in=snapshot.daemons_in,
        cliques={node.name: node.clique for node in snapshot.nodes if node.clique},
    )
