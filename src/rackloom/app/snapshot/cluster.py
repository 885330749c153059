"""A Kubernetes cluster as values: nodes, devices, allocations, IMEX meshes, namespaces.

`read_cluster` lists each kind once and fails as a whole with KubeError, because half a reading would show
faults that are not there. Some refusals are excused: a cluster without our CRDs has no ComputeDomains and
GangPlans, and one that does not serve DeviceTaintRules has none. A user who may not list namespaces gets a
snapshot that shows no tenant its pods, and one who may not list GangPlans, rules or device classes learns
nothing of gangs, of rules, or of pods that rules hold up. Decoding runs in a thread, so that the event loop
stays free.

An object that cannot be read, by the rules of `core.cluster.reader`, is left out and named.

A service that follows a large cluster keeps only the fields that are read here: `core.cluster.projection`
declares them.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from rackloom.app.snapshot.cache import ReadCache
from rackloom.claim.kube.api import KubeError, NotFound, ObjectList, list_taint_rules
from rackloom.claim.node.imex.labels import CLIQUE_LABEL_MANAGER
from rackloom.core.allocate.objects import DeviceClass, ResourceClaim, ResourceSlice
from rackloom.core.allocate.taint_rules import DeviceTaintRule, WithheldDevice, readable_rules
from rackloom.core.cluster import names
from rackloom.core.cluster.claims import claim_consumers, held_devices, read_allocations
from rackloom.core.cluster.devices import allocator_values
from rackloom.core.cluster.domain_objects import ComputeDomain
from rackloom.core.cluster.nodes import container_runtime, node_clique, read_node
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    DEVICE_CLASS,
    DEVICE_TAINT_RULES,
    GANG_PLAN,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_SLICE,
    Object,
    ResourceKind,
    condition_of,
    field_writes,
    full_name,
    labels_of,
    name_of,
    namespace_of,
    uid_of,
)
from rackloom.core.cluster.pods import accepted_at
from rackloom.core.cluster.reader import find_fault
from rackloom.core.cluster.scheduling import allocator_node
from rackloom.core.cluster.state import Unreadable
from rackloom.core.diagnosis.evidence import ClusterEvidence
from rackloom.core.diagnosis.snapshot import (
    ClaimRecord,
    DeviceRecord,
    DeviceUse,
    ImexMeshRecord,
    NodeRecord,
    PodRecord,
    PoolRecord,
    ReportedCondition,
    TemplateRecord,
)
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.prove.collectors.cluster import ListReader, collect_cluster, controller_title

V = TypeVar("V")
_FORBIDDEN = 403
_NAMESPACES_FORBIDDEN = "namespaces may not be listed, so no tenant is shown its own pods"
_RULES_FORBIDDEN = "DeviceTaintRules may not be listed, so devices that they taint look free"
_GANGS_FORBIDDEN = "GangPlans may not be listed, so gangs are not judged"
_MOST_NAMED = 16
"""Unreadable objects that are named, each with its reason."""
_FAULTS = {kind: partial(find_fault, kind) for kind in (RESOURCE_SLICE, NODE, RESOURCE_CLAIM, POD)}
"""The reason why an object is left out, by kind."""
_MOST_WITHHELD = 64
"""The most pending claims of one reading for which the devices withheld by rules are found."""


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in a cluster that a snapshot shows. Its fields have the names of `SiteSnapshot`."""

    nodes: tuple[NodeRecord, ...]
    pools: tuple[PoolRecord, ...]
    devices: tuple[DeviceRecord, ...]
    uses: tuple[DeviceUse, ...]
    meshes: tuple[ImexMeshRecord, ...]
    compute_domains: tuple[ComputeDomain, ...]
    templates: tuple[TemplateRecord, ...]
    claims: tuple[ClaimRecord, ...]
    pods: tuple[PodRecord, ...]
    reported: tuple[ReportedCondition, ...]
    namespaces: Mapping[str, str]
    problem: str
    """A description of the objects that could not be read nevertheless."""


class Lister(Protocol):
    """Lists objects: an API server, or a cache that follows one. Raises `KubeError`."""

    async def list(self, kind: ResourceKind, /) -> ObjectList:
        """All objects of a kind, in all namespaces."""
        ...


class ClusterFreshness(msgspec.Struct, frozen=True):
    """The freshness of a cluster's cache, in seconds since the epoch."""

    at: float | None
    """The last update of the least recently updated kind, or None if some kind was never listed."""
    unknown_since: float | None


