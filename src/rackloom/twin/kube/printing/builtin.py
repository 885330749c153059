"""The columns of built-in types, as an API server of Kubernetes 1.36 prints them."""

from collections.abc import Mapping, Sequence

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Kind, Object
from rackloom.twin.kube.printing.columns import (
    AGE,
    NAME,
    NONE,
    UNKNOWN,
    Column,
    at,
    labels,
    since,
    text,
    wide,
)
from rackloom.twin.kube.printing.pods import DAEMON_SETS, JOBS, PODS

_ROLE = "node-role.kubernetes.io/"


def _node_status(node: Object, now: float) -> str:
    conditions = at(node, "status", "conditions") or ()
    ready = next((one["status"] for one in conditions if one["type"] == "Ready"), None)
    told = {"True": "Ready", None: "Unknown"}.get(ready, "NotReady")
    return f"{told},SchedulingDisabled" if at(node, "spec", "unschedulable") else told


def _roles(node: Object, now: float) -> str:
    found = (node["metadata"].get("labels") or {}).keys()
    return ",".join(sorted(one.removeprefix(_ROLE) for one in found if one.startswith(_ROLE))) or NONE


def _address(name: str, type_: str) -> Column:
    def cell(node: Object, now: float) -> str:
        found = at(node, "status", "addresses") or ()
        return next((one["address"] for one in found if one["type"] == type_), NONE)

    return Column(name, cell, priority=1)


def _kernel(node: Object, now: float) -> str:
    version, machine = (at(node, "status", "nodeInfo", one) for one in ("kernelVersion", "architecture"))
    return f"{version} ({machine})" if version and machine else version or UNKNOWN


def _of_node(name: str, field: str) -> Column:
    return wide(text(name, "status", "nodeInfo", field, without=UNKNOWN))


_NODES = (
    NAME,
    Column("Status", _node_status),
    Column("Roles", _roles),
    AGE,
    text("Version", "status", "nodeInfo", "kubeletVersion"),
    _address("Internal-IP", "InternalIP"),
    _address("External-IP", "ExternalIP"),
    _of_node("OS-Image", "osImage"),
    Column("Kernel-Version", _kernel, priority=1),
    _of_node("Container-Runtime", "containerRuntimeVersion"),
)


def _claim_state(claim: Object, now: float) -> str:
    """The words of a claim: `pending`, `allocated,reserved`, and `deleted` before what is still held."""
    deleted = "deletionTimestamp" in claim["metadata"]
    allocated = bool(at(claim, "status", "allocation"))
    words = {
        "deleted": deleted,
        "pending": not allocated and not deleted,
        "allocated": allocated,
        "reserved": allocated and bool(at(claim, "status", "reservedFor")),
    }
    return ",".join(word for word, holds in words.items() if holds)


def _about(event: Object, now: float) -> str:
    about = event.get("involvedObject") or {}
    return f"{about.get('kind', '').lower()}/{about.get('name', '')}"


def _source(event: Object, now: float) -> str:
    component, host = at(event, "source", "component"), at(event, "source", "host")
    told = (component or event.get("reportingComponent"), host or event.get("reportingInstance"))
    return ", ".join(one for one in told if one)


def _time(name: str, *fields: str, priority: int = 0) -> Column:
    def cell(event: Object, now: float) -> str:
        return since(next((event[one] for one in fields if event.get(one)), None), now)

    return Column(name, cell, priority=priority)


_EVENTS = (
    _time("Last Seen", "lastTimestamp", "eventTime", "firstTimestamp"),
    text("Type", "type"),
    text("Reason", "reason"),
    Column("Object", _about),
    wide(text("Subobject", "involvedObject", "fieldPath")),
    Column("Source", _source, priority=1),
    Column("Message", lambda event, now: str(event.get("message", "")).strip()),
    _time("First Seen", "firstTimestamp", "eventTime", priority=1),
    Column("Count", lambda event, now: event.get("count") or 1, priority=1),
    Column("Name", NAME.cell, format="name", priority=1),
)


def _port(port: Object) -> str:
    number = f"{port['port']}:{port['nodePort']}" if port.get("nodePort") else str(port["port"])
    return f"{number}/{port.get('protocol', 'TCP')}"


def _ports(service: Object, now: float) -> str:
    return ",".join(_port(one) for one in at(service, "spec", "ports") or ()) or NONE


_SERVICES = (
    NAME,
    text("Type", "spec", "type", without="ClusterIP"),
    text("Cluster-IP", "spec", "clusterIP", without=NONE),
    Column("External-IP", lambda obj, now: ",".join(at(obj, "spec", "externalIPs") or ()) or NONE),
    Column("Port(s)", _ports),
    AGE,
    Column("Selector", lambda obj, now: labels(at(obj, "spec", "selector")), priority=1),
)


_SHOWN = 3
_UNSET = "<unset>"


def _first_few(values: Sequence[object]) -> str:
    more = len(values) - _SHOWN
    told = ",".join(str(one) for one in values[:_SHOWN]) or _UNSET
    return f"{told} + {more} more..." if more > 0 else told


def _endpoint_ports(obj: Object, now: float) -> str:
    return _first_few([one.get("port") or one.get("name") or "*" for one in obj.get("ports") or ()])


def _endpoint_addresses(obj: Object, now: float) -> str:
    endpoints = obj.get("endpoints") or ()
    return _first_few([address for one in endpoints for address in one.get("addresses") or ()])


_ENDPOINTS = (
    NAME,
    text("AddressType", "addressType"),
    Column("Ports", _endpoint_ports),
    Column("Endpoints", _endpoint_addresses),
    AGE,
)


def _how_many(name: str, *fields: str, type_: str = "string") -> Column:
    return Column(name, lambda obj, now: sum(len(obj.get(one) or ()) for one in fields), type_)


_WEBHOOKS = (NAME, _how_many("Webhooks", "webhooks", type_="integer"), AGE)

COLUMNS: Mapping[Kind, tuple[Column, ...]] = {
    kinds.POD: PODS,
    kinds.JOB: JOBS,
    kinds.DAEMON_SET: DAEMON_SETS,
    kinds.NODE: _NODES,
    kinds.NAMESPACE: (NAME, text("Status", "status", "phase"), AGE),
    kinds.RESOURCE_CLAIM: (NAME, Column("State", _claim_state), AGE),
    kinds.RESOURCE_SLICE: (
        NAME,
        text("Node", "spec", "nodeName"),
        text("Driver", "spec", "driver"),
        text("Pool", "spec", "pool", "name"),
        AGE,
    ),
    kinds.ENDPOINT_SLICE: _ENDPOINTS,
    kinds.EVENT: _EVENTS,
    kinds.SERVICE: _SERVICES,
    kinds.SECRET: (NAME, text("Type", "type", without="Opaque"), _how_many("Data", "data"), AGE),
    kinds.CONFIG_MAP: (NAME, _how_many("Data", "data", "binaryData"), AGE),
    kinds.NETWORK_POLICY: (
        NAME,
        Column("Pod-Selector", lambda obj, now: labels(at(obj, "spec", "podSelector", "matchLabels"))),
        AGE,
    ),
    kinds.LEASE: (NAME, text("Holder", "spec", "holderIdentity"), AGE),
    kinds.CRD: (NAME, Column("Created At", lambda obj, now: obj["metadata"]["creationTimestamp"], "date")),
    kinds.MUTATING_WEBHOOK: _WEBHOOKS,
    kinds.VALIDATING_WEBHOOK: _WEBHOOKS,
}
"""Those that show more than a name and an age."""
