"""An object that kubectl applied itself, and now has the server apply.

What the client applied stands in an annotation. Until kubectl's first server-side apply, the fields that it
names are kubectl's own and cause no conflict; the annotation is kept up to date for clients that go back.
Both are rules of the API server (k8s.io/apimachinery, managedfields: last-applied manager and updater).
"""

import msgspec

from rackloom.claim.kube.api import Object
from rackloom.twin.kube import fields
from rackloom.twin.kube.fields import Fields
from rackloom.twin.kube.shapes import Shape

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_KUBECTL = "kubectl"


def handed_over(obj: Object, manager: str, shape: Shape) -> Fields:
    """The fields that a first server-side apply by this manager may take from whoever has them."""
    told = _told(obj)
    if manager != _KUBECTL or told is None:
        return frozenset()
    try:
        return fields.owned_fields(msgspec.json.decode(told), shape)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return frozenset()


def remembered(merged: Object, applied: Object, manager: str) -> Object:
    """`merged` with what was applied in its annotation, where it has that and kubectl applied."""
    if manager != _KUBECTL or _told(merged) is None:
        return merged
    metadata, told = merged["metadata"], msgspec.json.encode(applied, order="sorted").decode() + "\n"
    return {
        **merged,
        "metadata": {**metadata, "annotations": {**metadata["annotations"], LAST_APPLIED: told}},
    }


def _told(obj: Object) -> str | None:
    annotations: dict[str, str] = obj["metadata"].get("annotations") or {}
    return annotations.get(LAST_APPLIED)
