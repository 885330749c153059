"""The tables of `kubectl get`: the server computes the cells, kubectl only prints them.

A `Column` has a name, a type, a priority (above 0 it shows only with `-o wide`) and a function of the
object and the time. Most columns are JSON paths, as a CRD declares them in `additionalPrinterColumns`:
fields with escaped dots, and the first list element with a field that equals a text. Only the states of
pods, nodes, jobs and claims are computed, by the rules of Kubernetes 1.36. Ages are rounded as HumanDuration
of k8s.io/apimachinery rounds them.

`table_of` renders objects as rows (meta.k8s.io/v1 Table). A cell that cannot be computed shows
`<unknown>` and affects no other cell. A type without columns shows its name and age. `wants_table`: whether
a client prefers a table.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object, ResourceKind
from rackloom.core.domains.crds import domain_crds
from rackloom.core.gangs.crd import gang_crd
from rackloom.lab.kube import refusals

NONE, UNKNOWN = "<none>", "<unknown>"
_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86_400, 31_536_000
CellFunction = Callable[[Object, float], Any]
"""The value of an object's cell at a time (seconds since 1970)."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column. A priority above 0 shows only with `-o wide`."""

    name: str
    cell: CellFunction
    type: str = "string"
    format: str = ""
    priority: int = 0


def value_at(obj: Any, *path: str) -> Any:
    """The value at a path of field names, or None."""
    for name in path:
        obj = obj.get(name) if isinstance(obj, Mapping) else None
    return obj


# Times.


def epoch_seconds(time: str) -> float:
    """Seconds since 1970 of an RFC 3339 time."""
    return datetime.fromisoformat(time).timestamp()


def age_since(time: str | None, now: float) -> str:
    """The age of an RFC 3339 time, as kubectl's columns show it."""
    return human_duration(now - epoch_seconds(time)) if time else UNKNOWN


_DURATION_STEPS = (
    (2 * _MINUTE, 1, 0),
    (10 * _MINUTE, _MINUTE, 1),
    (3 * _HOUR, _MINUTE, 0),
    (8 * _HOUR, _HOUR, _MINUTE),
    (2 * _DAY, _HOUR, 0),
    (8 * _DAY, _DAY, _HOUR),
    (2 * _YEAR, _DAY, 0),
    (8 * _YEAR, _YEAR, _DAY),
    (float("inf"), _YEAR, 0),
)
"""Upper bound in seconds, the unit below it, and the finer unit that is added (0: none)."""
_UNIT_LETTERS = {1: "s", _MINUTE: "m", _HOUR: "h", _DAY: "d", _YEAR: "y"}


def human_duration(seconds: float) -> str:
    """A duration in at most two units, rounded as apimachinery's HumanDuration rounds it."""
    whole = max(0, int(seconds))
    unit, finer = next((unit, finer) for limit, unit, finer in _DURATION_STEPS if whole < limit)
    count, left = divmod(whole, unit)
    rest = left // finer if finer else 0
    return f"{count}{_UNIT_LETTERS[unit]}" + (f"{rest}{_UNIT_LETTERS[finer]}" if rest else "")


# Columns by JSON path.


_PATH_STEP = re.compile(
    r"""\.(?P<name>(?:[^.\[\]\\]|\\.)+)"""
    r"""|\[\?\(@\.(?P<key>\w+)\s*==\s*"(?P<value>[^"]*)"\)\]"""
)
"""A field with escaped dots, or the elements of a list that have a field equal to a text."""


def _path_cell(path: str, *, is_date: bool = False, missing: Any = None) -> CellFunction:
    steps = tuple(_PATH_STEP.finditer(path))
    if "".join(step[0] for step in steps) != path:
        raise ValueError(f"cannot follow the JSON path {path}")

    def cell(obj: Object, now: float) -> Any:
        value: Any = obj
        for step in steps:
            value = _follow_path(value, step)
        return age_since(value, now) if is_date and value else value or missing

    return cell


def _follow_path(value: Any, step: re.Match[str]) -> Any:
    if step["name"]:
        return value_at(value, re.sub(r"\\(.)", r"\1", step["name"]))
    elements = value if isinstance(value, list) else ()
    return next((element for element in elements if value_at(element, step["key"]) == step["value"]), None)


def _path(name: str, path: str, missing: Any = None, *, type_: str = "string", wide: bool = False) -> Column:
    return Column(name, _path_cell(path, missing=missing), type_, priority=int(wide))


NAME = Column("Name", lambda obj, now: str(obj["metadata"]["name"]), format="name")
AGE = Column("Age", lambda obj, now: age_since(obj["metadata"].get("creationTimestamp"), now))


def _declared_column(declared: Mapping[str, Any]) -> Column:
    """The column of one of a CRD's additionalPrinterColumns."""
    cell = _path_cell(declared["jsonPath"], is_date=declared["type"] == "date")
    priority = declared.get("priority", 0)
    return Column(declared["name"], cell, declared["type"], declared.get("format", ""), priority)


