"""Read nodes, pods and published devices of a cluster as a placement site.

`read_site` turns nodes into trays and bound pods into holds, as seen by pods with given tolerations and
node rule. A tray is closed while it is cordoned, not ready or tainted; a tray that does not match the
node rule is marked as unfit, since servicing it would not help. GPUs are counted from the node's
allocatable resource, else from the GPUs that a driver publishes in slices.

`combine_sites` merges the views of groups that may use different trays: a tray is closed to some
(`closed`), or to all. `trays_avoided_by` names the nodes that anti-affinity with other jobs' pods rules
out for each group.

`DraDevices` holds slices, device classes and allocated claims. A claim holds its GPUs, or the IMEX
channel of its node, on behalf of the pod that it is reserved for; an unknown user gets the highest
priority, so nobody is told to preempt it. Devices allocated with admin access are not in use.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import (
    AllocationResult,
    Device,
    DeviceClass,
    Node,
    ResourceClaim,
    ResourceSlice,
)
from rackloom.core.domains import names
from rackloom.core.place.jobs import Job, owner_of_pod, qualified_name
from rackloom.core.place.placement_values import PlacementSite, PlacementTray, SchedulerLabels, TrayHold
from rackloom.core.place.pod_constraints import (
    JsonMapping,
    NodeRule,
    PodIdentity,
    Toleration,
    TopologyDomains,
    blocking_taints,
    bound_pod_identity,
    gpus_of_pod,
    parse_count,
    required_terms,
    unmet_requirements,
)
from rackloom.errors import Refused

_FINISHED_PHASES = ("Succeeded", "Failed")
_CORDON_TAINT = "node.kubernetes.io/unschedulable"
_UNREADY_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""Taints in which the node controller repeats what the node itself says."""


def read_site(
    nodes: Iterable[JsonMapping],
    pods: Iterable[JsonMapping],
    labels: SchedulerLabels = SchedulerLabels(),  # noqa: B008 (a frozen value)
    *,
    tolerations: tuple[Toleration, ...] = (),
    rule: NodeRule = NodeRule(),  # noqa: B008 (a frozen value)
    avoided: Mapping[str, str] | None = None,
    published: Mapping[str, int] | None = None,
) -> PlacementSite:
    """The site as pods with these tolerations and this rule may use it.

    `avoided`: nodes from which something else keeps them, and what. `published`: GPUs by node that a driver
    publishes in slices; counted GPUs are read from the node itself.
    """
    trays = []
    for node in nodes:
        name = node["metadata"]["name"]
        closed, unfit = list(_why_closed(node, tolerations)), list(unmet_requirements(rule, node))
        if avoided and name in avoided:
            unfit.append(avoided[name])
        trays.append(
            PlacementTray(
                name=name,
                clique=(node["metadata"].get("labels") or {}).get(labels.clique),
                host=_host_label(node, labels),
                gpus=_node_gpus(node, labels) or (published or {}).get(name, 0),
                shut="; ".join((*closed, *unfit)) or None,
                is_unfit=bool(unfit),
            )
        )
    return PlacementSite(tuple(trays), tuple(_pod_holds(pods, labels)))


# Terms of groups beside devices.


AvoidedTrays = Mapping[str, Mapping[str, str]]
"""By group: nodes from which pods of other jobs keep it, and which."""


def trays_avoided_by(
    job: Job, nodes: Iterable[JsonMapping], pods: Iterable[JsonMapping], labels: SchedulerLabels
) -> AvoidedTrays:
    """Nodes where those of a group and pods of other jobs are never together, and whose these are."""
    reaches, there = TopologyDomains(nodes), [pod for pod in pods if is_bound_pod(pod)]
    choosy = [pod for pod in there if required_terms(pod["spec"], "podAntiAffinity")]
    told: list[tuple[PodIdentity, dict[str, str]]] = []
    found = {}
    for group in job.groups:
        shut = next((shut for one, shut in told if one == group.identity), None)
        if shut is None:
            theirs = (
                pod
                for pod in (there if group.identity.apart else choosy)
                if owner_of_pod(pod, labels) != job.name
            )
            shut = dict(_barred_nodes(group.identity, theirs, reaches, labels))
            told.append((group.identity, shut))
        if shut:
            found[group.name] = shut
    return found


