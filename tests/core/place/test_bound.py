"""A running job is moved to no tray that one of its pods may not use."""

from typing import Any

import pytest

from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.pods import Toleration
from rackloom.core.cluster.reader import read_state
from rackloom.core.cluster.state import TrayHold
from rackloom.core.place.mobility import restrict_moves, tolerations_of_movable

LABELS = SchedulerLabels()
TAINT = {"key": "dedicated", "value": "lab", "effect": "NoSchedule"}
TERMS = "requiredDuringSchedulingIgnoredDuringExecution"


def node(name: str, zone: str, *taints: dict[str, str]) -> dict[str, Any]:
    status = {"allocatable": {LABELS.gpu: "4"}}
    metadata = {"name": name, "labels": {"zone": zone}}
    return {"kind": "Node", "metadata": metadata, "spec": {"taints": list(taints)}, "status": status}


NODES = [node("n0", "a"), node("n1", "a", TAINT), node("n2", "b")]


def pod(name: str, movable: str = "true", **spec: Any) -> dict[str, Any]:
    main = {"name": "main", "resources": {"limits": {LABELS.gpu: 2}}}
    metadata = {"name": name, "labels": {LABELS.gang: "g", LABELS.movable: movable}}
    return {
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"nodeName": "n0", "containers": [main], **spec},
    }


def holds(*pods: dict[str, Any]) -> tuple[TrayHold, ...]:
    return restrict_moves(read_state(NODES, pods, labels=LABELS))


@pytest.mark.parametrize(
    ("spec", "kept_off"),
    [
        ({}, {"n1"}),
        ({"nodeSelector": {"zone": "a"}}, {"n1", "n2"}),
        ({"tolerations": [{"key": "dedicated", "operator": "Exists"}]}, set()),
        ({"tolerations": [{"operator": "Exists"}], "nodeSelector": {"zone": "b"}}, {"n0", "n1"}),
    ],
)
def test_labels_and_taints_bind_a_job_wherever_it_goes(spec: dict[str, Any], kept_off: set[str]) -> None:
    (found,) = holds(pod("p", **spec))
    assert (found.movable, found.kept_off) == (True, kept_off)


def test_what_one_pod_may_not_use_the_job_may_not() -> None:
    found = holds(pod("p", nodeSelector={"zone": "a"}), pod("q", tolerations=[{"operator": "Exists"}]))
    assert [hold.kept_off for hold in found] == [{"n1", "n2"}] * 2


def test_a_job_whose_rules_cannot_be_read_stays_and_one_that_stays_is_not_looked_at() -> None:
    odd = {"nodeAffinity": {TERMS: {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone"}]}]}}}
    (found,) = holds(pod("p", affinity=odd))
    assert not found.movable
    (pinned,) = holds(pod("p", movable="false", nodeSelector={"zone": "a"}))
    assert pinned.kept_off == frozenset()


def test_taints_count_as_tolerated_where_some_job_that_may_move_does() -> None:
    tolerations = [{"key": "dedicated", "operator": "Exists"}]
    assert tolerations_of_movable(
        read_state((), [pod("p", tolerations=tolerations), pod("q")], labels=LABELS)
    ) == (Toleration(key="dedicated", operator="Exists"),)
    fixed = read_state((), [pod("p", movable="false", tolerations=tolerations)], labels=LABELS)
    assert tolerations_of_movable(fixed) == ()
