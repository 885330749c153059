"""Read nodes, pods and published devices of a cluster as a placement site.

`read_site` turns nodes into trays and bound pods into holds, as seen by pods with given tolerations and
node rule. A tray is closed while it is cordoned, not ready or tainted; a tray that does not match the
node rule is marked as unfit, since servicing it would not help. GPUs are counted from the node's
allocatable resource, else from the GPUs that a driver publishes in slices.

`trays_avoided_by` names the nodes that anti-affinity with other jobs' pods rules out for each group.

`DraDevices` holds slices, device classes and allocated claims. A claim holds its GPUs, or the IMEX
channel of its node, on behalf of the pod that it is reserved for; an unknown user gets the highest
priority, so no fix proposes to preempt it. Devices allocated with admin access are not in use.
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
from rackloom.core.cluster import names
from rackloom.core.cluster.jobs import Job, owner_of_pod, qualified_name
from rackloom.core.cluster.objects import JsonMapping, is_resource_claimed
from rackloom.core.cluster.scheduling import (
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
from rackloom.core.cluster.site import PlacementSite, PlacementTray, SchedulerLabels, TrayHold
from rackloom.errors import Refused

_FINISHED_PHASES = ("Succeeded", "Failed")
ANONYMOUS_OWNER = "another job"
_CORDON_TAINT = "node.kubernetes.io/unschedulable"
_UNREADY_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""Taints by which the node controller repeats the Ready condition of the node."""


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
    holds = (hold_of_pod(pod, labels) for pod in pods if is_bound_pod(pod))
    return PlacementSite(tuple(trays), tuple(hold for hold in holds if hold.gpus))


# Terms of groups beside devices.


AvoidedTrays = Mapping[str, Mapping[str, str]]
"""By group: nodes from which pods of other jobs keep it, and which."""


def trays_avoided_by(
    job: Job, nodes: Iterable[JsonMapping], pods: Iterable[JsonMapping], labels: SchedulerLabels
) -> AvoidedTrays:
    """Nodes where those of a group and pods of other jobs are never together, and whose these are."""
    domains, bound = TopologyDomains(nodes), [pod for pod in pods if is_bound_pod(pod)]
    with_terms = [pod for pod in bound if required_terms(pod["spec"], "podAntiAffinity")]
    by_identity: list[tuple[PodIdentity, dict[str, str]]] = []
    found = {}
    for group in job.groups:
        identity = group.identity
        avoided = next((nodes for known, nodes in by_identity if known == identity), None)
        if avoided is None:
            # Pods without a term keep off nobody by themselves: they matter only for a group that has one.
            avoided = {
                node: f"kept apart from {owner}"
                for pod in (bound if identity.apart else with_terms)
                if (owner := owner_of_pod(pod, labels)) != job.name
                for node in domains.around(
                    pod["spec"]["nodeName"], identity.barred_by(bound_pod_identity(pod, labels.host))
                )
            }
            by_identity.append((identity, avoided))
        if avoided:
            found[group.name] = avoided
    return found


def hold_of_pod(pod: JsonMapping, labels: SchedulerLabels) -> TrayHold:
    """What a pod has of its node by the limits of its containers.

    Not GPUs of the claim that the scheduler made for these limits (KEP-5004): `DraDevices.holds` has those.
    """
    spec, metadata = pod.get("spec") or {}, pod.get("metadata") or {}
    values = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
    return TrayHold(
        owner=owner_of_pod(pod, labels),
        tray=spec.get("nodeName") or "",
        gpus=0 if is_resource_claimed(pod, labels.gpu) else gpus_of_pod(spec, labels),
        priority=spec.get("priority") or 0,
        movable=values.get(labels.movable) == "true",
    )


def without_foreign_names(holds: Iterable[TrayHold], viewer: str | None) -> tuple[TrayHold, ...]:
    """The holds as a namespace may see them: owners in others have no names, but stay distinct.

    The search reasons about whole jobs that end. None: all keep their names.
    """
    if viewer is None:
        return tuple(holds)
    aliases: dict[str, str] = {}
    named = []
    for hold in holds:
        namespace, slash, _ = hold.owner.partition("/")
        if (namespace if slash else "default") != viewer:
            alias = f"{ANONYMOUS_OWNER} {len(aliases) + 1}" if aliases else ANONYMOUS_OWNER
            hold = replace(hold, owner=aliases.setdefault(hold.owner, alias))
        named.append(hold)
    return tuple(named)


