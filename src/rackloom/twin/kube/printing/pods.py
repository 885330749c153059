"""The columns of pods, and of what makes them."""

from collections.abc import Iterable
from typing import Any

from rackloom.claim.kube.api import Object
from rackloom.twin.kube.printing.columns import (
    AGE,
    NAME,
    NONE,
    Column,
    at,
    duration,
    labels,
    seconds_of,
    since,
    text,
    wide,
)

_DELETED = "Terminating"


def _statuses(pod: Object) -> list[Object]:
    return list(at(pod, "status", "containerStatuses") or ())


def _ready(pod: Object, now: float) -> str:
    ready = sum(1 for one in _statuses(pod) if one.get("ready") and "running" in one.get("state", {}))
    return f"{ready}/{len(pod['spec']['containers'])}"


def _condition(obj: Object, type_: str) -> Object:
    conditions: Iterable[Object] = at(obj, "status", "conditions") or ()
    return next((one for one in conditions if one["type"] == type_), {})


def _status(pod: Object, now: float) -> str:
    if "deletionTimestamp" in pod["metadata"]:
        return _DELETED
    told = [reason for one in _statuses(pod) if (reason := _why_not_running(one.get("state", {})))]
    if told[:1] == ["Completed"] and any("running" in one.get("state", {}) for one in _statuses(pod)):
        return "Running" if _condition(pod, "Ready").get("status") == "True" else "NotReady"
    if told:
        return told[0]
    if _condition(pod, "PodScheduled").get("reason") == "SchedulingGated":
        return "SchedulingGated"
    return str(at(pod, "status", "reason") or at(pod, "status", "phase") or "")


def _why_not_running(state: Object) -> str:
    """Why a container (its state) does not run; "" where it does."""
    if reason := at(state, "waiting", "reason") or at(state, "terminated", "reason"):
        return str(reason)
    ended = state.get("terminated")
    if ended is None:
        return ""
    signal = ended.get("signal")
    return f"Signal:{signal}" if signal else f"ExitCode:{ended.get('exitCode', 0)}"


def _restarts(pod: Object, now: float) -> str:
    count = sum(one.get("restartCount", 0) for one in _statuses(pod))
    ends = [end for one in _statuses(pod) if (end := at(one, "lastState", "terminated", "finishedAt"))]
    return f"{count} ({since(max(ends), now)} ago)" if count and ends else str(count)


def _gates(pod: Object, now: float) -> str:
    gates = [one["conditionType"] for one in pod["spec"].get("readinessGates") or ()]
    if not gates:
        return NONE
    return f"{sum(1 for one in gates if _condition(pod, one).get('status') == 'True')}/{len(gates)}"


PODS = (
    NAME,
    Column("Ready", _ready),
    Column("Status", _status),
    Column("Restarts", _restarts),
    AGE,
    wide(text("IP", "status", "podIP", without=NONE)),
    wide(text("Node", "spec", "nodeName", without=NONE)),
    wide(text("Nominated Node", "status", "nominatedNodeName", without=NONE)),
    wide(Column("Readiness Gates", _gates)),
)


def _of_containers(name: str) -> Column:
    def cell(obj: Object, now: float) -> str:
        return ",".join(one.get(name, "") for one in obj["spec"]["template"]["spec"]["containers"])

    return Column("Containers" if name == "name" else "Images", cell, priority=1)


def _selector(obj: Object, now: float) -> str:
    return labels(at(obj, "spec", "selector", "matchLabels"))


_OF_TEMPLATES = (_of_containers("name"), _of_containers("image"), Column("Selector", _selector, priority=1))

_ENDS = ("Complete", "Failed")
_BEFORE_THE_END = ("Suspended", "FailureTarget", "SuccessCriteriaMet")


def _job_status(job: Object, now: float) -> str:
    def holds(type_: str) -> bool:
        return _condition(job, type_).get("status") == "True"

    ended = next((type_ for type_ in _ENDS if holds(type_)), None)
    if ended:
        return ended
    if "deletionTimestamp" in job["metadata"]:
        return _DELETED
    return next((type_ for type_ in _BEFORE_THE_END if holds(type_)), "Running")


def _completions(job: Object, now: float) -> str:
    done, wanted = at(job, "status", "succeeded") or 0, job["spec"].get("completions")
    if wanted is not None:
        return f"{done}/{wanted}"
    side_by_side = job["spec"].get("parallelism", 1)
    return f"{done}/1 of {side_by_side}" if side_by_side > 1 else f"{done}/1"


def _took(job: Object, now: float) -> str:
    begun, ended = at(job, "status", "startTime"), at(job, "status", "completionTime")
    if not begun:
        return ""
    return duration(seconds_of(ended) - seconds_of(begun)) if ended else since(begun, now)


JOBS = (
    NAME,
    Column("Status", _job_status),
    Column("Completions", _completions),
    Column("Duration", _took),
    AGE,
    *_OF_TEMPLATES,
)


def _count(name: str, of: str) -> Column:
    return Column(name, lambda obj, now: at(obj, "status", of) or 0, "integer")


def _node_selector(obj: Object, now: float) -> Any:
    return labels(at(obj, "spec", "template", "spec", "nodeSelector"))


DAEMON_SETS = (
    NAME,
    _count("Desired", "desiredNumberScheduled"),
    _count("Current", "currentNumberScheduled"),
    _count("Ready", "numberReady"),
    _count("Up-to-date", "updatedNumberScheduled"),
    _count("Available", "numberAvailable"),
    Column("Node Selector", _node_selector),
    AGE,
    *_OF_TEMPLATES,
)
