"""What the controller sees of the objects around a ComputeDomain, as values."""

from collections.abc import Mapping
from typing import Any

import msgspec

from rackloom.claim.domain import names
from rackloom.claim.domain.configs import ChannelConfig, decode_lenient
from rackloom.claim.domain.objects import Ref, clean_line
from rackloom.claim.kube.api import Kind, Object
from rackloom.claim.kube.kinds import RESOURCE_CLAIM
from rackloom.claim.kube.timestamps import seconds_of
from rackloom.errors import Refused

LONGEST_ERROR = 500
"""Characters of what a daemon says of nvidia-imex that go into a status: it runs on a tenant's node."""


class Thing(msgspec.Struct, frozen=True, kw_only=True):
    """An object of any kind, as far as ownership and deletion are concerned."""

    kind: Kind
    namespace: str | None
    name: str
    uid: str
    resource_version: str
    labels: Mapping[str, str]
    finalizers: tuple[str, ...]
    deleting: bool

    @property
    def domain(self) -> str:
        """UID of the ComputeDomain it belongs to; empty for an object of somebody else."""
        return self.labels.get(names.COMPUTE_DOMAIN_LABEL, "")

    @property
    def called(self) -> str:
        """Kind and name, as people write them."""
        place = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{self.kind.kind} {place}"


class Mesh(msgspec.Struct, frozen=True):
    """What a daemon's annotation says of its connections."""

    complete: bool
    missing: tuple[str, ...] = ()


class DaemonPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod of a ComputeDomain's DaemonSet."""

    ref: Ref
    domain: str
    node: str
    ip_address: str
    clique_id: str | None
    """None until the daemon has said it; empty on a node without an NVLink fabric."""
    ready: bool
    mesh: Mesh | None = None
    """Whether it reaches all its peers, as it says; None until it has said."""
    imex_error: str = ""
    """Why nvidia-imex does not run in it, in one line; empty while it does, or nobody knows."""
    alive: bool
    """False once all its containers have ended for good."""
    deleting: bool = False


class ChannelClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A claim for IMEX channels."""

    thing: Thing
    domain: str
    """UID of the ComputeDomain that its config names."""
    created: str
    """RFC 3339."""
    reserved_for: tuple[str, ...]
    """Names of the pods that may use it now."""
    device: tuple[str, str] | None
    """Pool and device allocated to it."""


def thing(kind: Kind, obj: Object) -> Thing:
    """Read what all objects have."""
    meta = obj["metadata"]
    return Thing(
        kind=kind,
        namespace=meta.get("namespace"),
        name=meta["name"],
        uid=meta.get("uid", ""),
        resource_version=meta.get("resourceVersion", ""),
        labels=meta.get("labels") or {},
        finalizers=tuple(meta.get("finalizers") or ()),
        deleting=meta.get("deletionTimestamp") is not None,
    )


def not_ready_since(node: Object) -> float | None:
    """Seconds since the epoch; None while a node is ready.

    One that never said whether it is ready is not ready since it was made.
    """
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready: Object = next((one for one in conditions if one.get("type") == "Ready"), {})
    if ready.get("status") == "True":
        return None
    since = ready.get("lastTransitionTime") or node["metadata"].get("creationTimestamp", "")
    return seconds_of(since) or 0.0


def daemon_pod(obj: Object) -> DaemonPod | None:
    """Read a daemon pod; None for one that has no node yet."""
    meta, status = obj["metadata"], obj.get("status") or {}
    labels = meta.get("labels") or {}
    node = (obj.get("spec") or {}).get("nodeName")
    if not node:
        return None
    deleting = meta.get("deletionTimestamp") is not None
    return DaemonPod(
        ref=Ref(meta["name"], meta["uid"], meta.get("namespace", "")),
        domain=labels.get(names.COMPUTE_DOMAIN_LABEL, ""),
        node=node,
        ip_address=status.get("podIP", ""),
        clique_id=labels.get(names.CLIQUE_ID_LABEL),
        ready=not deleting and _is_ready(status),
        mesh=_mesh(meta),
        imex_error=clean_line(_annotation(meta, names.IMEX_ERROR_ANNOTATION) or "", LONGEST_ERROR),
        alive=status.get("phase") not in ("Succeeded", "Failed"),
        deleting=deleting,
    )


def channel_claim(obj: Object) -> ChannelClaim | None:
    """Read a claim; None when it names no ComputeDomain for a channel."""
    domain = claimed_domain(obj)
    if domain is None:
        return None
    status = obj.get("status") or {}
    results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
    ours = [one for one in results if one.get("driver") == names.IMEX_DRIVER]
    return ChannelClaim(
        thing=thing(RESOURCE_CLAIM, obj),
        domain=domain,
        created=obj["metadata"].get("creationTimestamp", ""),
        reserved_for=tuple(one["name"] for one in status.get("reservedFor") or ()),
        device=(ours[0]["pool"], ours[0]["device"]) if ours else None,
    )


def claimed_domain(obj: Object) -> str | None:
    """UID of the ComputeDomain whose channel a claim asks for; None where it asks for none."""
    for entry in ((obj.get("spec") or {}).get("devices") or {}).get("config") or ():
        config = _channel_config(entry.get("opaque") or {})
        if config is not None:
            return config.domain_id
    return None


def _channel_config(opaque: Mapping[str, Any]) -> ChannelConfig | None:
    if opaque.get("driver") != names.IMEX_DRIVER:
        return None
    try:
        config = decode_lenient(opaque.get("parameters") or {})
    except Refused:
        return None
    return config if isinstance(config, ChannelConfig) else None


def _annotation(meta: Object, name: str) -> str | None:
    found: str | None = (meta.get("annotations") or {}).get(name)
    return found


def _mesh(meta: Object) -> Mesh | None:
    said = _annotation(meta, names.MESH_ANNOTATION)
    try:
        mesh = None if said is None else msgspec.json.decode(said, type=Mesh)
    except (ValueError, RecursionError):  # what does not decode, a lone surrogate, nesting without end
        return None
    if mesh is None:
        return None
    return Mesh(mesh.complete, tuple(clean_line(one, LONGEST_ERROR) for one in mesh.missing))


def _is_ready(status: Object) -> bool:
    conditions = status.get("conditions") or ()
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
