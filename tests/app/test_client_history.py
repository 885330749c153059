"""The history checker accepts histories that an order explains, and finds each planted violation.

A checker that finds nothing may be one that cannot: every kind of violation is planted here, and on small
histories its verdict is that of trying every order.
"""

import random
from itertools import chain, combinations, permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.app.client_history import ClientAction, Event, count_outcomes, find_violations


def event(action, invoked_at, returned_at, value=None, *, refused=False, client="a", name="x", listed=()):
    return Event(
        client=client,
        action=ClientAction(action),
        object="" if action == "list" else name,
        value=value,
        listed=listed,
        refused=refused,
        invoked_at=invoked_at,
        returned_at=returned_at,
    )


LIFE = (
    event("create", 0, 1, "one"),
    event("read", 2, 3, "one"),
    event("write", 4, 5, "two"),
    event("list", 6, 7, listed=(("x", "two"),)),
    event("create", 8, 9, "three", refused=True),
    event("delete", 10, 11),
    event("read", 12, 13, None),
    event("write", 14, 15, "four", refused=True),
    event("list", 16, 17),
)


def reasons(history):
    return [violation.reason for violation in find_violations(history)]


def test_the_life_of_an_object_is_explained():
    assert reasons(LIFE) == []


@pytest.mark.parametrize(
    "explained",
    [
        pytest.param((event("create", 0, None, "one"), event("read", 1, 2)), id="never carried out"),
        pytest.param((event("create", 0, None, "one"), event("read", 1, 2, "one")), id="carried out"),
        pytest.param(
            (event("create", 0, None, "one"), event("read", 1, 2), event("read", 9, 10, "one")),
            id="carried out after its client gave up",
        ),
        pytest.param(
            (event("create", 0, 9, "one"), event("read", 1, 2, "one"), event("read", 1, 8)),
            id="read while it was created",
        ),
        pytest.param(
            (
                event("create", 0, 1, "one"),
                event("write", 2, 9, "two", client="a"),
                event("write", 2, 9, "three", client="b"),
                event("read", 10, 11, "two"),
            ),
            id="two writes at once",
        ),
        pytest.param(
            (event("create", 0, 1, "one"), event("delete", 2, None), event("create", 3, 4, "two")),
            id="a delete without an answer, and what needs it",
        ),
    ],
)
def test_what_an_order_explains_is_no_violation(explained):
    assert reasons(explained) == []


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param((event("create", 0, 1, "one"), event("read", 2, 3)), id="lost create"),
        pytest.param((event("create", 0, 1, "one"), event("list", 2, 3)), id="create missing in a list"),
        pytest.param(
            (event("create", 0, 1, "one"), event("write", 2, 3, "two"), event("read", 4, 5, "one")),
            id="lost write, or a stale read",
        ),
        pytest.param(
            (
                event("create", 0, 1, "one"),
                event("write", 2, 9, "two"),
                event("read", 3, 4, "two", client="b"),
                event("read", 5, 6, "one", client="c"),
            ),
            id="new then old while it is written",
        ),
        pytest.param(
            (event("create", 0, 1, "one"), event("delete", 2, 3), event("read", 4, 5, "one")),
            id="resurrected",
        ),
        pytest.param(
            (
                event("create", 0, 1, "one"),
                event("delete", 2, 3),
                event("list", 4, 5, listed=(("x", "one"),)),
            ),
            id="resurrected in a list",
        ),
        pytest.param(
            (event("create", 0, 1, "one"), event("list", 2, 3, listed=(("x", "one"), ("x", "one")))),
            id="there twice",
        ),
        pytest.param((event("create", 0, 1, "a"), event("create", 2, 3, "b")), id="created twice"),
        pytest.param(
            (event("create", 0, 9, "a"), event("create", 0, 9, "b", client="b")), id="created twice at once"
        ),
        pytest.param((event("list", 0, 1, listed=(("x", "one"),)),), id="created by nobody"),
        pytest.param((event("create", 0, 1, "a", refused=True),), id="refused without a cause"),
        pytest.param(
            (event("create", 0, 1, "a"), event("delete", 2, 3), event("delete", 4, 5)), id="deleted twice"
        ),
        pytest.param(
            (
                event("create", 0, 1, "one"),
                event("write", 2, None, "two"),
                event("read", 4, 5, "two"),
                event("read", 6, 7, "one"),
            ),
            id="unanswered write undone",
        ),
        pytest.param(
            (event("read", 0, 1, "one"), event("create", 2, None, "one")), id="read before it was requested"
        ),
        pytest.param(
            (
                event("create", 0, 1, "one"),
                event("delete", 2, None),
                event("read", 3, 4),
                event("read", 5, 6, "one"),
            ),
            id="back after an unanswered delete",
        ),
    ],
)
def test_a_planted_violation_is_found(planted):
    assert len(find_violations(planted)) == 1


