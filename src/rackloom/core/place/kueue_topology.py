"""The request of a job to Kueue's topology-aware scheduling, and the same request to the planner.

A pod set names the level of nodes that its pods share, by the key of a node label: required, or preferred,
or neither (unconstrained). It may be cut into slices of a size, each within one domain of a level. Pod sets
with one group name share a domain, and others need not. A job without such a request is planned as any
other: all of it in one clique.

The planner knows one level, the label `SchedulerLabels.clique`, and segments. So a request becomes attempts
(`topology_attempts`), of which the first that has a plan counts:

- Required: planned with that label in place of the clique's.
- Preferred: the same, then with every member on its own, wherever there is room.
- Slices: segments at the level of the slices. If the pod set names a wider level, each of its domains is
  tried in turn, with only the nodes of that domain to plan on.

Pod sets of one job with different requests are refused, and so is a level that no node carries.

Source: kueue.x-k8s.io/v1beta2 (Workload, `podSets[].topologyRequest`) and the annotations of pod templates
from which Kueue 0.19 makes it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from rackloom.core.cluster.jobs import Job, topology_request
from rackloom.core.cluster.nodes import NodeObject
from rackloom.core.cluster.objects import annotations_of
from rackloom.core.cluster.workload_kinds import value_at
from rackloom.core.place.site_planner import PlacementReport, PlanRequest, SitePlanner
from rackloom.errors import Refused

KUEUE = "kueue.x-k8s.io"
REQUIRED = f"{KUEUE}/podset-required-topology"
PREFERRED = f"{KUEUE}/podset-preferred-topology"
UNCONSTRAINED = f"{KUEUE}/podset-unconstrained-topology"
SLICE_LEVEL = f"{KUEUE}/podset-slice-required-topology"
SLICE_SIZE = f"{KUEUE}/podset-slice-size"
SLICE_CONSTRAINTS = f"{KUEUE}/podset-slice-required-topology-constraints"
GROUP_NAME = f"{KUEUE}/podset-group-name"
"""Annotations of a pod template."""


class TopologyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a pod set. Levels are keys of node labels."""

    required: str | None = None
    preferred: str | None = None
    unconstrained: bool = False
    slice_level: str | None = None
    slice_size: int | None = None
    group: str | None = None
    """Pod sets with the same name are in one domain."""

    @property
    def level(self) -> str | None:
        """The level of the whole pod set."""
        return self.required or self.preferred

    @property
    def levels(self) -> tuple[str, ...]:
        """All levels that it names, the widest first, each once."""
        return tuple(dict.fromkeys(level for level in (self.level, self.slice_level) if level))


def read_topology(annotations: Mapping[str, str], where: str) -> TopologyRequest:
    """The request in the annotations of a pod template. `where` names it in messages. Raises Refused."""
    size = annotations.get(SLICE_SIZE)
    if size is not None and not (size.isascii() and size.isdigit() and int(size) > 0):
        raise Refused(f"{where}: {SLICE_SIZE} is {size!r}", nearest_fix="use a whole number from 1")
    if SLICE_CONSTRAINTS in annotations:
        raise Refused(
            f"{where}: {SLICE_CONSTRAINTS} is not read",
            nearest_fix=f"name one level, by {SLICE_LEVEL} and {SLICE_SIZE}",
        )
    return _checked(
        TopologyRequest(
            required=annotations.get(REQUIRED),
            preferred=annotations.get(PREFERRED),
            unconstrained=annotations.get(UNCONSTRAINED) == "true",
            slice_level=annotations.get(SLICE_LEVEL),
            slice_size=None if size is None else int(size),
            group=annotations.get(GROUP_NAME),
        ),
        where,
    )


def read_topology_request(request: Mapping[str, Any], where: str) -> TopologyRequest:
    """The same from a pod set of a Workload, which the API server has checked. Raises Refused."""
    if request.get("podsetSliceRequiredTopologyConstraints"):
        raise Refused(
            f"{where}: slices of several levels are not read", nearest_fix="cut it into slices of one level"
        )
    return _checked(
        TopologyRequest(
            required=request.get("required"),
            preferred=request.get("preferred"),
            unconstrained=bool(request.get("unconstrained")),
            slice_level=request.get("podSetSliceRequiredTopology"),
            slice_size=request.get("podSetSliceSize"),
            group=request.get("podSetGroupName"),
        ),
        where,
    )


def _checked(request: TopologyRequest, where: str) -> TopologyRequest:
    if request.required and request.preferred:
        raise Refused(
            f"{where}: it both requires and prefers a topology", nearest_fix=f"leave {PREFERRED} out"
        )
    if (request.slice_level is None) != (request.slice_size is None):
        raise Refused(
            f"{where}: slices have a level and a size, and it names one of them",
            nearest_fix=f"write both {SLICE_LEVEL} and {SLICE_SIZE}",
        )
    return request


# The request of a job.


class JobTopology(msgspec.Struct, frozen=True, kw_only=True):
    """The common request of all pod sets of a job that take devices."""

    request: TopologyRequest
    is_apart: bool = False
    """Each pod set is in one domain, but they are not all in the same domain."""


