"""The room that an admitted workload still holds, and the fields that are written into its pods."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.cluster.objects import Object
from rackloom.core.cluster.pods import read_pod
from rackloom.core.kueue.plans import (
    CONTROLLER_NAME,
    PLAN_ANNOTATION,
    PlannedPodSet,
    Verdict,
    active_condition,
    check_state_json,
    held_seats,
    recorded_plans,
)


def recorded(planned: PlannedPodSet) -> Object:
    annotation = msgspec.json.encode(planned).decode()
    return {"name": "main", "annotations": {PLAN_ANNOTATION: annotation}}


def pods_on(update: Object, *nodes: str | None, phase: str = "Running") -> list[Object]:
    annotations = update["annotations"]
    return [
        {"metadata": {"annotations": annotations}, "spec": {"nodeName": node}, "status": {"phase": phase}}
        for node in nodes
    ]


def held(update: Object, pods: list[Object]) -> dict[str, int]:
    return {hold.tray: hold.gpus for hold in held_seats("team/train", [update], map(read_pod, pods))}


def test_all_is_held_until_pods_are_bound() -> None:
    update = recorded(PlannedPodSet(gpus=2, trays={"a": 2, "b": 1}))
    assert held(update, []) == {"a": 4, "b": 2}
    assert held(update, pods_on(update, None, None)) == {"a": 4, "b": 2}


def test_a_bound_pod_gives_its_own_seat_back_and_one_elsewhere_another() -> None:
    update = recorded(PlannedPodSet(gpus=2, trays={"a": 2, "b": 1}))
    assert held(update, pods_on(update, "a")) == {"a": 2, "b": 2}
    assert held(update, pods_on(update, "z")) == {"a": 4}
    assert held(update, pods_on(update, "z", "z", "b")) == {}


def test_a_pod_that_succeeded_needs_no_room_and_one_that_failed_comes_again() -> None:
    update = recorded(PlannedPodSet(gpus=4, trays={"a": 1}))
    assert held(update, pods_on(update, "a", phase="Succeeded")) == {}
    assert held(update, pods_on(update, "a", phase="Failed")) == {"a": 4}


def test_claims_and_spares_hold_trays_whole() -> None:
    update = recorded(PlannedPodSet(gpus=0, whole=True, channel=True, trays={"a": 1}, spares=("s",)))
    holds = {hold.tray: hold for hold in held_seats("team/train", [update], [])}
    assert holds["a"].is_whole
    assert holds["a"].channel
    assert holds["s"].is_whole


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"gpus": "x"}'])
def test_an_annotation_that_cannot_be_read_is_no_plan(text: str | None) -> None:
    assert not list(recorded_plans([{"name": "main", "annotations": {PLAN_ANNOTATION: text}}]))


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4), min_size=1),
    st.lists(st.sampled_from("abcdxyz"), max_size=20),
)
def test_what_is_bound_and_what_is_held_are_all_members(trays: dict[str, int], nodes: list[str]) -> None:
    members = sum(trays.values())
    nodes = nodes[:members]
    update = recorded(PlannedPodSet(gpus=1, trays=trays))
    left = held(update, pods_on(update, *nodes))
    assert sum(left.values()) + len(nodes) == members
    assert not Counter(left) - Counter(trays)


# Written fields.


def test_a_verdict_is_written_with_what_kueue_knows_and_no_more_than_it_takes() -> None:
    retry = Verdict(state="Retry", message="x" * 5000, requeue_after=15)
    entry = check_state_json("c", retry, "2026-01-01T00:00:00Z")
    assert entry["requeueAfterSeconds"] == 15
    assert len(entry["message"]) == 1024
    assert "podSetUpdates" not in entry


def test_the_condition_active_is_written_once() -> None:
    check = {"metadata": {"name": "c", "generation": 1}, "spec": {"controllerName": CONTROLLER_NAME}}
    written = active_condition(check, "2026-01-01T00:00:00Z")
    assert written is not None
    assert written["status"] == "True"
    assert active_condition({**check, "status": {"conditions": [written]}}, "later") is None


def test_a_check_with_parameters_is_not_active() -> None:
    spec = {"controllerName": CONTROLLER_NAME, "parameters": {"kind": "X"}}
    written = active_condition({"metadata": {"name": "c"}, "spec": spec}, "2026-01-01T00:00:00Z")
    assert written is not None
    assert (written["status"], written["reason"]) == ("False", "BadParameters")
