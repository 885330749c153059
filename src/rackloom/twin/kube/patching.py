"""A patch as HTTP brings it: which kind of patch it is, and what it is asked to change."""

from typing import Any

from rackloom.claim.kube.api import Kind
from rackloom.twin.kube import answers, patches, strategic
from rackloom.twin.kube.bodies import unknown_format
from rackloom.twin.kube.merge_keys import MERGE_KEYS
from rackloom.twin.kube.ownership import clone
from rackloom.twin.kube.server import Change

APPLY = "application/apply-patch+yaml"
_JSON, _MERGE = "application/json-patch+json", "application/merge-patch+json"
_STRATEGIC = "application/strategic-merge-patch+json"


def change_of(kind: Kind, content_type: str, patch: Any) -> Change:
    """What a patch of this type does to an object.

    Raises:
        Rejected: (400) it is no patch.
        KubeError: (415) objects of this kind take none of this type: custom ones no strategic merge patch.
    """
    if content_type == _JSON:
        operations = _checked(patch, list)
        return lambda old: patches.json_patch(old, clone(operations))
    if content_type == _MERGE:
        fields = _checked(patch, dict)
        return lambda old: patches.merge(old, clone(fields))
    if content_type == _STRATEGIC and kind in MERGE_KEYS:
        fields, keys = _checked(patch, dict), MERGE_KEYS[kind]
        return lambda old: strategic.merge(old, clone(fields), keys)
    raise unknown_format(content_type)


def _checked(patch: Any, type_: type) -> Any:
    if not isinstance(patch, type_):
        raise answers.bad_request(f"the body of the request is no patch: {type(patch).__name__}")
    return patch
