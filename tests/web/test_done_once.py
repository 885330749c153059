"""An order is carried out once, however often and however quickly it is sent."""

import asyncio

import pytest

from rackloom.errors import Refused
from rackloom.web.done_once import MOST_OF_VIEWER, OrdersDone, Outcome

ANN, BOB = ("acme", "ann"), ("blue", "bob")


class Work:
    """Work that counts its runs. Each run ends once `may_end` is set."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = asyncio.Event()
        self.refused = False

    async def __call__(self) -> Outcome:
        self.begun += 1
        await self.may_end.wait()
        if self.refused:
            raise Refused("no")
        return Outcome(done=(f"number {self.begun}",))


def test_a_second_request_waits_for_the_outcome_of_the_first():
    async def scenario():
        orders, work = OrdersDone(lambda: 0.0, 60.0), Work()
        both = [asyncio.create_task(orders.once(ANN, "a", work)) for _ in range(2)]
        await asyncio.sleep(0)
        assert orders.find(ANN, "a") is None
        work.may_end.set()
        return await asyncio.gather(*both), work.begun, orders.find(ANN, "a"), orders.find(BOB, "a")

    outcomes, begun, found, others = asyncio.run(scenario())
    assert outcomes == [found, found] == [Outcome(done=("number 1",))] * 2
    assert (begun, others) == (1, None)


def test_a_browser_that_goes_away_does_not_interrupt_an_order():
    async def scenario():
        orders, work = OrdersDone(lambda: 0.0, 60.0), Work()
        gone = asyncio.create_task(orders.once(ANN, "a", work))
        await asyncio.sleep(0)
        gone.cancel()
        work.may_end.set()
        return await orders.once(ANN, "a", work), work.begun

    assert asyncio.run(scenario()) == (Outcome(done=("number 1",)), 1)


def test_a_refusal_reaches_all_that_wait_and_is_forgotten():
    async def scenario():
        orders, work = OrdersDone(lambda: 0.0, 60.0), Work()
        work.refused = True
        both = [asyncio.create_task(orders.once(ANN, "a", work)) for _ in range(2)]
        await asyncio.sleep(0)
        work.may_end.set()
        refusals = await asyncio.gather(*both, return_exceptions=True)
        work.refused = False
        return [str(refusal) for refusal in refusals], await orders.once(ANN, "a", work)

    assert asyncio.run(scenario()) == (["no", "no"], Outcome(done=("number 2",)))


@pytest.mark.parametrize("orders_after", [MOST_OF_VIEWER - 1, MOST_OF_VIEWER])
def test_the_newest_outcomes_of_each_viewer_are_kept(orders_after):
    async def scenario():
        orders, work = OrdersDone(lambda: 0.0, 60.0), Work()
        work.may_end.set()
        await orders.once(BOB, "b", work)
        await orders.once(ANN, "a", work)
        for number in range(orders_after):
            await orders.once(ANN, str(number), work)
        return orders.find(ANN, "a"), orders.find(BOB, "b")

    mine, others = asyncio.run(scenario())
    assert (mine is not None) == (orders_after < MOST_OF_VIEWER)
    assert others is not None


def test_outcomes_end_with_the_forms_that_led_to_them():
    async def scenario():
        now = [0.0]
        orders, work = OrdersDone(lambda: now[0], 60.0), Work()
        work.may_end.set()
        await orders.once(BOB, "b", work)
        now[0] = 61.0
        await orders.once(ANN, "a", work)
        return orders.find(BOB, "b"), orders.find(ANN, "a")

    assert asyncio.run(scenario()) == (None, Outcome(done=("number 2",)))
