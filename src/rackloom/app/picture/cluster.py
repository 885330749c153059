"""A Kubernetes cluster as values: nodes and labels, published devices, claims, pods, ComputeDomains."""

import asyncio
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec

from rackloom.app.picture.devices import KnownDevices, pools_of
from rackloom.claim.cluster.settings import DEFAULT_NAMESPACE
from rackloom.claim.domain import names
from rackloom.claim.kube.api import Kind, KubeApi, NotFound
from rackloom.claim.kube.kinds import (
    COMPUTE_DOMAIN,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
)
from rackloom.claim.node.imex.clique_label import MANAGER, owners
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


class _Lists:
    """Each list of the API server, asked for once."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._read: dict[str, list[Json]] = {}

    async def read(self, path: str) -> list[Json]:
        """All objects at a list path. A cluster without our CRD has no ComputeDomains."""
        if path not in self._read:
            try:
                self._read[path] = list((await self._api.list(_KINDS[path])).items)
            except NotFound:
                if path != COMPUTE_DOMAINS:
                    raise
                self._read[path] = []
        return self._read[path]


async def read_cluster(
    api: KubeApi, known: KnownDevices | None = None, namespace: str = DEFAULT_NAMESPACE
) -> Cluster:
    """Read it all. Raises KubeError: half a look would find what is not.

    `known` remembers devices from one reading to the next: a site has tens of thousands of them.
    `namespace` is that of the IMEX daemons.
    """
    devices = (known or KnownDevices()).of
    lists = _Lists(api)
    seen = await collect_cluster(lists, namespace)
    slices = (await api.list(RESOURCE_SLICE)).items
    return Cluster(
        seen=seen,
        nodes=tuple(sorted(map(_node, await lists.read(NODES)), key=lambda one: one.name)),
        pools=pools_of(slices),
        devices=await asyncio.to_thread(devices, slices),
        uses=tuple(_uses(await lists.read(CLAIMS), await lists.read(PODS))),
        meshes=tuple(_meshes(seen)),
    )


def _node(obj: Json) -> NodeSeen:
    meta, spec = obj["metadata"], obj.get("spec") or {}
    ready, since = _ready(obj)
    writers = owners(obj, names.GPU_CLIQUE_LABEL)
    writer = MANAGER if MANAGER in writers else next(iter(writers), "")
    return NodeSeen(
        name=meta["name"],
        ready=ready,
        ready_since=since,
        clique=(meta.get("labels") or {}).get(names.GPU_CLIQUE_LABEL) or None,
        clique_writer=writer,
        other_writers=tuple(one for one in writers if one != writer),
        taints=tuple(f"{one['key']}:{one.get('effect', '')}" for one in spec.get("taints") or ()),
        unschedulable=bool(spec.get("unschedulable")),
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


def _uses(claims: list[Json], pods: list[Json]) -> Iterator[DeviceUse]:
    named = {one["metadata"]["uid"]: _name(one) for one in pods}
    for claim in sorted(claims, key=_name):
        status, namespace = claim.get("status") or {}, claim["metadata"]["namespace"]
        users = [(one["uid"], one["name"]) for one in status.get("reservedFor") or ()]
        told = tuple(sorted(named.get(uid, f"{namespace}/{name}") for uid, name in users))
        devices = (status.get("allocation") or {}).get("devices") or {}
        for one in devices.get("results") or ():
            if one.get("adminAccess"):
                continue  # Monitoring: the device is whoever else's claim holds it.
            yield DeviceUse(
                driver=one["driver"], pool=one["pool"], device=one["device"], claim=_name(claim), pods=told
            )


def _meshes(seen: ClusterSeen) -> Iterator[MeshSeen]:
    for one in sorted(seen.daemons, key=lambda one: (one.domain, one.node)):
        yield MeshSeen(
            node=one.node, domain=one.domain, clique=one.clique, complete=one.meshed, missing=one.missing
        )


def _name(obj: Json) -> str:
    return f"{obj['metadata']['namespace']}/{obj['metadata']['name']}"