def is_excused(kind: ResourceKind, error: KubeError) -> bool:
    """Whether a refused list counts as empty: without our CRDs there are no ComputeDomains and GangPlans."""
    is_optional = kind in (COMPUTE_DOMAIN, GANG_PLAN, *DEVICE_TAINT_RULES)
    if is_optional and isinstance(error, NotFound):
        return True
    return kind in (NAMESPACE, GANG_PLAN, DEVICE_CLASS, *DEVICE_TAINT_RULES) and error.code == _FORBIDDEN


def _list_once(
    api: Lister, cache: ReadCache, left_out: list[Unreadable], forbidden: set[ResourceKind]
) -> ListReader:
    """Reads each list of the API server at most once, without objects that cannot be read."""
    known: dict[ResourceKind, list[Object]] = {}

    async def read(kind: ResourceKind) -> list[Object]:
        if kind not in known:
            try:
                listed = list((await api.list(kind)).items)
            except KubeError as error:
                if not is_excused(kind, error):
                    raise
                listed = []
                if error.code == _FORBIDDEN:
                    forbidden.add(kind)
            faults = cache.each(_FAULTS[kind], listed) if kind in _FAULTS else [None] * len(listed)
            left_out.extend(fault for fault in faults if fault is not None)
            known[kind] = [obj for obj, fault in zip(listed, faults, strict=True) if fault is None]
        return known[kind]

    return read


async def read_cluster(
    api: Lister, cache: ReadCache | None = None, namespace: str = DEFAULT_DAEMON_NAMESPACE
) -> ClusterSnapshot:
    """Read everything, or raise KubeError: a partial reading would show faults that do not exist.

    `cache` keeps decoded objects from one reading to the next: a site has tens of thousands of devices.
    `namespace` is that of the IMEX daemons.
    """
    cache = cache or ReadCache()
    left_out, forbidden = list[Unreadable](), set[ResourceKind]()
    read = _list_once(api, cache, left_out, forbidden)
    evidence = await collect_cluster(read, namespace, cache.each)
    slices, nodes, claims, pods = [await read(kind) for kind in _FAULTS]
    namespaces = await _unless_forbidden(api.list(NAMESPACE))
    listed_rules = await _unless_forbidden(list_taint_rules(api.list))
    rules = tuple(readable_rules(listed_rules or ()))
    # Only claims that may wait because of a rule are looked into.
    classes = await read(DEVICE_CLASS) if rules else []
    more = len(left_out) - _MOST_NAMED
    problems = (
        *([_NAMESPACES_FORBIDDEN] if namespaces is None else ()),
        *([_RULES_FORBIDDEN] if listed_rules is None else ()),
        *([_GANGS_FORBIDDEN] if GANG_PLAN in forbidden else ()),
        *map(str, left_out[:_MOST_NAMED]),
        *([f"{more} more objects are left out"] if more > 0 else ()),
    )

    def decode() -> ClusterSnapshot:
        published = cache.devices.of(slices, rules)
        inputs = _RuleInputs(rules, classes, slices, claims, nodes)
        labelled = namespaces.items if namespaces else ()
        return ClusterSnapshot(
            nodes=tuple(sorted(cache.each(_node_record, nodes), key=lambda node: node.name)),
            pools=published.pools,
            devices=published.devices,
            uses=allocated_devices(claims, pods, cache),
            meshes=tuple(sorted(evidence.daemons, key=lambda daemon: (daemon.domain, daemon.node))),
            compute_domains=evidence.domains,
            templates=evidence.templates,
            claims=_with_withheld(evidence, cache, inputs),
            pods=evidence.pods,
            reported=evidence.reported,
            namespaces={
                name_of(obj): org for obj in labelled if (org := labels_of(obj).get(names.ORG_LABEL))
            },
            problem="; ".join(problems),
        )

    # In a thread: decoding a large cluster takes long enough to delay other requests of the event loop.
    return await asyncio.to_thread(decode)


async def _unless_forbidden(listing: Awaitable[V]) -> V | None:
    """The list, or None if the user may not read it."""
    try:
        return await listing
    except KubeError as error:
        if error.code != _FORBIDDEN:
            raise
        return None


class _RuleInputs(NamedTuple):
    """The inputs that decide which devices rules keep from claims that are pending."""

    rules: tuple[DeviceTaintRule, ...]
    classes: list[Object]
    slices: list[Object]
    claims: list[Object]
    nodes: list[Object]
    wanted: tuple[str, ...] = ()
    """Claims for which it is found out."""