def _barred_nodes(
    mine: PodIdentity, pods: Iterable[JsonMapping], reaches: TopologyDomains, labels: SchedulerLabels
) -> Iterator[tuple[str, str]]:
    for pod in pods:
        for node in reaches.around(
            pod["spec"]["nodeName"], mine.barred_by(bound_pod_identity(pod, labels.host))
        ):
            yield node, f"kept apart from {owner_of_pod(pod, labels)}"


def combine_sites(sites: Mapping[str, PlacementSite]) -> PlacementSite:
    """One site as it is to members of several kinds, from how each of them sees it: by `Terms.where`."""
    trays = []
    for seen in zip(*(site.trays for site in sites.values()), strict=True):
        closed = {where: tray.shut for where, tray in zip(sites, seen, strict=True) if tray.shut is not None}
        if len(closed) == len(sites):
            trays.append(seen[0])
        else:
            trays.append(replace(seen[0], shut=None, is_unfit=False, closed=closed))
    return PlacementSite(tuple(trays), next(iter(sites.values())).holds)


def hold_of_pod(pod: JsonMapping, labels: SchedulerLabels) -> TrayHold:
    """What a pod has of its node by the limits of its containers."""
    spec, metadata = pod.get("spec") or {}, pod.get("metadata") or {}
    marks = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    return TrayHold(
        owner=owner_of_pod(pod, labels),
        tray=spec.get("nodeName") or "",
        gpus=gpus_of_pod(spec, labels),
        priority=spec.get("priority") or 0,
        movable=marks.get(labels.movable) == "true",
    )


def _host_label(node: JsonMapping, labels: SchedulerLabels) -> str | None:
    """What the kubelet calls its machine; cloud providers name the node otherwise."""
    host = (node["metadata"].get("labels") or {}).get(labels.host)
    return None if host == node["metadata"]["name"] else host


def _node_gpus(node: JsonMapping, labels: SchedulerLabels) -> int:
    status = node.get("status") or {}
    value = (status.get("allocatable") or status.get("capacity") or {}).get(labels.gpu, 0)
    try:
        return parse_count(value)
    except ValueError as error:
        reason = f"node {node['metadata']['name']}: {labels.gpu} is {value!r}"
        raise Refused(reason, nearest_fix="set it to a whole number") from error


def _why_closed(node: JsonMapping, tolerations: tuple[Toleration, ...]) -> Iterator[str]:
    taints = list(blocking_taints(node, tolerations))
    if (node.get("spec") or {}).get("unschedulable") or _CORDON_TAINT in taints:
        yield "cordoned"
    ready = [
        condition
        for condition in (node.get("status") or {}).get("conditions") or ()
        if condition.get("type") == "Ready"
    ]
    if any(one.get("status") != "True" for one in ready) or any(taint in _UNREADY_TAINTS for taint in taints):
        yield "not ready"
    yield from (f"taint {taint}" for taint in taints if taint not in (_CORDON_TAINT, *_UNREADY_TAINTS))


def _pod_holds(pods: Iterable[JsonMapping], labels: SchedulerLabels) -> Iterator[TrayHold]:
    """One for each pod that is bound and not over."""
    for pod in pods:
        if is_bound_pod(pod) and gpus_of_pod(pod["spec"], labels):
            yield hold_of_pod(pod, labels)


def is_bound_pod(pod: JsonMapping) -> bool:
    """Whether it is bound and not over."""
    is_over = (pod.get("status") or {}).get("phase") in _FINISHED_PHASES
    return bool((pod.get("spec") or {}).get("nodeName")) and not is_over


# Devices that drivers publish and claims hold.


PublishedDeviceId = tuple[str, str, str]
"""Driver, pool and name."""
HIGHEST_PRIORITY = 2**31 - 1
"""No priority (an int32) is above it, so nobody is told to preempt whoever has it."""

ClaimsByKind = Mapping[str, tuple[ResourceClaim, ...]]
"""The claims of one member by `Group.devices`."""


