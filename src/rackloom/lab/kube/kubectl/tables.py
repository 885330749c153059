"""The tables of `kubectl get`: the columns of built-in types as Kubernetes 1.36 prints them.

`table_of` renders objects as rows. A cell that cannot be computed shows `<unknown>` and costs nothing
else. A type without columns of its own shows its name and age. `wants_table` tells whether a client
accepts a table first.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rackloom.core.domains.crds import domain_crds
from rackloom.core.gangs.record import gang_crd
from rackloom.core.kubernetes import objects
from rackloom.core.kubernetes.objects import Object, ResourceKind
from rackloom.lab.kube import refusals
from rackloom.lab.kube.kubectl.columns import (
    AGE,
    NAME,
    NONE,
    UNKNOWN,
    Column,
    age_since,
    declared_columns,
    epoch_seconds,
    human_duration,
    labels_text,
    text_column,
    value_at,
    wide_column,
)

# Pods, Jobs and DaemonSets.


_DELETED = "Terminating"


def _statuses(pod: Object) -> list[Object]:
    return list(value_at(pod, "status", "containerStatuses") or ())


def _ready_containers(pod: Object, now: float) -> str:
    ready = sum(
        1 for status in _statuses(pod) if status.get("ready") and "running" in status.get("state", {})
    )
    return f"{ready}/{len(pod['spec']['containers'])}"


def _condition_of(obj: Object, type_: str) -> Object:
    conditions: Iterable[Object] = value_at(obj, "status", "conditions") or ()
    return next((condition for condition in conditions if condition["type"] == type_), {})


def _pod_status(pod: Object, now: float) -> str:
    if "deletionTimestamp" in pod["metadata"]:
        return _DELETED
    told = [reason for status in _statuses(pod) if (reason := _why_not_running(status.get("state", {})))]
    if told[:1] == ["Completed"] and any("running" in status.get("state", {}) for status in _statuses(pod)):
        return "Running" if _condition_of(pod, "Ready").get("status") == "True" else "NotReady"
    if told:
        return told[0]
    if _condition_of(pod, "PodScheduled").get("reason") == "SchedulingGated":
        return "SchedulingGated"
    return str(value_at(pod, "status", "reason") or value_at(pod, "status", "phase") or "")


def _why_not_running(state: Object) -> str:
    """Why a container (its state) does not run; "" where it does."""
    if reason := value_at(state, "waiting", "reason") or value_at(state, "terminated", "reason"):
        return str(reason)
    ended = state.get("terminated")
    if ended is None:
        return ""
    signal = ended.get("signal")
    return f"Signal:{signal}" if signal else f"ExitCode:{ended.get('exitCode', 0)}"


def _restarts(pod: Object, now: float) -> str:
    count = sum(status.get("restartCount", 0) for status in _statuses(pod))
    ends = [
        end for status in _statuses(pod) if (end := value_at(status, "lastState", "terminated", "finishedAt"))
    ]
    return f"{count} ({age_since(max(ends), now)} ago)" if count and ends else str(count)


def _gates(pod: Object, now: float) -> str:
    gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates") or ()]
    if not gates:
        return NONE
    return f"{sum(1 for gate in gates if _condition_of(pod, gate).get('status') == 'True')}/{len(gates)}"


PODS = (
    NAME,
    Column("Ready", _ready_containers),
    Column("Status", _pod_status),
    Column("Restarts", _restarts),
    AGE,
    wide_column(text_column("IP", "status", "podIP", without=NONE)),
    wide_column(text_column("Node", "spec", "nodeName", without=NONE)),
    wide_column(text_column("Nominated Node", "status", "nominatedNodeName", without=NONE)),
    wide_column(Column("Readiness Gates", _gates)),
)


def _containers_column(name: str) -> Column:
    def cell(obj: Object, now: float) -> str:
        return ",".join(
            container.get(name, "") for container in obj["spec"]["template"]["spec"]["containers"]
        )

    return Column("Containers" if name == "name" else "Images", cell, priority=1)


def _selector(obj: Object, now: float) -> str:
    return labels_text(value_at(obj, "spec", "selector", "matchLabels"))


_TEMPLATE_COLUMNS = (
    _containers_column("name"),
    _containers_column("image"),
    Column("Selector", _selector, priority=1),
)

_JOB_ENDS = ("Complete", "Failed")
_JOB_STATES = ("Suspended", "FailureTarget", "SuccessCriteriaMet")


def _job_status(job: Object, now: float) -> str:
    def holds(type_: str) -> bool:
        return _condition_of(job, type_).get("status") == "True"

    ended = next((type_ for type_ in _JOB_ENDS if holds(type_)), None)
    if ended:
        return ended
    if "deletionTimestamp" in job["metadata"]:
        return _DELETED
    return next((type_ for type_ in _JOB_STATES if holds(type_)), "Running")


def _completions(job: Object, now: float) -> str:
    done, wanted = value_at(job, "status", "succeeded") or 0, job["spec"].get("completions")
    if wanted is not None:
        return f"{done}/{wanted}"
    side_by_side = job["spec"].get("parallelism", 1)
    return f"{done}/1 of {side_by_side}" if side_by_side > 1 else f"{done}/1"


def _job_duration(job: Object, now: float) -> str:
    begun, ended = value_at(job, "status", "startTime"), value_at(job, "status", "completionTime")
    if not begun:
        return ""
    return human_duration(epoch_seconds(ended) - epoch_seconds(begun)) if ended else age_since(begun, now)


JOBS = (
    NAME,
    Column("Status", _job_status),
    Column("Completions", _completions),
    Column("Duration", _job_duration),
    AGE,
    *_TEMPLATE_COLUMNS,
)


def _status_count_column(name: str, of: str) -> Column:
    return Column(name, lambda obj, now: value_at(obj, "status", of) or 0, "integer")


def _node_selector(obj: Object, now: float) -> Any:
    return labels_text(value_at(obj, "spec", "template", "spec", "nodeSelector"))


DAEMON_SETS = (
    NAME,
    _status_count_column("Desired", "desiredNumberScheduled"),
    _status_count_column("Current", "currentNumberScheduled"),
    _status_count_column("Ready", "numberReady"),
    _status_count_column("Up-to-date", "updatedNumberScheduled"),
    _status_count_column("Available", "numberAvailable"),
    Column("Node Selector", _node_selector),
    AGE,
    *_TEMPLATE_COLUMNS,
)


# Other built-in types.


_ROLE = "node-role.kubernetes.io/"


def _node_status(node: Object, now: float) -> str:
    conditions = value_at(node, "status", "conditions") or ()
    ready = next((condition["status"] for condition in conditions if condition["type"] == "Ready"), None)
    told = {"True": "Ready", None: "Unknown"}.get(ready, "NotReady")
    return f"{told},SchedulingDisabled" if value_at(node, "spec", "unschedulable") else told


def _roles(node: Object, now: float) -> str:
    found = (node["metadata"].get("labels") or {}).keys()
    return ",".join(sorted(one.removeprefix(_ROLE) for one in found if one.startswith(_ROLE))) or NONE


def _address_column(name: str, type_: str) -> Column:
    def cell(node: Object, now: float) -> str:
        found = value_at(node, "status", "addresses") or ()
        return next((one["address"] for one in found if one["type"] == type_), NONE)

    return Column(name, cell, priority=1)


def _kernel(node: Object, now: float) -> str:
    version, machine = (
        value_at(node, "status", "nodeInfo", one) for one in ("kernelVersion", "architecture")
    )
    return f"{version} ({machine})" if version and machine else version or UNKNOWN


def _node_info_column(name: str, field: str) -> Column:
    return wide_column(text_column(name, "status", "nodeInfo", field, without=UNKNOWN))


_NODES = (
    NAME,
    Column("Status", _node_status),
    Column("Roles", _roles),
    AGE,
    text_column("Version", "status", "nodeInfo", "kubeletVersion"),
    _address_column("Internal-IP", "InternalIP"),
    _address_column("External-IP", "ExternalIP"),
    _node_info_column("OS-Image", "osImage"),
    Column("Kernel-Version", _kernel, priority=1),
    _node_info_column("Container-Runtime", "containerRuntimeVersion"),
)


def _claim_state(claim: Object, now: float) -> str:
    """The words of a claim: `pending`, `allocated,reserved`, and `deleted` before what is still held."""
    deleted = "deletionTimestamp" in claim["metadata"]
    allocated = bool(value_at(claim, "status", "allocation"))
    words = {
        "deleted": deleted,
        "pending": not allocated and not deleted,
        "allocated": allocated,
        "reserved": allocated and bool(value_at(claim, "status", "reservedFor")),
    }
    return ",".join(word for word, holds in words.items() if holds)


def _involved_object(event: Object, now: float) -> str:
    about = event.get("involvedObject") or {}
    return f"{about.get('kind', '').lower()}/{about.get('name', '')}"


def _source(event: Object, now: float) -> str:
    component, host = value_at(event, "source", "component"), value_at(event, "source", "host")
    told = (component or event.get("reportingComponent"), host or event.get("reportingInstance"))
    return ", ".join(one for one in told if one)


def _time_column(name: str, *fields: str, priority: int = 0) -> Column:
    def cell(event: Object, now: float) -> str:
        return age_since(next((event[field] for field in fields if event.get(field)), None), now)

    return Column(name, cell, priority=priority)


_EVENTS = (
    _time_column("Last Seen", "lastTimestamp", "eventTime", "firstTimestamp"),
    text_column("Type", "type"),
    text_column("Reason", "reason"),
    Column("Object", _involved_object),
    wide_column(text_column("Subobject", "involvedObject", "fieldPath")),
    Column("Source", _source, priority=1),
    Column("Message", lambda event, now: str(event.get("message", "")).strip()),
    _time_column("First Seen", "firstTimestamp", "eventTime", priority=1),
    Column("Count", lambda event, now: event.get("count") or 1, priority=1),
    Column("Name", NAME.cell, format="name", priority=1),
)


def _port(port: Object) -> str:
    number = f"{port['port']}:{port['nodePort']}" if port.get("nodePort") else str(port["port"])
    return f"{number}/{port.get('protocol', 'TCP')}"


def _ports(service: Object, now: float) -> str:
    return ",".join(_port(one) for one in value_at(service, "spec", "ports") or ()) or NONE


_SERVICES = (
    NAME,
    text_column("Type", "spec", "type", without="ClusterIP"),
    text_column("Cluster-IP", "spec", "clusterIP", without=NONE),
    Column("External-IP", lambda obj, now: ",".join(value_at(obj, "spec", "externalIPs") or ()) or NONE),
    Column("Port(s)", _ports),
    AGE,
    Column("Selector", lambda obj, now: labels_text(value_at(obj, "spec", "selector")), priority=1),
)


_ENDPOINTS_SHOWN = 3
_UNSET = "<unset>"


def _first_few(values: Sequence[object]) -> str:
    more = len(values) - _ENDPOINTS_SHOWN
    told = ",".join(str(value) for value in values[:_ENDPOINTS_SHOWN]) or _UNSET
    return f"{told} + {more} more..." if more > 0 else told


def _endpoint_ports(obj: Object, now: float) -> str:
    return _first_few([port.get("port") or port.get("name") or "*" for port in obj.get("ports") or ()])


def _endpoint_addresses(obj: Object, now: float) -> str:
    endpoints = obj.get("endpoints") or ()
    return _first_few([address for endpoint in endpoints for address in endpoint.get("addresses") or ()])


_ENDPOINTS = (
    NAME,
    text_column("AddressType", "addressType"),
    Column("Ports", _endpoint_ports),
    Column("Endpoints", _endpoint_addresses),
    AGE,
)


def _count_column(name: str, *fields: str, type_: str = "string") -> Column:
    return Column(name, lambda obj, now: sum(len(obj.get(field) or ()) for field in fields), type_)


_WEBHOOKS = (NAME, _count_column("Webhooks", "webhooks", type_="integer"), AGE)

BUILTIN_COLUMNS: Mapping[ResourceKind, tuple[Column, ...]] = {
    objects.POD: PODS,
    objects.JOB: JOBS,
    objects.DAEMON_SET: DAEMON_SETS,
    objects.NODE: _NODES,
    objects.NAMESPACE: (NAME, text_column("Status", "status", "phase"), AGE),
    objects.RESOURCE_CLAIM: (NAME, Column("State", _claim_state), AGE),
    objects.RESOURCE_SLICE: (
        NAME,
        text_column("Node", "spec", "nodeName"),
        text_column("Driver", "spec", "driver"),
        text_column("Pool", "spec", "pool", "name"),
        AGE,
    ),
    objects.ENDPOINT_SLICE: _ENDPOINTS,
    objects.EVENT: _EVENTS,
    objects.SERVICE: _SERVICES,
    objects.SECRET: (NAME, text_column("Type", "type", without="Opaque"), _count_column("Data", "data"), AGE),
    objects.CONFIG_MAP: (NAME, _count_column("Data", "data", "binaryData"), AGE),
    objects.NETWORK_POLICY: (
        NAME,
        Column(
            "Pod-Selector", lambda obj, now: labels_text(value_at(obj, "spec", "podSelector", "matchLabels"))
        ),
        AGE,
    ),
    objects.LEASE: (NAME, text_column("Holder", "spec", "holderIdentity"), AGE),
    objects.CRD: (NAME, Column("Created At", lambda obj, now: obj["metadata"]["creationTimestamp"], "date")),
    objects.MUTATING_WEBHOOK: _WEBHOOKS,
    objects.VALIDATING_WEBHOOK: _WEBHOOKS,
}
"""Those that show more than a name and an age."""


# Rows of a table (meta.k8s.io/v1 Table).


_META_VERSION = "meta.k8s.io/v1"
_ALL_COLUMNS: Mapping[ResourceKind, tuple[Column, ...]] = {
    **BUILTIN_COLUMNS,
    **declared_columns((*domain_crds(), gang_crd())),
}


def wants_table(accept: str) -> bool:
    """Whether the first thing that a client accepts is a table."""
    first = accept.split(",")[0].replace(" ", "").split(";")
    return {"as=Table", "v=v1", "g=meta.k8s.io"} <= set(first[1:])


def table_of(
    kind: ResourceKind, items: Iterable[Object], metadata: Object, now: float, included: str = "Metadata"
) -> Object:
    """The table of objects of a kind, now (seconds since 1970); `metadata` is that of their list.

    `included`: what of each object stands beside its row, "None", "Metadata" or "Object". Raises `Rejected`.
    """
    columns = _ALL_COLUMNS.get(kind, (NAME, AGE))
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
    """What the object says there; one that is written otherwise than its type costs its own cell only."""
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