def _host_label(node: JsonMapping, labels: SchedulerLabels) -> str | None:
    """The host name that the kubelet reports, where a cloud provider gave the node another name."""
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
    conditions = (node.get("status") or {}).get("conditions") or ()
    is_ready = all(c.get("status") == "True" for c in conditions if c.get("type") == "Ready")
    if not is_ready or any(taint in _UNREADY_TAINTS for taint in taints):
        yield "not ready"
    yield from (f"taint {taint}" for taint in taints if taint not in (_CORDON_TAINT, *_UNREADY_TAINTS))


def is_bound_pod(pod: JsonMapping) -> bool:
    """Whether it is bound and not over."""
    is_over = (pod.get("status") or {}).get("phase") in _FINISHED_PHASES
    return bool((pod.get("spec") or {}).get("nodeName")) and not is_over


# Devices that drivers publish and claims hold.


PublishedDeviceId = tuple[str, str, str]
"""Driver, pool and name."""
HIGHEST_PRIORITY = 2**31 - 1
"""No priority (an int32) is above it, so nothing may preempt a hold that has it."""

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
        """The node of every GPU. The partitions of a GPU, which drivers list beside it, do not count."""
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
        holds, channels = [], []
        for claim, user in zip(self.claims, users, strict=True):
            results = claim.status.allocation.devices.results if claim.status.allocation else ()
            devices = [
                (result.driver, result.pool, result.device) for result in results if not result.admin_access
            ]
            gpus = Counter(nodes[device] for device in devices if device in nodes)
            holds += [replace(user, tray=node, gpus=count) for node, count in gpus.items()]
            channels += [
                replace(user, tray=result.pool, gpus=0, channel=True)
                for result in results
                if is_imex_channel(result.driver, result.device)
            ]
        return (*holds, *channels)

    def users(self, labels: SchedulerLabels) -> list[TrayHold]:
        """The user of each claim, as a hold on no tray; an unknown user is never preempted or moved."""
        pods = {_pod_key(pod.get("metadata") or {}): pod for pod in self.pods}
        return [_claim_user(claim, pods, labels) for claim in self.claims]


def gpus_allocated(allocated: Iterable[AllocationResult], gpus: Container[PublishedDeviceId]) -> int:
    """How many of the GPUs are allocated; admin access takes no device."""
    return sum(
        (device.driver, device.pool, device.device) in gpus and not device.admin_access
        for result in allocated
        for device in result.devices.results
    )


def claims_devices(claim: ResourceClaim) -> bool:
    """Whether it takes any device: requests with admin access do not."""
    requests = claim.spec.devices.requests
    return any(request.exactly is None or not request.exactly.admin_access for request in requests)


def _is_whole_gpu(device: Device) -> bool:
    kind = device.attributes.get("type")
    return kind is None or kind.string in (None, "gpu")


def is_imex_channel(driver: str, device: str) -> bool:
    """Whether a device is the IMEX channel of its node, whose name is that of the pool."""
    return (driver, device) == (names.IMEX_DRIVER, names.CHANNEL_DEVICE)


def _claim_user(
    claim: ResourceClaim, pods: Mapping[tuple[str, str], JsonMapping], labels: SchedulerLabels
) -> TrayHold:
    meta = claim.metadata
    names = [str(user["name"]) for user in claim.status.reserved_for if user.get("name")]
    pod = next((pod for name in names if (pod := pods.get((meta.namespace or "default", name)))), None)
    if pod is not None:
        return hold_of_pod(pod, labels)
    # The space keeps it apart from every job, because no Kubernetes name has one.
    owner = f"pod {names[0]}" if names else f"claim {meta.name}"
    return TrayHold(
        owner=qualified_name({"namespace": meta.namespace}, owner), tray="", gpus=0, priority=HIGHEST_PRIORITY
    )


def _pod_key(metadata: JsonMapping) -> tuple[str, str]:
    return metadata.get("namespace") or "default", metadata.get("name", "")
