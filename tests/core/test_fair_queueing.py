"""Fair queueing: turns by flow, the order within a flow, costs, and flows that are forgotten."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.fair_queueing import FairQueue


def _serve(queue: FairQueue[str], costs: dict[str, float] | None = None, turns: int = 10**6) -> list[str]:
    """The flows in the order in which they are served."""
    served = []
    while queue.flows and turns > len(served):
        flow, item = queue.take()
        queue.charge(flow, (costs or {}).get(flow, 1.0))
        served.append(item)
    return served


def test_a_newcomer_waits_for_nobodys_backlog() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(32):
        queue.add("a", f"a{number}")
    assert _serve(queue, turns=5) == ["a0", "a1", "a2", "a3", "a4"]
    queue.add("b", "b0")
    assert "b0" in _serve(queue, turns=2)


def test_flows_take_turns_and_each_keeps_its_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a0", "a1", "a2", "b0", "b1", "c0"):
        queue.add(item[0], item)
    assert _serve(queue) == ["a0", "b0", "c0", "a1", "b1", "a2"]
    assert queue.next_flow() is None


def test_a_flow_whose_items_cost_more_has_fewer_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(40):
        queue.add("a", f"a{number}")
        queue.add("b", f"b{number}")
    served = Counter(item[0] for item in _serve(queue, {"a": 3.0, "b": 1.0}, turns=40))
    assert 9 <= served["a"] <= 11


def test_service_while_nobody_else_waited_is_not_held_against_a_flow() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(1000):
        queue.add("a", f"a{number}")
        _serve(queue)
    for number in range(3):
        queue.add("a", f"a{number}")
        queue.add("b", f"b{number}")
    assert sorted(_serve(queue)[:4]) == ["a0", "a1", "b0", "b1"]


def test_what_is_idle_is_forgotten() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(1000):
        queue.add(str(number), str(number))
        assert queue.take() == (str(number), str(number))
        queue.charge(str(number), 1.0)
    assert not queue._tags


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0.1, 5.0)), max_size=60))
def test_nobody_gets_ahead_by_more_than_one_item(items: list[tuple[str, float]]) -> None:
    queue: FairQueue[tuple[str, float]] = FairQueue()
    for item in items:
        queue.add(item[0], item)
    service: Counter[str] = Counter()
    dearest = max((cost for _, cost in items), default=0.0)
    order = []
    while queue.flows:
        waiting = set(queue.flows)
        # While two flows wait, their service differs by no more than two items.
        shares = [service[flow] for flow in waiting]
        assert max(shares) - min(shares) <= 2 * dearest + 1e-9
        _, taken = queue.take()
        queue.charge(*taken)
        service[taken[0]] += taken[1]
        order.append(taken)
    for flow in "abcd":
        assert [item for item in order if item[0] == flow] == [item for item in items if item[0] == flow]