def job_topology(job: Job) -> JobTopology | None:
    """The request of a job, or None if it has none. Raises Refused for a request that cannot be planned.

    A pod set without devices (a launcher) goes beside the first member with devices, despite its own request.
    """
    groups = [group for group in job.groups if group.need.takes_devices]
    requests = _group_requests(job)
    if all(request == TopologyRequest() for request in requests):
        return None
    for group, request in zip(groups, requests, strict=True):
        if request.slice_size is not None and group.members % request.slice_size:
            raise Refused(
                f"{job.name}: Kueue cuts no slices of {request.slice_size} from {group.members} {group.name}",
                nearest_fix=f"use a size that divides {group.members}",
            )
    distinct = {replace(request, group=None) for request in requests}
    if len(distinct) > 1:
        names = " and ".join(group.name for group in groups)
        raise Refused(
            f"{job.name}: {names} ask for different topologies, and a job is planned with one",
            nearest_fix="ask for the same in each of its pod templates",
        )
    (request,) = distinct
    # Kueue keeps pod sets in one domain only if they have the same group name.
    together = {named.group for named in requests}
    has_shares = any(group.share for group in groups)
    return JobTopology(
        request=request,
        is_apart=len(groups) > 1 and not has_shares and (len(together) > 1 or None in together),
    )


def shared_topology(jobs: Sequence[Job], request: PlanRequest) -> JobTopology | None:
    """The request of jobs that are planned together. Raises Refused if they, or the options, differ."""
    found = [job_topology(job) for job in jobs]
    if not found or all(topology is None for topology in found):
        return None
    if any(topology != found[0] for topology in found):
        raise Refused(
            "the jobs ask for different topologies by their annotations, and are planned with one",
            nearest_fix="place them one by one",
        )
    if request.segment is not None:
        raise Refused(
            f"{jobs[0].name} names its topology by annotations of {KUEUE}, and --segment names another",
            nearest_fix="leave --segment out, or the annotations",
        )
    return found[0]


def _group_requests(job: Job) -> list[TopologyRequest]:
    """The request of each group whose members take devices."""
    found = []
    for number, group in enumerate(job.groups):
        if not group.need.takes_devices:
            continue
        where = f"{job.name}: {group.name}"
        # Pods that are alike are one group of several objects.
        obj = job.objects[number] if len(job.objects) == len(job.groups) else job.objects[0]
        if job.kind == "Workload":
            found.append(read_topology_request(topology_request(obj, group), where))
        else:
            found.append(read_topology(annotations_of(value_at(obj, group.template)), where))
    return found


# From the request to attempts of the planner.


class TopologyAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One way to plan a job."""

    request: PlanRequest
    domain: tuple[str, str] | None = None
    """A node label and its value. Only nodes with it are used."""
    note: str = ""
    """A note for plans that are found this way."""

    def noted(self, report: PlacementReport) -> PlacementReport:
        """The report, with the note in each plan."""
        if not self.note:
            return report
        jobs = (replace(job, notes=(*job.notes, self.note)) if job.plan else job for job in report.jobs)
        return replace(report, jobs=tuple(jobs))

    def takes(self, node: NodeObject) -> bool:
        """Whether a node is used."""
        if self.domain is None:
            return True
        key, value = self.domain
        return node.labels.get(key) == value


def topology_attempts(
    topology: JobTopology | None, request: PlanRequest, nodes: Sequence[NodeObject]
) -> Iterator[TopologyAttempt]:
    """At least one way to plan a job, the best first. Raises Refused for a level that no node has."""
    if topology is None:
        yield TopologyAttempt(request=request)
        return
    asked = topology.request
    labels = request.labels
    for level in asked.levels:
        # Every site has the planner's own labels, whether or not a node carries them yet.
        if level not in (labels.clique, labels.host) and not _values(level, nodes):
            raise Refused(
                f"no node carries the label {level}, which the job names as a level of its topology",
                nearest_fix=f"name a label that nodes carry, such as {labels.clique}",
            )
    request = replace(request, apart=request.apart or topology.is_apart)
    anywhere = replace(request, segment=1)
    if asked.slice_level is not None:
        sliced = replace(_at_level(request, asked.slice_level), segment=asked.slice_size)
        if asked.level not in (None, asked.slice_level):
            yield from (
                TopologyAttempt(request=sliced, domain=(str(asked.level), value))
                for value in _values(str(asked.level), nodes)
            )
        elif asked.level is not None:
            yield TopologyAttempt(request=replace(sliced, segment=None))
        if asked.required is None:
            note = f"slices are in several domains of {asked.preferred}" if asked.preferred else ""
            yield TopologyAttempt(request=sliced, note=note)
        return
    if asked.level is not None:
        yield TopologyAttempt(request=_at_level(request, asked.level))
    if asked.required is None:
        note = f"no domain of {asked.preferred} has room for it: preferred, so it is spread"
        yield TopologyAttempt(request=anywhere, note=note if asked.preferred else "")


def first_that_fits(
    attempts: Iterable[TopologyAttempt],
    plan: Callable[[TopologyAttempt], tuple[SitePlanner, PlacementReport]],
) -> tuple[TopologyAttempt, SitePlanner, PlacementReport]:
    """The first attempt by which all jobs have a plan, else the first of all: that is the jobs' own request.

    Raises Refused if the planner refuses every attempt.
    """
    tried: list[tuple[TopologyAttempt, SitePlanner, PlacementReport]] = []
    refusals: list[Refused] = []
    for attempt in attempts:
        try:
            planner, report = plan(attempt)
        except Refused as refused:
            # One domain may be too small for a slice, and the next not.
            refusals.append(refused)
            continue
        tried.append((attempt, planner, attempt.noted(report)))
        if all(job.plan is not None for job in report.jobs):
            return tried[-1]
    if not tried:
        raise refusals[0]
    return tried[0]


def _at_level(request: PlanRequest, level: str) -> PlanRequest:
    return replace(request, labels=replace(request.labels, clique=level))


def _values(level: str, nodes: Iterable[NodeObject]) -> list[str]:
    """The domains of a level."""
    return sorted({node.labels[level] for node in nodes if level in node.labels})
