"""A Kubernetes cluster as values: nodes and labels, published devices, claims, pods, ComputeDomains."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import msgspec

from rackloom.app.picture.devices import taint_text
from rackloom.app.picture.known import Known
from rackloom.claim.cluster.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.claim.domain import names
from rackloom.claim.kube.api import Kind, KubeError, Listed, NotFound
from rackloom.claim.kube.kinds import (
    COMPUTE_DOMAIN,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
)
from rackloom.claim.node.imex.clique_label import MANAGER, owners, written
from rackloom.prove.doctor.collectors.cluster import (
    CLAIMS,
    COMPUTE_DOMAINS,
    NODES,
    PODS,
    TEMPLATES,
    collect_cluster,
)
from rackloom.prove.doctor.evidence import ClusterSeen
from rackloom.prove.picture.values import DeviceSeen, DeviceUse, MeshSeen, NodeSeen, PoolSeen

Json = dict[str, Any]
ORG_LABEL = "rackloom.dev/org"
"""On a namespace: the organisation whose pods are in it."""
_FORBIDDEN = 403
_UNLABELLED = "namespaces may not be listed, so no tenant is shown its own pods"
_KINDS: Mapping[str, Kind] = {
    COMPUTE_DOMAINS: COMPUTE_DOMAIN,
    TEMPLATES: RESOURCE_CLAIM_TEMPLATE,
    CLAIMS: RESOURCE_CLAIM,
    PODS: POD,
    NODES: NODE,
}


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """All of a cluster that a picture shows."""

    seen: ClusterSeen
    nodes: tuple[NodeSeen, ...]
    pools: tuple[PoolSeen, ...]
    devices: tuple[DeviceSeen, ...]
    uses: tuple[DeviceUse, ...]
    meshes: tuple[MeshSeen, ...]
    namespaces: Mapping[str, str]
    """Org of each that is labelled with one."""
    problem: str = ""
    """What could not be read of it all the same, in words."""


class Lister(Protocol):
    """Whoever knows all objects of a kind: an API server, or who follows one. Raises `KubeError`."""

    async def list(self, kind: Kind, /) -> Listed:
        """All objects of a kind, in all namespaces."""
        ...


class Reach(msgspec.Struct, frozen=True):
    """How far a cluster is known by one who follows it, in seconds since the epoch."""

    at: float | None
    """When the kind that was heard of least lately was heard of; None: some were never listed."""
    unknown_since: float | None


def excused(kind: Kind, error: KubeError) -> bool:
    """Whether a cluster is read all the same: one without our CRD has no ComputeDomains."""
    if kind == COMPUTE_DOMAIN:
        return isinstance(error, NotFound)
    return kind == NAMESPACE and error.code == _FORBIDDEN


class _Lists:
    """Each list of the API server, asked for once."""

    def __init__(self, api: Lister) -> None:
        self._api = api
        self._read: dict[str, list[Json]] = {}

    async def read(self, path: str) -> list[Json]:
        """All objects at a list path."""
        if path not in self._read:
            try:
                self._read[path] = list((await self._api.list(_KINDS[path])).items)
            except KubeError as error:
                if not excused(_KINDS[path], error):
                    raise
                self._read[path] = []
        return self._read[path]


async def read_cluster(
    api: Lister, known: Known | None = None, namespace: str = DEFAULT_DAEMON_NAMESPACE
) -> Cluster:
    """Read it all. Raises KubeError: half a look would find what is not.

    `known` remembers what it read from one reading to the next: a site has tens of thousands of devices.
    `namespace` is that of the IMEX daemons.
    """
    known = known or Known()
    lists = _Lists(api)
    seen = await collect_cluster(lists, namespace, known.each)
    slices = (await api.list(RESOURCE_SLICE)).items
    nodes, claims, pods = [await lists.read(path) for path in (NODES, CLAIMS, PODS)]
    orgs = await _orgs(api)
    found = await asyncio.to_thread(_cluster, known, seen, slices, nodes, claims, pods, orgs or {})
    return msgspec.structs.replace(found, problem=_UNLABELLED if orgs is None else "")


async def _orgs(api: Lister) -> Mapping[str, str] | None:
    """Whose each namespace is that says so; None where that may not be read."""
    try:
        found = (await api.list(NAMESPACE)).items
    except KubeError as error:
        if not excused(NAMESPACE, error):
            raise
        return None
    labels = {one["metadata"]["name"]: one["metadata"].get("labels") or {} for one in found}
    return {name: told[ORG_LABEL] for name, told in labels.items() if told.get(ORG_LABEL)}


def _cluster(
    known: Known,
    seen: ClusterSeen,
    slices: Sequence[Json],
    nodes: list[Json],
    claims: list[Json],
    pods: list[Json],
    orgs: Mapping[str, str],
) -> Cluster:
    published = known.devices.of(slices)
    return Cluster(
        seen=seen,
        nodes=tuple(sorted(known.each(_node, nodes), key=lambda one: one.name)),
        pools=published.pools,
        devices=published.devices,
        uses=uses_of(claims, pods, known),
        meshes=tuple(_meshes(seen)),
        namespaces=orgs,
    )


def _node(obj: Json) -> NodeSeen:
    meta, spec = obj["metadata"], obj.get("spec") or {}
    labels, info = meta.get("labels") or {}, (obj.get("status") or {}).get("nodeInfo") or {}
    ready, since = _ready(obj)
    writers = owners(obj, names.GPU_CLIQUE_LABEL)
    writer = MANAGER if MANAGER in writers else next(iter(writers), "")
    return NodeSeen(
        name=meta["name"],
        ready=ready,
        ready_since=since,
        clique=labels.get(names.GPU_CLIQUE_LABEL) or None,
        clique_writer=writer,
        clique_since=_moment(written(obj, names.GPU_CLIQUE_LABEL).get(writer)),
        other_writers=tuple(one for one in writers if one != writer),
        taints=tuple(map(taint_text, spec.get("taints") or ())),
        unschedulable=bool(spec.get("unschedulable")),
        runtime=info.get("containerRuntimeVersion") or None,
        simulated=labels.get(names.SIMULATED_LABEL) == "true",
    )


def _ready(node: Json) -> tuple[bool | None, float | None]:
    conditions = (node.get("status") or {}).get("conditions") or ()
    found = next((one for one in conditions if one.get("type") == "Ready"), None)
    if found is None:
        return None, None
    said = {"True": True, "False": False}.get(found.get("status", ""))
    return said, _moment(found.get("lastTransitionTime"))


def _moment(text: str | None) -> float | None:
    return None if not text else datetime.fromisoformat(text).timestamp()


def uses_of(claims: Iterable[Json], pods: Iterable[Json], known: Known) -> tuple[DeviceUse, ...]:
    """Who has devices, by claim. Nobody has those that a claim may only look at."""
    users = dict(known.each(_user, pods))
    held = sorted(known.each(_held, claims), key=lambda one: one.claim)
    told = {one.claim: (one, tuple(users.get(uid) for uid, _ in one.users)) for one in held}
    return tuple(use for uses in known.again(told, _uses) for use in uses)


class _Held(msgspec.Struct, frozen=True):
    """The devices of a claim, and its users as it names them."""

    claim: str
    devices: tuple[tuple[str, str, str], ...]
    """Driver, pool and name."""
    users: tuple[tuple[str, str], ...]
    """UID, and namespace/name."""


def _held(claim: Json) -> _Held:
    status, namespace = claim.get("status") or {}, claim["metadata"]["namespace"]
    devices = (status.get("allocation") or {}).get("devices") or {}
    return _Held(
        claim=_name(claim),
        devices=tuple(
            (one["driver"], one["pool"], one["device"])
            for one in devices.get("results") or ()
            if not one.get("adminAccess")  # Monitoring: the device is whoever else's claim holds it.
        ),
        users=tuple((one["uid"], f"{namespace}/{one['name']}") for one in status.get("reservedFor") or ()),
    )


class _User(msgspec.Struct, frozen=True):
    """A pod that may use claims."""

    name: str
    since: float | None
    """When its kubelet took it; None: it has not, or does not say."""


def _user(pod: Json) -> tuple[str, _User]:
    started = (pod.get("status") or {}).get("startTime")
    return pod["metadata"]["uid"], _User(_name(pod), _moment(started))


def _uses(told: tuple[_Held, tuple[_User | None, ...]]) -> tuple[DeviceUse, ...]:
    held, users = told
    pods = [name if user is None else user.name for (_, name), user in zip(held.users, users, strict=True)]
    since = [None if user is None else user.since for user in users]
    first = min((at for at in since if at is not None), default=None)
    return tuple(
        DeviceUse(
            driver=driver,
            pool=pool,
            device=device,
            claim=held.claim,
            pods=tuple(sorted(pods)),
            since=None if None in since else first,
        )
        for driver, pool, device in held.devices
    )


def _meshes(seen: ClusterSeen) -> Iterator[MeshSeen]:
    for one in sorted(seen.daemons, key=lambda one: (one.domain, one.node)):
        yield MeshSeen(
            node=one.node, domain=one.domain, clique=one.clique, complete=one.meshed, missing=one.missing
        )


def _name(obj: Json) -> str:
    return f"{obj['metadata']['namespace']}/{obj['metadata']['name']}"
