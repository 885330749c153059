"""A controller that dies after any of its writes: the next one finishes what was recorded, nothing leaks."""

import asyncio
from contextlib import suppress

import pytest
from tests.claim.cluster.gang.gang_site import GangSite, rack_of

from rackloom.twin.virtual import event_loop


def watch_bindings(site):
    """Which nodes each seat was bound to, in order."""
    bound, honest = {}, site.kube.bind

    def noted(key, node, uid, **asked):
        pod = honest(key, node, uid, **asked)
        bound.setdefault(key[1], []).append(node)
        return pod

    site.kube.bind = noted
    return bound


async def until_dead_and_again(site, last):
    """Start a controller that dies after its write number `last`, if it comes to so many, then another."""
    site.start(last)
    with suppress(TimeoutError):
        async with asyncio.timeout(90):
            await site.api.dead.wait()
    await site.kill()
    await asyncio.sleep(0.2)
    site.start()


@pytest.mark.parametrize("last", range(1, 22))
def test_death_after_a_write_while_a_gang_is_brought_up(last):
    async def story():
        site = GangSite(racks=2, trays=4, seed=last)
        await site.begin()
        bound = watch_bindings(site)
        job = site.job("big", {"launcher": 1, "worker": 4})
        await until_dead_and_again(site, last)
        await site.until(lambda: site.is_bound("big", 5))
        assert sorted(map(len, bound.values())) == [1] * 5, "nobody was bound twice"
        places = await site.places("big")
        assert len({rack_of(node) for node in places.values()}) == 1
        assert len({node for name, node in places.items() if "worker" in name}) == 4
        assert set(await site.taints()) == set(places.values())
        await job.end()
        await site.until(site.is_clean)
        await site.end()

    event_loop.run(last, story)


def test_a_gang_is_brought_up_in_fewer_writes_than_were_cut_off():
    async def story():
        site = GangSite(racks=2, trays=4)
        await site.begin()
        site.start()
        site.job("big", {"launcher": 1, "worker": 4})
        await site.until(lambda: site.is_bound("big", 5))
        await asyncio.sleep(20)
        assert site.api.done < 22, "raise the range of deaths"
        await site.end()

    event_loop.run(1, story)


@pytest.mark.parametrize("last", range(1, 10))
def test_death_after_a_write_while_a_gang_ends(last):
    async def story():
        site = GangSite(racks=1, trays=4, seed=last)
        await site.begin()
        site.start()
        job = site.job("big", {"worker": 4})
        await site.until(lambda: site.is_bound("big", 4))
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        await asyncio.sleep(5)
        await site.kill()
        await job.end()
        assert len(await site.taints()) == 4
        await until_dead_and_again(site, last)
        await site.until(site.is_clean)
        await site.end()

    event_loop.run(last, story)


@pytest.mark.parametrize("last", range(1, 12))
def test_death_after_a_write_while_a_member_is_replaced(last):
    async def story():
        site = GangSite(racks=2, trays=6, seed=last)
        await site.begin()
        site.start()
        job = site.job("big", {"worker": 4}, spares=1)
        await site.until(lambda: site.is_bound("big", 4))
        await asyncio.sleep(5)
        before = await site.places("big")
        lost = before["big-worker-1"]
        await site.kill()
        await site.say_ready(lost, "Unknown")
        await asyncio.sleep(61)
        await until_dead_and_again(site, last)

        async def moved():
            nodes = (await site.places("big")).values()
            return len(nodes) == 4 and all(nodes) and lost not in nodes

        await site.until(moved)
        after = await site.places("big")
        assert {name for name in before if before[name] != after[name]} == {"big-worker-1"}
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        assert set(await site.taints()) == set((await site.record("big")).reserved)
        await job.end()
        await site.until(site.is_clean)
        await site.end()

    event_loop.run(last, story)


@pytest.mark.parametrize("seed", range(4))
def test_two_gangs_and_a_controller_that_dies_again_and_again(seed):
    async def story():
        site = GangSite(racks=1, trays=4, seed=seed)
        await site.begin()
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

    event_loop.run(seed, story)
