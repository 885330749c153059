"""For any events in any order, and at any death of the controller, decisions alone keep a gang safe."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.gangs.gang_toy import KEY, SETTINGS, SIZE, TRAYS, Toy

from rackloom.core.cluster.gang_objects import TRAY_ANNOTATION, reserving_plans
from rackloom.core.gangs import slots
from rackloom.core.gangs.reconcile import reconcile_gang
from rackloom.core.gangs.snapshot import read_record

WHO = st.integers(0, SIZE - 1)
WHERE = st.sampled_from(TRAYS)
EVENTS = st.one_of(
    st.tuples(st.sampled_from(["pod", "end", "succeed", "depart"]), WHO),
    st.tuples(
        st.sampled_from(["lose", "come_back", "remove", "cordon", "open", "other", "leave", "take"]), WHERE
    ),
    st.tuples(st.sampled_from(["schedule", "forget", "anew"]), st.none()),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 3.0, 40.0, 70.0])),
)
ALIVE = st.one_of(st.none(), st.integers(0, 3))
"""The number of actions of a pass that are done before the controller dies, or None for all."""


@pytest.mark.slow
@settings(max_examples=100)
@given(script=st.lists(st.tuples(EVENTS, ALIVE), max_size=25), is_running=st.booleans())
def test_whatever_happens_a_gang_is_let_go_whole_and_leaves_nothing(script, is_running):
    toy = Toy()
    if is_running:
        toy.settle()
    for (what, about), alive in script:
        toy.happen(what, about)
        toy.one_pass(alive)
    if toy.succeeded:
        # The rest of a gang may be anywhere by now, so its whole job starts again.
        toy.anew(None)
    for tray in TRAYS:
        toy.say(tray, "True")
        toy.open(tray)
        toy.leave(tray)
    toy.settle()
    places = [pod["spec"]["nodeName"] for pod in toy.pods_of_gang()]
    assert len(set(places)) == SIZE
    assert len({place.split("-")[0] for place in places}) == 1
    record = read_record(toy.plans[KEY.name])
    assert {name for name, node in toy.nodes.items() if reserving_plans(node)} == set(record.reserved)
    toy.pods.clear()
    while toy.one_pass():
        pass
    assert not toy.plans
    assert not any(reserving_plans(node) for node in toy.nodes.values())


@given(script=st.lists(st.tuples(EVENTS, ALIVE), max_size=15), again=st.integers(1, 3))
def test_the_last_member_comes_back_to_its_tray_wherever_the_controller_dies(script, again):
    toy = Toy()
    toy.settle()
    tray = toy.pods["w2"]["spec"]["nodeName"]
    happen_elsewhere = [step for step in script if step[0][0] in ("forget", "wait", "schedule")]
    for number in (0, 1):
        toy.happen("succeed", number)
    for _ in range(again):
        toy.happen("end", 2)
        for (what, about), alive in happen_elsewhere:
            toy.happen(what, about)
            toy.one_pass(alive)
        while toy.one_pass():
            pass
        assert [name for name, node in toy.nodes.items() if reserving_plans(node)] == [tray]
        toy.settle()
        assert toy.pods["w2"]["spec"]["nodeName"] == tray


def two_in_one_seat():
    """A controller that was stopped lets a pod go to a tray to which another one has let one go since."""
    toy = Toy()
    toy.settle()
    seats = list(read_record(toy.plans[KEY.name]).plan.trays)
    for number in (0, 1):
        toy.end(number)
    toy.pod(1)
    toy.stop(None)
    toy.pod(0)
    toy.one_pass(1)
    toy.resume(None)
    trays = [toy.pods[name]["metadata"]["annotations"][TRAY_ANNOTATION] for name in ("w0", "w1")]
    assert trays == [seats[0], seats[0]]
    return toy


def test_a_pod_that_stays_keeps_the_seat_that_it_shares_with_one_that_leaves():
    toy = two_in_one_seat()
    stays = toy.pods["w1"]["metadata"]["uid"]
    toy.depart(0)
    while toy.one_pass():
        pass
    toy.settle()
    assert toy.pods["w1"]["metadata"]["uid"] == stays


def test_of_two_pods_in_one_seat_that_both_stay_one_is_made_anew_elsewhere():
    toy = two_in_one_seat()
    toy.settle()
    assert len({pod["spec"]["nodeName"] for pod in toy.pods_of_gang()}) == SIZE


def test_a_planted_bug_is_found_that_lets_a_pod_that_leaves_keep_its_seat(monkeypatch):
    monkeypatch.setattr(slots, "_slot_priority", lambda member: (member.node is None, member.rank))
    with pytest.raises(AssertionError, match="it stays, and has its seat"):
        test_a_pod_that_stays_keeps_the_seat_that_it_shares_with_one_that_leaves()


@given(script=st.lists(EVENTS, max_size=15))
def test_what_was_done_is_not_done_again(script):
    toy = Toy()
    for what, about in script:
        toy.happen(what, about)
        toy.one_pass()
    for number in range(100):
        if not toy.one_pass():
            break
        assert number < 50, "the same again and again"
    assert not reconcile_gang(toy.snapshot(), SETTINGS).actions