def _with_withheld(
    evidence: ClusterEvidence, cache: ReadCache, inputs: _RuleInputs
) -> tuple[ClaimRecord, ...]:
    """The claims. Those that wait for devices include the devices that rules keep from them."""
    # The scheduler does not consider pods with gates.
    considered = (pod for pod in evidence.pods if not pod.gated)
    waiting = {f"{pod.namespace}/{name}" for pod in considered for name in pod.claims.values()}
    pending = {claim.key for claim in evidence.claims if not claim.allocated and claim.key in waiting}
    if not inputs.rules or not pending:
        return evidence.claims
    wanted = tuple(sorted(pending)[:_MOST_WITHHELD])
    (found,) = cache.again({"": inputs._replace(wanted=wanted)}, _withheld)
    return tuple(
        msgspec.structs.replace(claim, withheld=found[claim.key]) if claim.key in found else claim
        for claim in evidence.claims
    )


def _withheld(inputs: _RuleInputs) -> Mapping[str, tuple[WithheldDevice, ...]]:
    # Rarely needed: other readings do not load the allocator.
    from rackloom.core.allocate.withheld import DeviceSupply, withheld_devices

    asked = {
        key: claim
        for obj in inputs.claims
        if (key := full_name(obj)) in inputs.wanted
        for claim in allocator_values([obj], ResourceClaim)
    }
    supply = DeviceSupply(
        nodes=tuple(allocator_node(read_node(node)) for node in inputs.nodes),
        classes=tuple(allocator_values(inputs.classes, DeviceClass)),
        slices=tuple(allocator_values(inputs.slices, ResourceSlice)),
        in_use=tuple(read_allocations(inputs.claims)),
        rules=inputs.rules,
    )
    return dict(zip(asked, withheld_devices(asked.values(), supply), strict=True))


def _node_record(obj: Object) -> NodeRecord:
    node, ready = read_node(obj), condition_of(obj, "Ready")
    writes = tuple(field_writes(obj, names.GPU_CLIQUE_LABEL))
    writers = [name for name, _ in writes]
    writer = CLIQUE_LABEL_MANAGER if CLIQUE_LABEL_MANAGER in writers else next(iter(writers), "")
    return NodeRecord(
        name=node.name,
        ready=None if ready is None else {"True": True, "False": False}.get(ready.status),
        ready_since=None if ready is None else ready.since,
        clique=node_clique(node.labels, names.GPU_CLIQUE_LABEL),
        clique_writer=writer,
        clique_since={name: time for name, time in writes if time is not None}.get(writer),
        other_writers=tuple(name for name in writers if name != writer),
        taints=tuple(taint.text for taint in node.taints),
        unschedulable=node.is_cordoned,
        runtime=container_runtime(obj),
        simulated=node.labels.get(names.SIMULATED_LABEL) == "true",
    )


def allocated_devices(claims: list[Object], pods: list[Object], cache: ReadCache) -> tuple[DeviceUse, ...]:
    """Allocated devices by claim, without those that a claim may only observe."""
    users = dict(cache.each(_pod_start, pods))
    inputs = {
        name: (claim, tuple(map(users.get, uids)))
        for claim, (name, uids) in zip(claims, cache.each(_claim_users, claims), strict=True)
    }
    by_name = {name: inputs[name] for name in sorted(inputs)}
    return tuple(chain.from_iterable(cache.again(by_name, _claim_allocations)))


def _claim_users(claim: Object) -> tuple[str, tuple[str, ...]]:
    return full_name(claim), tuple(user.uid for user in claim_consumers(claim))


_PodStart = tuple[float | None, str]
"""The time when the kubelet accepted a pod, if reported, and the controller that makes the pod again."""


def _pod_start(pod: Object) -> tuple[str, _PodStart]:
    return uid_of(pod), (accepted_at(pod), controller_title(pod))


def _claim_allocations(inputs: tuple[Object, tuple[_PodStart | None, ...]]) -> tuple[DeviceUse, ...]:
    claim, users = inputs
    since = [user[0] if user else None for user in users]
    jobs = {job for _, job in filter(None, users) if job}
    pods = sorted(f"{namespace_of(claim)}/{user.name}" for user in claim_consumers(claim))
    return tuple(
        DeviceUse(
            driver=held.driver,
            pool=held.pool,
            device=held.device,
            claim=full_name(claim),
            pods=tuple(pods),
            since=None if None in since else min(filter(None, since), default=None),
            jobs=tuple(sorted(jobs)),
        )
        for held in held_devices(claim)
    )