def test_objects_do_not_explain_each_other():
    other = [
        msgspec.structs.replace(each, object="y") for each in LIFE if each.action is not ClientAction.LIST
    ]
    lists = [each for each in LIFE if each.action is ClientAction.LIST]
    found = find_violations([*LIFE, *other[:2], *lists])
    assert [violation.object for violation in found] == ["y"]


def test_a_list_says_nothing_about_objects_with_another_prefix():
    elsewhere = msgspec.structs.replace(event("list", 2, 3), object="y")
    assert reasons([event("create", 0, 1, "one"), elsewhere]) == []


def test_a_violation_shows_the_answer_that_nothing_explains():
    (violation,) = find_violations([*LIFE, event("read", 18, 19, "two", client="late")])
    assert "18.000..19.000 late read x two acknowledged" in violation.reason
    assert str(violation).startswith("x: no order explains")


def test_an_answer_before_its_request_is_a_mistake_of_the_recorder():
    with pytest.raises(ValueError, match="before it was requested"):
        find_violations([event("read", 2, 1)])


def test_outcomes_are_counted():
    assert count_outcomes([*LIFE, event("delete", 18, None)]) == {
        "create acknowledged": 1,
        "create refused": 1,
        "write acknowledged": 1,
        "write refused": 1,
        "delete acknowledged": 1,
        "delete unknown": 1,
        "read acknowledged": 2,
        "list acknowledged": 2,
    }


# Against every order.


def holds(order):
    """Whether every answer is right when requests are carried out in this order."""
    state = None
    for each in order:
        exists = state is not None
        match each.action, each.refused:
            case ClientAction.READ, _:
                right = each.value == state
            case ClientAction.CREATE, refused:
                right = exists == refused
                state = state if refused else each.value
            case ClientAction.WRITE, refused:
                right = exists != refused
                state = state if refused else each.value
            case _, refused:
                right = exists != refused
                state = state if refused else None
        if not right:
            return False
    return True


def explained_by_some_order(history):
    answered = [each for each in history if each.returned_at is not None]
    unknown = [each for each in history if each.returned_at is None]
    chosen = chain.from_iterable(combinations(unknown, count) for count in range(len(unknown) + 1))
    return any(
        holds(order)
        for some in chosen
        for order in permutations([*answered, *some])
        if not any(
            later.returned_at is not None and later.returned_at < earlier.invoked_at
            for earlier, later in combinations(order, 2)
        )
    )


@st.composite
def small_histories(draw):
    events = []
    for number in range(draw(st.integers(1, 5))):
        invoked = draw(st.integers(0, 8))
        returned = draw(st.none() | st.integers(invoked, 10))
        action = draw(st.sampled_from(["create", "write", "delete", "read"]))
        refused = returned is not None and action != "read" and draw(st.booleans())
        values = {"create": st.sampled_from("ab"), "write": st.sampled_from("ab"), "delete": st.none()}
        value = draw(values.get(action, st.none() | st.sampled_from("ab")))
        events.append(event(action, invoked, returned, value, refused=refused, client=str(number)))
    return events


@given(small_histories())
def test_the_verdict_is_that_of_trying_every_order(history):
    assert (find_violations(history) == []) == explained_by_some_order(history)


def run_of_a_register(seed, requests):
    """The history of 16 clients of a register that acts at one moment between request and answer."""
    rng = random.Random(seed)
    state, history, free = None, [], dict.fromkeys(range(16), 0.0)
    now = 0.0
    for number in range(requests):
        now += rng.random()
        client = min(free, key=lambda name: (max(free[name], now), rng.random()))
        invoked = max(free[client], now - rng.random())
        returned = now + rng.random()
        free[client] = returned
        action = rng.choice(["create", "write", "write", "delete", "read", "read", "read"])
        exists, value = state is not None, f"v{number}"
        refused = action != "read" and exists == (action == "create")
        if action == "read":
            value = state
        elif not refused:
            state = None if action == "delete" else value
        lost = action != "read" and rng.random() < 0.03
        answer = {"refused": refused and not lost, "client": str(client)}
        history.append(event(action, invoked, None if lost else returned, value, **answer))
    return history


@pytest.mark.parametrize("seed", range(5))
def test_a_long_run_is_explained_and_one_wrong_read_in_it_is_found(seed):
    history = run_of_a_register(seed, 300)
    assert find_violations(history) == []
    reads = [number for number, each in enumerate(history) if each.action is ClientAction.READ]
    at = random.Random(seed).choice(reads[20:])
    history[at] = msgspec.structs.replace(history[at], value="never written")
    assert len(find_violations(history)) == 1
