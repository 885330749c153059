"""Older API versions and server defaults: what the API server does to an object before anybody sees it.

resource.k8s.io/v1beta1 has flat requests and wraps a device's fields in `basic`; v1beta2 and v1 are the same.
The allocator takes v1 with all defaults set, as it would get it from the API server.
"""

from collections.abc import Callable
from typing import Any

from rackloom.claim.manifests.documents import Document
from rackloom.errors import Refused

GROUP = "resource.k8s.io"
VERSIONS = ("v1", "v1beta2", "v1beta1")
_OF_REQUEST = ("name", "firstAvailable")
Fields = dict[str, Any]


def as_v1(document: Document) -> Fields:
    """The object as resource.k8s.io/v1 with the server's defaults. Refused for an unknown version."""
    version = str(document.value.get("apiVersion", ""))
    group, _, number = version.partition("/")
    if group != GROUP or number not in VERSIONS:
        raise Refused(
            f"{document.where(('apiVersion',))}: apiVersion {version!r} is not known here",
            nearest_fix=f"use {GROUP}/v1",
        )
    value = document.value
    if number == "v1beta1":
        value = _from_v1beta1(value)
    return _with_defaults(value)


def _from_v1beta1(value: Fields) -> Fields:
    if value.get("kind") == "ResourceSlice":
        return _spec_changed(value, ("spec", "devices"), _device_from_v1beta1)
    return _spec_changed(value, _requests_path(value), _request_from_v1beta1)


def _device_from_v1beta1(device: Fields) -> Fields:
    basic = device.get("basic")
    if not isinstance(basic, dict):
        return device
    return {name: field for name, field in device.items() if name != "basic"} | basic


def _request_from_v1beta1(request: Fields) -> Fields:
    """A flat request is an exact one; a request with alternatives has the same form in all versions."""
    if "firstAvailable" in request or "exactly" in request:
        return request
    exact = {name: field for name, field in request.items() if name not in _OF_REQUEST}
    return {"name": request["name"], "exactly": exact} if "name" in request else {"exactly": exact}


def _with_defaults(value: Fields) -> Fields:
    return _spec_changed(value, _requests_path(value), _request_with_defaults)


def _request_with_defaults(request: Fields) -> Fields:
    changed = dict(request)
    if isinstance(request.get("exactly"), dict):
        changed["exactly"] = _ask_with_defaults(request["exactly"])
    if isinstance(request.get("firstAvailable"), list):
        changed["firstAvailable"] = [
            _ask_with_defaults(one) if isinstance(one, dict) else one for one in request["firstAvailable"]
        ]
    return changed


def _ask_with_defaults(ask: Fields) -> Fields:
    changed = {"allocationMode": "ExactCount", **ask}
    if changed["allocationMode"] == "ExactCount":
        # The API server takes 0 for "not given".
        changed["count"] = changed.get("count") or 1
    if isinstance(ask.get("tolerations"), list):
        changed["tolerations"] = [
            {"operator": "Equal", **one} if isinstance(one, dict) else one for one in ask["tolerations"]
        ]
    return changed


def _requests_path(value: Fields) -> tuple[str, ...]:
    inner = ("spec", "devices", "requests")
    return ("spec", *inner) if value.get("kind") == "ResourceClaimTemplate" else inner


def _spec_changed(value: Fields, path: tuple[str, ...], change: Callable[[Fields], Fields]) -> Fields:
    """A copy in which `change` was applied to each mapping of the list at `path`, if there is one."""
    name, rest = path[0], path[1:]
    inner = value.get(name)
    if rest and isinstance(inner, dict):
        return value | {name: _spec_changed(inner, rest, change)}
    if not rest and isinstance(inner, list):
        return value | {name: [change(one) if isinstance(one, dict) else one for one in inner]}
    return value