class DraDevices(msgspec.Struct, frozen=True, kw_only=True):
    """What drivers publish, and the claims that hold some of it."""

    nodes: tuple[Node, ...]
    classes: tuple[DeviceClass, ...]
    slices: tuple[ResourceSlice, ...]
    claims: tuple[ResourceClaim, ...] = ()
    """Those that are allocated."""

    pods: tuple[JsonMapping, ...] = ()
    """Those that may have the claims."""

    def gpus_of_nodes(self, labels: SchedulerLabels) -> Counter[str]:
        """GPUs that are published, by node."""
        return Counter(self.gpus(labels).values())

    def gpus(self, labels: SchedulerLabels) -> dict[PublishedDeviceId, str]:
        """The node of every GPU; of a GPU in parts its parts are listed beside it, and are none."""
        return {
            (slice_.spec.driver, slice_.spec.pool.name, device.name): slice_.spec.node_name
            for slice_ in self.slices
            if slice_.spec.driver == labels.gpu_driver and slice_.spec.node_name
            for device in slice_.spec.devices
            if _is_whole_gpu(device)
        }

    def holds(self, labels: SchedulerLabels) -> tuple[TrayHold, ...]:
        """GPUs and IMEX channels that claims hold, as the pod that uses the claim would."""
        nodes, users = self.gpus(labels), self.users(labels)
        found = list(zip(self.claims, users, strict=True))
        gpus = (
            replace(user, tray=node, gpus=gpus)
            for claim, user in found
            for node, gpus in _gpus_held(claim, nodes).items()
        )
        channels = (
            replace(user, tray=node, gpus=0, channel=True)
            for claim, user in found
            for node in _channel_nodes(claim)
        )
        return (*gpus, *channels)

    def users(self, labels: SchedulerLabels) -> list[TrayHold]:
        """Who has each claim, as a hold on no tray; whoever is not known is not to be preempted or moved."""
        pods = {_pod_key(pod.get("metadata") or {}): pod for pod in self.pods}
        return [_claim_user(claim, pods, labels) for claim in self.claims]


def gpus_allocated(allocated: Iterable[AllocationResult], gpus: Container[PublishedDeviceId]) -> int:
    """How many of the GPUs were given; administrators look at devices without taking them."""
    return sum(
        (one.driver, one.pool, one.device) in gpus and not one.admin_access
        for result in allocated
        for one in result.devices.results
    )


def claims_devices(claim: ResourceClaim) -> bool:
    """Whether it keeps anything from others: administrators do not."""
    requests = claim.spec.devices.requests
    return any(request.exactly is None or not request.exactly.admin_access for request in requests)


def _is_whole_gpu(device: Device) -> bool:
    kind = device.attributes.get("type")
    return kind is None or kind.string in (None, "gpu")


def is_imex_channel(driver: str, device: str) -> bool:
    """Whether a device is the IMEX channel of its node, after which its pool is called."""
    return (driver, device) == (names.IMEX_DRIVER, names.CHANNEL_DEVICE)


def _channel_nodes(claim: ResourceClaim) -> list[str]:
    """The nodes of which it has the channel."""
    results = claim.status.allocation.devices.results if claim.status.allocation else ()
    return [result.pool for result in results if is_imex_channel(result.driver, result.device)]


def _gpus_held(claim: ResourceClaim, nodes: Mapping[PublishedDeviceId, str]) -> Counter[str]:
    results = claim.status.allocation.devices.results if claim.status.allocation else ()
    devices = ((result.driver, result.pool, result.device) for result in results if not result.admin_access)
    return Counter(nodes[device] for device in devices if device in nodes)


def _claim_user(
    claim: ResourceClaim, pods: Mapping[tuple[str, str], JsonMapping], labels: SchedulerLabels
) -> TrayHold:
    meta = claim.metadata
    users = [str(one["name"]) for one in claim.status.reserved_for if one.get("name")]
    known = next((pod for name in users if (pod := pods.get((meta.namespace or "default", name)))), None)
    if known is not None:
        return hold_of_pod(known, labels)
    # No word with a space is a name, so it is not taken for a job that is to be placed.
    called = f"pod {users[0]}" if users else f"claim {meta.name}"
    return TrayHold(
        owner=qualified_name({"namespace": meta.namespace}, called),
        tray="",
        gpus=0,
        priority=HIGHEST_PRIORITY,
    )


def _pod_key(metadata: JsonMapping) -> tuple[str, str]:
    return metadata.get("namespace") or "default", metadata.get("name", "")
