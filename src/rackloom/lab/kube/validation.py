"""Validation and defaulting of the types that we use, as rules `(new, old) -> object`.

Only rules that our controllers or users can run into are here, with the wording of a real server if a user
sees it. `RULES` lists them by kind. A test or a scenario may append more.

Pods follow ValidatePodUpdate of Kubernetes 1.36. A pod's spec is immutable but for images, deadlines,
added tolerations and gates that are removed. While it is gated, its node selector and affinity may be
narrowed but not widened: terms are alternatives, so none may be added or removed. A binding sets the
node, and an update never does. Every pod gets the default tolerations for not-ready and unreachable nodes
(DefaultTolerationSeconds).

Claims get default allocation modes and counts. The specs of claims, templates and ComputeDomains are
immutable.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object, ResourceKind
from rackloom.core.cluster.pods import REQUIRED
from rackloom.lab.kube import objects as kube_objects
from rackloom.lab.kube import refusals
from rackloom.lab.kube.managed_fields import ABSENT, find_value

# Pods.


_FROZEN = (
    "spec: Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
    "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to "
    "existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was "
    "previously negative)"
)
_UNREADABLE = 'Pod in version "v1" cannot be handled as a Pod'
_CONTAINERS = ("containers", "initContainers")
_TERMS = f"spec.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms"
_UNWELL_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_UNWELL_SECONDS = 300
"""How long a pod tolerates a node that is not ready or unreachable, by default."""


def pod_rule(new: Object, old: Object | None) -> Object:
    """A pod as it is stored. Raises `Rejected`."""
    # Refuse a body that a real server cannot decode into its types.
    spec = new["spec"]
    if not isinstance(spec, dict):
        raise refusals.bad_request(f"{_UNREADABLE}: spec is no object")
    for which in (*_CONTAINERS, "tolerations", "schedulingGates"):
        value = spec.get(which)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(item, dict) for item in value)
        ):
            raise refusals.bad_request(f"{_UNREADABLE}: spec.{which} is no list of objects")
    new = {**new, "spec": _with_default_tolerations(new["spec"])}
    if old is None:
        return _new_pod(new)
    problems = list(_update_problems(old["spec"], new["spec"]))
    if problems:
        raise refusals.invalid(objects.POD, new["metadata"]["name"], *problems)
    return new


def _with_default_tolerations(spec: Object) -> Object:
    tolerations = list(spec.get("tolerations") or ())
    missing = [
        key for key in _UNWELL_TAINTS if not any(_covers_taint(key, toleration) for toleration in tolerations)
    ]
    added = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _UNWELL_SECONDS}
        for key in missing
    ]
    return {**spec, "tolerations": tolerations + added} if added else spec


def _covers_taint(key: str, toleration: Object) -> bool:
    return toleration.get("key") in (key, "", None) and toleration.get("effect") in ("NoExecute", "", None)


def _new_pod(new: Object) -> Object:
    spec, status = new["spec"], {"phase": "Pending"}
    if not spec.get("schedulingGates"):
        return {**new, "status": status}
    if spec.get("nodeName"):
        why = "cannot be set until all schedulingGates have been cleared"
        raise refusals.invalid(objects.POD, new["metadata"]["name"], f"spec.nodeName: Forbidden: {why}")
    gated = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "SchedulingGated",
        "message": "Scheduling is blocked due to non-empty scheduling gates",
        "lastTransitionTime": new["metadata"]["creationTimestamp"],
    }
    return {**new, "status": status | {"conditions": [gated]}}


def _update_problems(before: Object, after: Object) -> Iterator[str]:
    for which in _CONTAINERS:
        if len(before.get(which) or ()) != len(after.get(which) or ()):
            yield f"spec.{which}: Forbidden: pod updates may not add or remove containers"
            return
    yield from _of_deadline(before.get("activeDeadlineSeconds"), after.get("activeDeadlineSeconds"))
    kept = [_endless(toleration) for toleration in after.get("tolerations") or ()]
    if any(_endless(toleration) not in kept for toleration in before.get("tolerations") or ()):
        why = "existing toleration can not be modified except its tolerationSeconds"
        yield f"spec.tolerations: Forbidden: {why}"
    had = {gate["name"] for gate in before.get("schedulingGates") or ()}
    for index, gate in enumerate(after.get("schedulingGates") or ()):
        if gate["name"] not in had:
            why = f"only deletion is allowed, but found new scheduling gate '{gate['name']}'"
            yield f"spec.schedulingGates[{index}].name: Forbidden: {why}"
    if before.get("schedulingGates"):
        yield from _of_selector(before.get("nodeSelector") or {}, after.get("nodeSelector") or {})
        yield from _of_affinity(_affinity_terms(before), _affinity_terms(after))
    if _immutable_part(before, before, after) != _immutable_part(after, before, after):
        yield _FROZEN


def _of_deadline(before: int | None, after: int | None) -> Iterator[str]:
    path = "spec.activeDeadlineSeconds: Invalid value"
    if before is not None and after is None:
        yield f"{path}: null: must not update from a positive integer to nil value"
    elif before is not None and after is not None and after > before:
        yield f"{path}: {after}: must be less than or equal to previous value"


def _endless(toleration: Object) -> Object:
    return {key: value for key, value in toleration.items() if value and key != "tolerationSeconds"}


def _of_selector(before: Object, after: Object) -> Iterator[str]:
    if not before.items() <= after.items():
        why = "only additions to spec.nodeSelector are allowed (no mutations or deletions)"
        yield f"spec.nodeSelector: Invalid value: {_json_text(after)}: {why}"


def _of_affinity(before: list[Object], after: list[Object]) -> Iterator[str]:
    """Terms are alternatives, so none may be added or removed. Each may get more requirements."""
    if before and len(before) != len(after):
        why = "no additions/deletions to non-empty NodeSelectorTerms list are allowed"
        yield f"{_TERMS}: Invalid value: {_json_text(after) if after else 'null'}: {why}"
        return
    for index, (had, has) in enumerate(zip(before, after, strict=False)):
        if not _narrows(had, has):
            why = "only additions are allowed (no mutations or deletions)"
            yield f"{_TERMS}[{index}]: Invalid value: {_json_text(has)}: {why}"


def _narrows(before: Object, after: Object) -> bool:
    had, has = (
        [_without_empty(term.get(which) or []) for which in ("matchExpressions", "matchFields")]
        for term in (before, after)
    )
    # A term without requirements matches no node, so adding to it would widen it.
    if not any(had):
        return not any(has)
    return all(now[: len(then)] == then for then, now in zip(had, has, strict=True))


def _affinity_terms(spec: Object) -> list[Object]:
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    return list((affinity.get(REQUIRED) or {}).get("nodeSelectorTerms") or ())


def _immutable_part(spec: Object, before: Object, after: Object) -> Any:
    """The part of `spec` that is the same before and after a change that is allowed."""
    free = {"tolerations", "schedulingGates", "activeDeadlineSeconds"}
    grace = "terminationGracePeriodSeconds"
    if before.get(grace, 0) < 0 and after.get(grace) == 1:
        free.add(grace)
    kept = {key: value for key, value in spec.items() if key not in free}
    if before.get("schedulingGates"):
        kept.pop("nodeSelector", None)
        kept["affinity"] = {**(spec.get("affinity") or {}), "nodeAffinity": None}
    for which in _CONTAINERS:
        kept[which] = [{**container, "image": ""} for container in spec.get(which) or ()]
    return _without_empty(kept)


def _without_empty(value: Any) -> Any:
    """The value without empty fields: the server's types do not distinguish empty from absent."""
    if isinstance(value, dict):
        bare = {key: _without_empty(inner) for key, inner in value.items()}
        return {key: inner for key, inner in bare.items() if inner not in (None, "", [], {})}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value


