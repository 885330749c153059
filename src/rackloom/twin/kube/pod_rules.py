"""What becomes of a pod that is created or changed.

The rules are those of Kubernetes 1.36 (ValidatePodUpdate, and the admission plugin DefaultTolerationSeconds).
A node is given by a binding alone, never by a change. A pod that waits at a gate can be steered, but only to
fewer nodes than before.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Object
from rackloom.twin.kube import answers

_FROZEN = (
    "spec: Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
    "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to "
    "existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was "
    "previously negative)"
)
_UNREADABLE = 'Pod in version "v1" cannot be handled as a Pod'
_CONTAINERS = ("containers", "initContainers")
_TERMS = "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
_UNWELL = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_UNWELL_SECONDS = 300
"""How long a pod stays on a node that is unwell, unless it says otherwise."""


def pod(new: Object, old: Object | None) -> Object:
    """A pod as it is stored. Raises `Rejected`."""
    _check_shape(new["spec"])
    new = {**new, "spec": _patient(new["spec"])}
    if old is None:
        return _created(new)
    problems = list(_problems(old["spec"], new["spec"]))
    if problems:
        raise answers.invalid(kinds.POD, new["metadata"]["name"], *problems)
    return new


def _check_shape(spec: Any) -> None:
    """What a real server cannot read into its own types is refused before anything looks at it."""
    if not isinstance(spec, dict):
        raise answers.bad_request(f"{_UNREADABLE}: spec is no object")
    for which in (*_CONTAINERS, "tolerations", "schedulingGates"):
        value = spec.get(which)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(one, dict) for one in value)
        ):
            raise answers.bad_request(f"{_UNREADABLE}: spec.{which} is no list of objects")


def _patient(spec: Object) -> Object:
    tolerations = list(spec.get("tolerations") or ())
    missing = [key for key in _UNWELL if not any(_waits_out(key, one) for one in tolerations)]
    added = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _UNWELL_SECONDS}
        for key in missing
    ]
    return {**spec, "tolerations": tolerations + added} if added else spec


def _waits_out(key: str, toleration: Object) -> bool:
    return toleration.get("key") in (key, "", None) and toleration.get("effect") in ("NoExecute", "", None)


def _created(new: Object) -> Object:
    spec, status = new["spec"], {"phase": "Pending"}
    if not spec.get("schedulingGates"):
        return {**new, "status": status}
    if spec.get("nodeName"):
        why = "cannot be set until all schedulingGates have been cleared"
        raise answers.invalid(kinds.POD, new["metadata"]["name"], f"spec.nodeName: Forbidden: {why}")
    gated = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "SchedulingGated",
        "message": "Scheduling is blocked due to non-empty scheduling gates",
        "lastTransitionTime": new["metadata"]["creationTimestamp"],
    }
    return {**new, "status": status | {"conditions": [gated]}}


def _problems(before: Object, after: Object) -> Iterator[str]:
    for which in _CONTAINERS:
        if len(before.get(which) or ()) != len(after.get(which) or ()):
            yield f"spec.{which}: Forbidden: pod updates may not add or remove containers"
            return
    yield from _of_deadline(before.get("activeDeadlineSeconds"), after.get("activeDeadlineSeconds"))
    yield from _of_tolerations(before, after)
    yield from _of_gates(before, after)
    if before.get("schedulingGates"):
        yield from _of_selector(before.get("nodeSelector") or {}, after.get("nodeSelector") or {})
        yield from _of_affinity(_terms(before), _terms(after))
    if _fixed(before, before, after) != _fixed(after, before, after):
        yield _FROZEN


def _of_deadline(before: int | None, after: int | None) -> Iterator[str]:
    if before is not None and after is None:
        why = "Invalid value: null: must not update from a positive integer to nil value"
        yield f"spec.activeDeadlineSeconds: {why}"
    elif before is not None and after is not None and after > before:
        why = f"Invalid value: {after}: must be less than or equal to previous value"
        yield f"spec.activeDeadlineSeconds: {why}"


def _of_tolerations(before: Object, after: Object) -> Iterator[str]:
    kept = [_endless(one) for one in after.get("tolerations") or ()]
    if any(_endless(one) not in kept for one in before.get("tolerations") or ()):
        why = "existing toleration can not be modified except its tolerationSeconds"
        yield f"spec.tolerations: Forbidden: {why}"


def _endless(toleration: Object) -> Object:
    return {key: value for key, value in toleration.items() if value and key != "tolerationSeconds"}


def _of_gates(before: Object, after: Object) -> Iterator[str]:
    had = {gate["name"] for gate in before.get("schedulingGates") or ()}
    for index, gate in enumerate(after.get("schedulingGates") or ()):
        if gate["name"] not in had:
            why = f"only deletion is allowed, but found new scheduling gate '{gate['name']}'"
            yield f"spec.schedulingGates[{index}].name: Forbidden: {why}"


def _of_selector(before: Object, after: Object) -> Iterator[str]:
    if not before.items() <= after.items():
        why = "only additions to spec.nodeSelector are allowed (no mutations or deletions)"
        yield f"spec.nodeSelector: Invalid value: {_told(after)}: {why}"


def _of_affinity(before: list[Object], after: list[Object]) -> Iterator[str]:
    """Terms are alternatives, so none may come or go; each may ask for more than it did."""
    if before and len(before) != len(after):
        why = "no additions/deletions to non-empty NodeSelectorTerms list are allowed"
        yield f"{_TERMS}: Invalid value: {_told(after) if after else 'null'}: {why}"
        return
    for index, (had, has) in enumerate(zip(before, after, strict=False)):
        if not _narrows(had, has):
            why = "only additions are allowed (no mutations or deletions)"
            yield f"{_TERMS}[{index}]: Invalid value: {_told(has)}: {why}"


def _narrows(before: Object, after: Object) -> bool:
    had, has = (
        [_bare(term.get(which) or []) for which in ("matchExpressions", "matchFields")]
        for term in (before, after)
    )
    # A term without requirements matches no node, so adding to it would widen it.
    if not any(had):
        return not any(has)
    return all(now[: len(then)] == then for then, now in zip(had, has, strict=True))


def _terms(spec: Object) -> list[Object]:
    required = _node_affinity(spec).get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return list(required.get("nodeSelectorTerms") or ())


def _node_affinity(spec: Object) -> Object:
    found: Object = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    return found


def _fixed(spec: Object, before: Object, after: Object) -> Any:
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
        kept[which] = [{**one, "image": ""} for one in spec.get(which) or ()]
    return _bare(kept)


def _bare(value: Any) -> Any:
    """Without what is empty: to the server's own types, that and a field that is not there are one."""
    if isinstance(value, dict):
        bare = {key: _bare(inner) for key, inner in value.items()}
        return {key: inner for key, inner in bare.items() if inner not in (None, "", [], {})}
    return [_bare(one) for one in value] if isinstance(value, list) else value


def _told(value: Any) -> str:
    return msgspec.json.encode(value).decode()
