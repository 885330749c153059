"""What creation, change and deletion make of an object's metadata: functions of values.

The rules are those of k8s.io/apiserver's generic registry: who may set what, when a generation counts up, and
when an object that is asked to go really goes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Kind, Object
from rackloom.claim.kube.pods import has_ended
from rackloom.twin.kube import answers
from rackloom.twin.kube import metadata as metadata_rules
from rackloom.twin.kube.shapes import Shape

FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"
NAMESPACE = "kubernetes"
CUSTOM_RESOURCES = "customresourcecleanup.apiextensions.k8s.io"
"""Finalizers of the server's own controllers (on a real one, a namespace has its in spec.finalizers)."""
_PROPAGATION = {"Foreground": FOREGROUND, "Orphan": ORPHAN}
_KEPT = ("uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds")
_OF_THE_SERVER = (*_KEPT, "managedFields", "selfLink")
_GIVEN = (*_OF_THE_SERVER, "namespace")
POD_GRACE_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Birth:
    """What the server adds to a new object: identity, time (RFC 3339), the end of a generated name."""

    uid: str
    time: str
    suffix: str


def created(kind: Kind, obj: Object, namespace: str | None, shape: Shape, birth: Birth) -> Object:
    """The object as it is first stored, without resourceVersion and managedFields."""
    metadata_rules.check(kind, obj)
    given: dict[str, Any] = dict(obj.get("metadata") or {})
    if given.get("resourceVersion"):
        message = "resourceVersion should not be set on objects to be created"
        raise answers.bad_request(message)
    name = given.get("name") or (given["generateName"] + birth.suffix if given.get("generateName") else "")
    if not name:
        raise answers.invalid(kind, "", "metadata.name: Required value: name or generateName is required")
    identity = {"name": name, "uid": birth.uid, "creationTimestamp": birth.time}
    if kind.namespaced:
        identity["namespace"] = namespace
    metadata = {key: value for key, value in given.items() if key not in _GIVEN} | identity
    if shape.generation:
        metadata["generation"] = 1
    body = {key: value for key, value in obj.items() if key != "status" or keeps_status(shape)}
    return {**body, "apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}


def keeps_status(shape: Shape) -> bool:
    """Whether a create stores the status it is given."""
    return not shape.status or shape.status_on_create


def changed(kind: Kind, old: Object, new: Object, shape: Shape, subresource: str) -> Object:
    """`new` as it may replace `old` through this subresource ("" is the object itself)."""
    metadata_rules.check(kind, new)
    _same_identity(kind, old, new)
    new = _settled(old, new, shape, subresource)
    metadata = dict(new["metadata"])
    for key in _KEPT:
        metadata.pop(key, None)
        if key in old["metadata"]:
            metadata[key] = old["metadata"][key]
    metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
    new = {**new, "apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
    _no_new_finalizers(kind, old, new)
    if shape.generation and _spec(old, shape) != _spec(new, shape):
        metadata["generation"] = old["metadata"].get("generation", 0) + 1
    return new


def keep_uid(kind: Kind, old: Object, new: Object) -> None:
    """A patch with another UID is invalid; in a replace, the UID is a precondition, so that it conflicts."""
    uid = (new.get("metadata") or {}).get("uid") or old["metadata"]["uid"]
    if uid != old["metadata"]["uid"]:
        problem = f'metadata.uid: Invalid value: "{uid}": field is immutable'
        raise answers.invalid(kind, old["metadata"]["name"], problem)


def _same_identity(kind: Kind, old: Object, new: Object) -> None:
    have, given = old["metadata"], new.get("metadata") or {}
    if given.get("uid", have["uid"]) != have["uid"]:
        raise answers.another(kind, have["name"], given["uid"], have["uid"])
    for field in ("name", "namespace"):
        if (given.get(field) or None) != have.get(field):
            problem = f'metadata.{field}: Invalid value: "{given.get(field, "")}": field is immutable'
            raise answers.invalid(kind, have["name"], problem)
    version = given.get("resourceVersion")
    if version and version != have["resourceVersion"]:
        raise answers.stale(kind, have["name"])


def _settled(old: Object, new: Object, shape: Shape, subresource: str) -> Object:
    """Each of the object and its status is written only through its own door."""
    if not shape.status:
        return new
    if subresource == "status":
        metadata = {**old["metadata"], "managedFields": new["metadata"].get("managedFields", [])}
        return _with_status({**old, "metadata": metadata}, new)
    return _with_status(new, old)


def _with_status(obj: Object, source: Object) -> Object:
    bare = {key: value for key, value in obj.items() if key != "status"}
    return bare | {"status": source["status"]} if "status" in source else bare


def _no_new_finalizers(kind: Kind, old: Object, new: Object) -> None:
    if "deletionTimestamp" not in old["metadata"]:
        return
    added = [one for one in finalizers(new) if one not in finalizers(old)]
    if added:
        why = "no new finalizers can be added if the object is being deleted, found new finalizers"
        told = ", ".join(f'"{one}"' for one in added)
        problem = f"metadata.finalizers: Forbidden: {why} []string{{{told}}}"
        raise answers.invalid(kind, old["metadata"]["name"], problem)


def _spec(obj: Object, shape: Shape) -> Object:
    apart = ("metadata", "apiVersion", "kind", *(("status",) if shape.status else ()))
    return {key: value for key, value in obj.items() if key not in apart}


def finalizers(obj: Object) -> list[str]:
    """Who must agree before the object goes."""
    return list(obj["metadata"].get("finalizers") or ())


def owners(obj: Object) -> list[Mapping[str, Any]]:
    """The ownerReferences of an object."""
    return list(obj["metadata"].get("ownerReferences") or ())


def is_done(obj: Object) -> bool:
    """Whether an object that was asked to go may go now: nobody holds it, and no grace is left."""
    metadata = obj["metadata"]
    asked = "deletionTimestamp" in metadata
    return asked and not finalizers(obj) and not metadata.get("deletionGracePeriodSeconds")


def doomed(obj: Object, ending: str, grace: int, propagation: str | None) -> Object:
    """`obj` after a delete whose grace (seconds) ends at `ending` (RFC 3339)."""
    metadata = dict(obj["metadata"])
    if "deletionTimestamp" not in metadata and "generation" in metadata:
        metadata["generation"] += 1
    if grace < metadata.get("deletionGracePeriodSeconds", grace + 1):
        metadata |= {"deletionTimestamp": ending, "deletionGracePeriodSeconds": grace}
    marked = {**obj, "metadata": metadata}
    if propagation is None:
        return marked
    for finalizer in _PROPAGATION.values():
        marked = released(marked, finalizer)
    wanted = _PROPAGATION.get(propagation)
    return held(marked, wanted) if wanted else marked


def in_phase(namespace: Object) -> Object:
    """A namespace that says whether it is being deleted."""
    phase = "Terminating" if "deletionTimestamp" in namespace["metadata"] else "Active"
    return {**namespace, "status": {**(namespace.get("status") or {}), "phase": phase}}


def held(obj: Object, finalizer: str) -> Object:
    """`obj` with a finalizer more."""
    metadata = obj["metadata"] | {"finalizers": [*finalizers(obj), finalizer]}
    return {**obj, "metadata": metadata}


def released(obj: Object, finalizer: str) -> Object:
    """`obj` without a finalizer."""
    kept = [one for one in finalizers(obj) if one != finalizer]
    metadata = {key: value for key, value in obj["metadata"].items() if key != "finalizers"}
    return {**obj, "metadata": metadata | {"finalizers": kept} if kept else metadata}


def grace_of(kind: Kind, obj: Object, asked: int | None) -> int:
    """Seconds until the object may go: only a pod that is on a node and has not ended gets any."""
    if kind != kinds.POD:
        return 0
    if has_ended(obj) or not obj.get("spec", {}).get("nodeName"):
        return 0
    default = obj["spec"].get("terminationGracePeriodSeconds", POD_GRACE_SECONDS)
    return int(default if asked is None else asked)