def _json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


# All other types, and the table of rules.


_REQUESTS = "spec.devices.requests"
ObjectRule = Callable[[Object, Object | None], Object]
"""(new, old) -> new with defaults. `old` is None for a create. Raises `Rejected`."""


def immutable_spec(kind: ResourceKind, message: str = "field is immutable") -> ObjectRule:
    """The spec stays as it was created."""

    def rule(new: Object, old: Object | None) -> Object:
        if old is not None and new.get("spec") != old.get("spec"):
            raise refusals.invalid(kind, new["metadata"]["name"], f"spec: Invalid value: {message}")
        return new

    return rule


def require_paths(kind: ResourceKind, *paths: str) -> ObjectRule:
    """Each path (dotted) leads to a value."""
    names = {path: tuple(f"f:{name}" for name in path.split(".")) for path in paths}

    def rule(new: Object, _: Object | None) -> Object:
        missing = [path for path in paths if find_value(new, names[path]) is ABSENT]
        if missing:
            problems = [f"{path}: Required value" for path in missing]
            raise refusals.invalid(kind, new["metadata"]["name"], *problems)
        return new

    return rule


def dated_taints(now: Callable[[], str]) -> ObjectRule:
    """Taints of a slice's devices that say no time get the present one, as a real server adds it."""

    def rule(new: Object, _: Object | None) -> Object:
        devices = new.get("spec", {}).get("devices")
        if not any(device.get("taints") for device in devices or ()):
            return new
        dated = [
            {**device, "taints": [{"timeAdded": now(), **taint} for taint in device["taints"]]}
            if device.get("taints")
            else device
            for device in devices
        ]
        return {**new, "spec": {**new["spec"], "devices": dated}}

    return rule


