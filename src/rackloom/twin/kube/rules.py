"""What the types that we use allow: functions that fill in defaults or refuse a value.

Only rules that our controllers can run into are here, with the wording of a real server where a user sees it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Kind, Object
from rackloom.twin.kube import answers, lifecycle
from rackloom.twin.kube.pod_rules import pod

_REQUESTS = "spec.devices.requests"
Rule = Callable[[Object, Object | None], Object]
"""(new, old) -> new with defaults; `old` is None for a create. Raises `Rejected`."""


def immutable_spec(kind: Kind, message: str = "field is immutable") -> Rule:
    """The spec stays as it was created."""

    def rule(new: Object, old: Object | None) -> Object:
        if old is not None and new.get("spec") != old.get("spec"):
            raise answers.invalid(kind, new["metadata"]["name"], f"spec: Invalid value: {message}")
        return new

    return rule


def required(kind: Kind, *paths: str) -> Rule:
    """Each path (dotted) leads to a value."""

    def rule(new: Object, _: Object | None) -> Object:
        missing = [path for path in paths if not _has(new, path)]
        if missing:
            told = [f"{path}: Required value" for path in missing]
            raise answers.invalid(kind, new["metadata"]["name"], *told)
        return new

    return rule


def _has(obj: Object, path: str) -> bool:
    value: object = obj
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def namespace_phase(new: Object, _: Object | None) -> Object:
    """Its phase is the server's own to say."""
    return lifecycle.in_phase(new)


def channel_mode(new: Object, _: Object | None) -> Object:
    """The CRD's default of spec.channel.allocationMode."""
    channel = new.get("spec", {}).get("channel")
    if channel is None or "allocationMode" in channel:
        return new
    spec = {**new["spec"], "channel": {**channel, "allocationMode": "Single"}}
    return {**new, "spec": spec}


def _mapping(value: Any, path: str) -> Object:
    if not isinstance(value, dict):
        raise answers.bad_request(f"{path} is not an object but: {type(value).__name__}")
    return value


def _mappings(value: Any, path: str) -> list[Object]:
    """The objects of a list; of one that is not given none."""
    if value is not None and not isinstance(value, list):
        raise answers.bad_request(f"{path} is not a list but: {type(value).__name__}")
    return [_mapping(one, f"{path}[{place}]") for place, one in enumerate(value or ())]


def _counted(request: Object) -> Object:
    asked = {"allocationMode": "ExactCount"} | request
    return {"count": 1} | asked if asked["allocationMode"] == "ExactCount" else asked


def _with_counts(claim: Object) -> Object:
    """A claim's spec with the modes and counts that its requests leave out."""
    given = _mapping(claim, "spec").get("devices")
    devices = {} if given is None else _mapping(given, "spec.devices")
    requests = []
    for request in _mappings(devices.get("requests"), _REQUESTS):
        if request.get("exactly") is not None:
            exactly = _mapping(request["exactly"], f"{_REQUESTS}.exactly")
            request = {**request, "exactly": _counted(exactly)}
        elif "firstAvailable" in request:
            ways = _mappings(request["firstAvailable"], f"{_REQUESTS}.firstAvailable")
            request = {**request, "firstAvailable": [_counted(one) for one in ways]}
        requests.append(request)
    return {**claim, "devices": {**devices, "requests": requests}} if requests else claim


def claim_counts(new: Object, _: Object | None) -> Object:
    """The API server's defaults in a claim."""
    return {**new, "spec": _with_counts(new["spec"])}


def template_counts(new: Object, _: Object | None) -> Object:
    """The same in a claim template."""
    return {**new, "spec": {**new["spec"], "spec": _with_counts(new["spec"]["spec"])}}


RULES: Mapping[Kind, tuple[Rule, ...]] = {
    kinds.NAMESPACE: (namespace_phase,),
    kinds.POD: (required(kinds.POD, "spec"), pod),
    kinds.DAEMON_SET: (required(kinds.DAEMON_SET, "spec.selector", "spec.template"),),
    kinds.RESOURCE_CLAIM: (
        required(kinds.RESOURCE_CLAIM, "spec"),
        claim_counts,
        immutable_spec(kinds.RESOURCE_CLAIM),
    ),
    kinds.RESOURCE_CLAIM_TEMPLATE: (
        required(kinds.RESOURCE_CLAIM_TEMPLATE, "spec.spec"),
        template_counts,
        immutable_spec(kinds.RESOURCE_CLAIM_TEMPLATE),
    ),
    kinds.COMPUTE_DOMAIN: (
        channel_mode,
        immutable_spec(kinds.COMPUTE_DOMAIN, "A computeDomain.spec is immutable"),
    ),
}
"""The rules every fake server has. More are appended to `FakeKube.rules`."""
