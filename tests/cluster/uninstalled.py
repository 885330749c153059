"""Whether anything of an installation is left in a cluster, found without the code that removed it.

Every object of every type that the API server lists is looked at, by names, labels, finalizers, taints and
writers. Used here and on real nodes.
"""

from collections.abc import Collection, Iterator
from typing import Any

from rackloom.claim.cluster.uninstall.executor import discover_types
from rackloom.claim.kube.api import KubeApi, KubeError, NotFound
from rackloom.claim.kube.client import KubeClient
from rackloom.core.cluster.objects import POD, Object, ResourceKind

_KEYS = ("rackloom.dev/", "resource.nvidia.com/")
_NAMES = ("rackloom-", "computedomain")
_GROUPS = ("rackloom.dev", "resource.nvidia.com")
_CLASSES = (
    "compute-domain-daemon.nvidia.com",
    "compute-domain-default-channel.nvidia.com",
    "compute-domain-isolated-channel.rackloom.dev",
    "gpu.nvidia.com",
    "mig.nvidia.com",
    "vfio.gpu.nvidia.com",
    "dra.net",
    "dranet.net",
)
_OF_USERS = ("Event", "Pod", "Job", "ReplicaSet", "PodMetrics", "NodeMetrics")
"""Kinds that users label for us themselves, and kinds that only record the past."""
DEVICE_POD: Object = {
    "metadata": {"name": "wants-a-device"},
    "spec": {
        "containers": [{"name": "main", "image": "none", "resources": {"claims": [{"name": "device"}]}}],
        "resourceClaims": [{"name": "device", "resourceClaimTemplateName": "none-such"}],
    },
}


async def remains(api: KubeClient, *, besides: Collection[str] = ()) -> list[str]:
    """The remaining objects, as `Kind namespace/name: why`. `besides` names objects that should stay."""
    found = []
    for kind in (await discover_types(api)).kinds:
        if kind.kind in _OF_USERS:
            continue
        for obj in await _listed(api, kind):
            reasons = sorted(set(_reasons(kind, obj)))
            if reasons and obj["metadata"]["name"] not in besides:
                place = obj["metadata"].get("namespace", "")
                found.append(f"{kind.kind} {place}/{obj['metadata']['name']}: {', '.join(reasons)}")
    return found


async def is_admitted(api: KubeApi, namespace: str) -> bool:
    """Whether a pod with a claim can be made without one of our gates."""
    pod = {**DEVICE_POD, "metadata": {**DEVICE_POD["metadata"], "namespace": namespace}}
    try:
        made = await api.create(POD, pod, dry_run=True)
    except KubeError:
        return False
    return not made["spec"].get("schedulingGates")


async def _listed(api: KubeApi, kind: ResourceKind) -> tuple[Object, ...]:
    try:
        return (await api.list(kind)).items
    except NotFound:
        return ()


def _reasons(kind: ResourceKind, obj: Object) -> Iterator[str]:
    meta = obj["metadata"]
    if (meta.get("labels") or {}).get("app.kubernetes.io/part-of") == "rackloom":
        yield "our label"
    keys = [key for field in ("labels", "annotations", "finalizers") for key in meta.get(field) or ()]
    keys += [taint["key"] for taint in _spec(obj).get("taints") or ()]
    yield from (key for key in keys if key.startswith(_KEYS))
    if meta["name"].startswith(_NAMES) or (meta.get("namespace") or "").startswith("rackloom-"):
        yield "our name"
    if kind.group in _GROUPS or _spec(obj).get("group") in _GROUPS:
        yield "our type"
    if kind.kind == "DeviceClass" and meta["name"] in _CLASSES:
        yield "our class"
    writers = {entry.get("manager", "") for entry in meta.get("managedFields") or ()}
    if kind.kind == "ResourceSlice" and any(writer.startswith("rackloom") for writer in writers):
        yield "published by us"


def _spec(obj: Object) -> dict[str, Any]:
    return obj.get("spec") or {}