def channel_mode(new: Object, _: Object | None) -> Object:
    """The CRD's default of spec.channel.allocationMode."""
    channel = new.get("spec", {}).get("channel")
    if channel is None or "allocationMode" in channel:
        return new
    spec = {**new["spec"], "channel": {**channel, "allocationMode": "Single"}}
    return {**new, "spec": spec}


def _mapping(value: Any, path: str) -> Object:
    if not isinstance(value, dict):
        raise refusals.bad_request(f"{path} is not an object but: {type(value).__name__}")
    return value


def _mappings(value: Any, path: str) -> list[Object]:
    """The objects of a list, or none if it is not given."""
    if value is not None and not isinstance(value, list):
        raise refusals.bad_request(f"{path} is not a list but: {type(value).__name__}")
    return [_mapping(item, f"{path}[{index}]") for index, item in enumerate(value or ())]


def _counted(request: Object) -> Object:
    counted = {"allocationMode": "ExactCount"} | request
    return {"count": 1} | counted if counted["allocationMode"] == "ExactCount" else counted


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
            alternatives = _mappings(request["firstAvailable"], f"{_REQUESTS}.firstAvailable")
            request = {**request, "firstAvailable": [_counted(alternative) for alternative in alternatives]}
        requests.append(request)
    return {**claim, "devices": {**devices, "requests": requests}} if requests else claim


RULES: Mapping[ResourceKind, tuple[ObjectRule, ...]] = {
    objects.NAMESPACE: (lambda new, _: kube_objects.with_namespace_phase(new),),
    objects.POD: (require_paths(objects.POD, "spec"), pod_rule),
    objects.DAEMON_SET: (require_paths(objects.DAEMON_SET, "spec.selector", "spec.template"),),
    objects.DEPLOYMENT: (require_paths(objects.DEPLOYMENT, "spec.selector", "spec.template"),),
    objects.RESOURCE_CLAIM: (
        require_paths(objects.RESOURCE_CLAIM, "spec"),
        lambda new, _: {**new, "spec": _with_counts(new["spec"])},
        immutable_spec(objects.RESOURCE_CLAIM),
    ),
    objects.RESOURCE_CLAIM_TEMPLATE: (
        require_paths(objects.RESOURCE_CLAIM_TEMPLATE, "spec.spec"),
        lambda new, _: {**new, "spec": {**new["spec"], "spec": _with_counts(new["spec"]["spec"])}},
        immutable_spec(objects.RESOURCE_CLAIM_TEMPLATE),
    ),
    objects.COMPUTE_DOMAIN: (
        channel_mode,
        immutable_spec(objects.COMPUTE_DOMAIN, "A computeDomain.spec is immutable"),
    ),
}
"""The rules every fake server has. More are appended to `FakeKube.rules`."""
