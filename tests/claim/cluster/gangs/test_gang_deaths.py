"""A controller that dies after any of its writes: the next one finishes the recorded work, nothing leaks."""

import asyncio

import pytest
from tests.claim.cluster.gangs.gang_site import rack_of, run
from tests.claim.cluster.gangs.gang_stories import (
    at_work,
    bound_job,
    has_left,
    opened,
    over,
    until_dead_and_again,
    watch_bindings,
)


@pytest.mark.parametrize("last", range(1, 22))
def test_death_after_a_write_while_a_gang_is_brought_up(last):
    async def story():
        site = await opened(racks=2, trays=4, seed=last)
        bound = watch_bindings(site)
        job = site.job("big", {"launcher": 1, "worker": 4})
        await until_dead_and_again(site, last)
        await site.until(lambda: site.is_bound("big", 5))
        assert sorted(map(len, bound.values())) == [1] * 5, "nobody was bound twice"
        places = await site.places("big")
        assert len({rack_of(node) for node in places.values()}) == 1
        assert len({node for name, node in places.items() if "worker" in name}) == 4
        assert set(await site.taints()) == set(places.values())
        await over(site, job)

    run(story, last)


def test_a_gang_is_brought_up_in_fewer_writes_than_were_cut_off():
    async def story():
        site = await at_work(racks=2, trays=4)
        await bound_job(site, "big", {"launcher": 1, "worker": 4})
        await asyncio.sleep(20)
        assert site.api.done < 22, "raise the range of deaths"
        await site.end()

    run(story)


@pytest.mark.slow
@pytest.mark.parametrize("last", range(1, 10))
def test_death_after_a_write_while_a_gang_ends(last):
    async def story():
        site = await at_work(racks=1, trays=4, seed=last)
        job = await bound_job(site, "big", {"worker": 4})
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        await asyncio.sleep(5)
        await site.kill()
        await job.end()
        assert len(await site.taints()) == 4
        await until_dead_and_again(site, last)
        await over(site)

    run(story, last)


@pytest.mark.parametrize("last", range(1, 12))
def test_death_after_a_write_while_a_member_is_replaced(last):
    async def story():
        site = await at_work(racks=2, trays=6, seed=last)
        job = await bound_job(site, "big", {"worker": 4}, spares=1)
        await asyncio.sleep(5)
        before = await site.places("big")
        lost = before["big-worker-1"]
        await site.kill()
        await site.say_ready(lost, "Unknown")
        await asyncio.sleep(61)
        await until_dead_and_again(site, last)
        await site.until(has_left(site, "big", 4, lost))
        after = await site.places("big")
        assert {name for name in before if before[name] != after[name]} == {"big-worker-1"}
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        assert set(await site.taints()) == set((await site.record("big")).reserved)
        await over(site, job)

    run(story, last)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_two_gangs_and_a_controller_that_dies_again_and_again(seed):
    async def story():
        site = await opened(racks=1, trays=4, seed=seed)
        bound = watch_bindings(site)
        jobs = {name: site.job(name, {"worker": 3}) for name in ("one", "two")}
        for last in range(1, 7):
            await until_dead_and_again(site, last)
            await site.kill()
        site.start()

        async def somebody_won():
            return any([await site.is_bound(name, 3) for name in jobs])

        await site.until(somebody_won)
        (winner,) = [name for name in jobs if await site.is_bound(name, 3)]
        (loser,) = set(jobs) - {winner}
        assert not any(name.startswith(loser) for name in bound)
        await jobs[winner].end()
        await site.until(lambda: site.is_bound(loser, 3))
        await jobs[loser].end()
        await site.until(site.is_clean)
        assert all(len(nodes) == 1 for nodes in bound.values())
        await site.end()

    run(story, seed)