# Columns that are computed.


def _statuses(pod: Object) -> list[Object]:
    return list(value_at(pod, "status", "containerStatuses") or ())


def _is_running(status: Object) -> bool:
    return "running" in status.get("state", {})


def _ready_containers(pod: Object, now: float) -> str:
    ready = sum(1 for status in _statuses(pod) if status.get("ready") and _is_running(status))
    return f"{ready}/{len(pod['spec']['containers'])}"


def _condition_of(obj: Object, type_: str) -> Object:
    conditions: Iterable[Object] = value_at(obj, "status", "conditions") or ()
    return next((condition for condition in conditions if condition["type"] == type_), {})


def _is_true(obj: Object, type_: str) -> bool:
    return bool(_condition_of(obj, type_).get("status") == "True")


def _pod_status(pod: Object, now: float) -> str:
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating"
    reasons = [reason for status in _statuses(pod) if (reason := _why_not_running(status.get("state", {})))]
    if reasons[:1] == ["Completed"] and any(_is_running(status) for status in _statuses(pod)):
        return "Running" if _is_true(pod, "Ready") else "NotReady"
    if reasons:
        return reasons[0]
    if _condition_of(pod, "PodScheduled").get("reason") == "SchedulingGated":
        return "SchedulingGated"
    return str(value_at(pod, "status", "reason") or value_at(pod, "status", "phase") or "")


def _why_not_running(state: Object) -> str:
    """The reason why a container in this state does not run, or "" if it runs."""
    if reason := value_at(state, "waiting", "reason") or value_at(state, "terminated", "reason"):
        return str(reason)
    ended = state.get("terminated")
    if ended is None:
        return ""
    signal = ended.get("signal")
    return f"Signal:{signal}" if signal else f"ExitCode:{ended.get('exitCode', 0)}"


def _restarts(pod: Object, now: float) -> str:
    count = sum(status.get("restartCount", 0) for status in _statuses(pod))
    ends = [value_at(status, "lastState", "terminated", "finishedAt") for status in _statuses(pod)]
    last = max((end for end in ends if end), default=None)
    return f"{count} ({age_since(last, now)} ago)" if count and last else str(count)


def _gates(pod: Object, now: float) -> str:
    gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates") or ()]
    return f"{sum(_is_true(pod, gate) for gate in gates)}/{len(gates)}" if gates else NONE


def _job_status(job: Object, now: float) -> str:
    if "deletionTimestamp" in job["metadata"]:
        return "Terminating"
    return next((type_ for type_ in ("Complete", "Failed", "Suspended") if _is_true(job, type_)), "Running")


def _completions(job: Object, now: float) -> str:
    return f"{value_at(job, 'status', 'succeeded') or 0}/{job['spec'].get('completions', 1)}"


def _job_duration(job: Object, now: float) -> str:
    started, ended = value_at(job, "status", "startTime"), value_at(job, "status", "completionTime")
    if not started:
        return ""
    return human_duration((epoch_seconds(ended) if ended else now) - epoch_seconds(started))


def _containers_column(name: str, field: str) -> Column:
    def cell(obj: Object, now: float) -> str:
        containers = obj["spec"]["template"]["spec"]["containers"]
        return ",".join(container.get(field, "") for container in containers)

    return Column(name, cell, priority=1)


def _selector(obj: Object, now: float) -> str:
    labels = value_at(obj, "spec", "selector", "matchLabels") or {}
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items())) or NONE


_TEMPLATE_COLUMNS = (
    _containers_column("Containers", "name"),
    _containers_column("Images", "image"),
    Column("Selector", _selector, priority=1),
)
_ROLE = "node-role.kubernetes.io/"


def _node_status(node: Object, now: float) -> str:
    ready = _condition_of(node, "Ready").get("status")
    status = {"True": "Ready", None: "Unknown"}.get(ready, "NotReady")
    return f"{status},SchedulingDisabled" if value_at(node, "spec", "unschedulable") else status


def _roles(node: Object, now: float) -> str:
    labels = sorted(value_at(node, "metadata", "labels") or ())
    return ",".join(label.removeprefix(_ROLE) for label in labels if label.startswith(_ROLE)) or NONE


def _entry_count(obj: Object, now: float) -> int:
    return sum(len(obj.get(field) or ()) for field in ("data", "binaryData"))


def _claim_state(claim: Object, now: float) -> str:
    """The state of a claim: `pending`, or those of `deleted`, `allocated` and `reserved` that hold."""
    deleted = "deletionTimestamp" in claim["metadata"]
    allocated = bool(value_at(claim, "status", "allocation"))
    states = {
        "deleted": deleted,
        "pending": not allocated and not deleted,
        "allocated": allocated,
        "reserved": allocated and bool(value_at(claim, "status", "reservedFor")),
    }
    return ",".join(state for state, holds in states.items() if holds)


_BUILTIN_COLUMNS: Mapping[ResourceKind, tuple[Column, ...]] = {
    objects.POD: (
        NAME,
        Column("Ready", _ready_containers),
        Column("Status", _pod_status),
        Column("Restarts", _restarts),
        AGE,
        _path("IP", ".status.podIP", NONE, wide=True),
        _path("Node", ".spec.nodeName", NONE, wide=True),
        _path("Nominated Node", ".status.nominatedNodeName", NONE, wide=True),
        Column("Readiness Gates", _gates, priority=1),
    ),
    objects.JOB: (
        NAME,
        Column("Status", _job_status),
        Column("Completions", _completions),
        Column("Duration", _job_duration),
        AGE,
        *_TEMPLATE_COLUMNS,
    ),
    objects.DAEMON_SET: (
        NAME,
        _path("Desired", ".status.desiredNumberScheduled", 0, type_="integer"),
        _path("Ready", ".status.numberReady", 0, type_="integer"),
        AGE,
        *_TEMPLATE_COLUMNS,
    ),
    objects.NODE: (
        NAME,
        Column("Status", _node_status),
        Column("Roles", _roles),
        AGE,
        _path("Version", ".status.nodeInfo.kubeletVersion", ""),
        _path("Internal-IP", '.status.addresses[?(@.type=="InternalIP")].address', NONE, wide=True),
    ),
    objects.NAMESPACE: (NAME, _path("Status", ".status.phase", ""), AGE),
    objects.RESOURCE_CLAIM: (NAME, Column("State", _claim_state), AGE),
    objects.RESOURCE_SLICE: (
        NAME,
        _path("Node", ".spec.nodeName", ""),
        _path("Driver", ".spec.driver", ""),
        _path("Pool", ".spec.pool.name", ""),
        AGE,
    ),
    objects.EVENT: (
        Column("Last Seen", lambda obj, now: age_since(obj.get("lastTimestamp"), now)),
        _path("Type", ".type", ""),
        _path("Reason", ".reason", ""),
        _path("Object", ".involvedObject.name", ""),
        _path("Message", ".message", ""),
        Column("Name", NAME.cell, format="name", priority=1),
    ),
    objects.SERVICE: (NAME, _path("Type", ".spec.type", "ClusterIP"), AGE),
    objects.SECRET: (NAME, _path("Type", ".type", "Opaque"), Column("Data", _entry_count), AGE),
    objects.CONFIG_MAP: (NAME, Column("Data", _entry_count), AGE),
    objects.LEASE: (NAME, _path("Holder", ".spec.holderIdentity", ""), AGE),
}


# Rows of a table.


_META_VERSION = "meta.k8s.io/v1"
_DECLARED_COLUMNS = {
    (crd["metadata"]["name"], version["name"]): (
        NAME,
        *map(_declared_column, version["additionalPrinterColumns"]),
    )
    for crd in (*domain_crds(), gang_crd())
    for version in crd["spec"]["versions"]
    if version.get("additionalPrinterColumns")
}
"""By the name of the CRD and the version."""


def wants_table(accept: str) -> bool:
    """Whether the first media type that a client accepts is a table."""
    first = accept.split(",")[0].replace(" ", "").split(";")
    return {"as=Table", "v=v1", "g=meta.k8s.io"} <= set(first[1:])


def table_of(
    kind: ResourceKind, items: Iterable[Object], metadata: Object, now: float, included: str = "Metadata"
) -> Object:
    """The table of objects of a kind at a time (seconds since 1970). `metadata` is that of their list.

    `included`: the part of each object that accompanies its row, "None", "Metadata" or "Object". Raises
    `Rejected`.
    """
    declared = _DECLARED_COLUMNS.get((refusals.resource_name(kind), kind.version), (NAME, AGE))
    columns = _BUILTIN_COLUMNS.get(kind, declared)
    return {
        "kind": "Table",
        "apiVersion": _META_VERSION,
        "metadata": metadata,
        "columnDefinitions": [_column_definition(column) for column in columns],
        "rows": [
            {
                "cells": [_cell_value(column, obj, now) for column in columns],
                **_included_object(obj, included),
            }
            for obj in items
        ],
    }


def _cell_value(column: Column, obj: Object, now: float) -> Any:
    # The schemas are loose: a field of another type than the column expects must not fail the whole list.
    try:
        return column.cell(obj, now)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError):
        return UNKNOWN


def _column_definition(column: Column) -> Object:
    return {
        "name": column.name,
        "type": column.type,
        "format": column.format,
        "description": "",
        "priority": column.priority,
    }


def _included_object(obj: Object, included: str) -> Object:
    match included:
        case "None":
            return {}
        case "Metadata" | "":
            partial = {"kind": "PartialObjectMetadata", "apiVersion": _META_VERSION}
            return {"object": {**partial, "metadata": obj["metadata"]}}
        case "Object":
            return {"object": obj}
    raise refusals.bad_request(f'unrecognized includeObject value: "{included}"')
