"""Wake-ups: when a subscription begins and at changes, not at heart beats that say nothing new."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rackloom.carve.fabric.controller import FabricUnavailable
from rackloom.carve.fabric.nmxc import driver as nmxc
from rackloom.core.partitions.domain import DEFAULT_PARTITION_ID, DeletePartition, GpuHealth
from rackloom.lab.switches.fabric import SimulatedFabric

DEFAULT = DeletePartition(partition_id=DEFAULT_PARTITION_ID, name="Default Partition")


class Naps:
    """A sleep that records the requested times and takes next to no time."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        await asyncio.sleep(0.005)


async def quiet(wakes: AsyncIterator[None]) -> asyncio.Task[None]:
    """A task that waits for the next wake-up, once it is known that none is due."""
    waiting = asyncio.ensure_future(anext(wakes))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    return waiting


def test_a_change_wakes_whoever_made_it(fabric: SimulatedFabric, rig: Any) -> None:
    async def scenario() -> None:
        async with rig() as (_, driver):
            wakes = driver.notifications()
            await anext(wakes)
            waiting = await quiet(wakes)
            fabric.set_health(min(fabric.gpus), GpuHealth.DEGRADED)
            await waiting
            waiting = await quiet(wakes)
            await driver.execute(DEFAULT)
            await waiting
            await wakes.aclose()

    asyncio.run(scenario())


def test_heart_beats_wake_only_when_the_state_is_a_new_one(fabric: SimulatedFabric, rig: Any) -> None:
    async def scenario() -> None:
        async with rig() as (server, driver):
            wakes = driver.notifications()
            await anext(wakes)
            server.heart_beat()
            await anext(wakes)
            server.heart_beat()
            server.heart_beat()
            waiting = await quiet(wakes)
            fabric.partitions.clear()  # more multicast groups are free, and no event reports it
            server.heart_beat()
            await waiting
            await wakes.aclose()

    asyncio.run(scenario())


def test_a_restart_is_survived_and_wakes(fabric: SimulatedFabric, rig: Any) -> None:
    naps = Naps()

    async def scenario() -> None:
        async with rig(sleep=naps) as (server, driver):
            wakes = driver.notifications()
            await anext(wakes)
            waiting = await quiet(wakes)
            await server.go_away()
            await waiting
            assert naps.asked == [], "the loss wakes at once, before the next attempt"
            waiting = asyncio.ensure_future(anext(wakes))
            fabric.set_health(min(fabric.gpus), GpuHealth.DEGRADED)
            while len(naps.asked) < 9:
                await asyncio.sleep(0.01)
            assert not waiting.done()
            await server.come_back()
            await waiting
            await wakes.aclose()

    asyncio.run(scenario())
    assert naps.asked[:9] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_subscription_that_held_is_tried_again_at_once(fabric: SimulatedFabric, rig: Any) -> None:
    naps = Naps()

    async def scenario() -> None:
        async with rig(sleep=naps) as (server, driver):
            wakes = driver.notifications()
            await anext(wakes)
            for _ in range(2):
                server.heart_beat()
                await anext(wakes)
                before = len(naps.asked)
                await server.go_away()
                await anext(wakes)
                waiting = asyncio.ensure_future(anext(wakes))
                while len(naps.asked) == before:
                    await asyncio.sleep(0.01)
                assert naps.asked[before] == nmxc.FIRST_RESUBSCRIBE_DELAY
                await server.come_back()
                await waiting
            await wakes.aclose()

    asyncio.run(scenario())


def test_a_refused_subscription_is_asked_for_again_with_patience(rig: Any) -> None:
    naps = Naps()

    async def scenario() -> None:
        async with rig(sleep=naps) as (server, driver):
            for _ in range(2):
                server.faults.refuse_next("Subscribe", "NOT_READY")
            server.faults.omit_header_of_next("Hello")
            wakes = driver.notifications()
            await anext(wakes)
            await wakes.aclose()

    asyncio.run(scenario())
    assert naps.asked == [0.5, 1.0, 2.0]


def test_a_controller_that_falls_silent_is_left(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nmxc, "SILENT_BEATS", 0.05)
    naps = Naps()

    async def scenario() -> None:
        async with rig(sleep=naps, heart_beat_seconds=1) as (_, driver):
            wakes = driver.notifications()
            await anext(wakes)
            await anext(wakes)
            assert naps.asked == []
            await anext(wakes)
            await wakes.aclose()

    asyncio.run(scenario())
    assert naps.asked == [0.5]


def test_after_a_loss_a_reading_waits_less_for_the_first_answer(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nmxc, "SILENT_BEATS", 0.05)

    async def scenario() -> None:
        async with rig(sleep=Naps(), heart_beat_seconds=1) as (server, driver):
            wakes = driver.notifications()
            await anext(wakes)
            server.faults.freeze()
            await anext(wakes)
            with pytest.raises(FabricUnavailable, match="DEADLINE_EXCEEDED"):
                async with asyncio.timeout(nmxc.CONNECT_SECONDS / 2):
                    await driver.observe()
            server.faults.thaw()
            await anext(wakes)
            assert (await driver.observe()).gpus
            await wakes.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("interval", [4.0, 5.0, 10.0, 30.0, 60.0, 300.0])
def test_silence_is_noticed_within_an_interval(interval: float) -> None:
    silence = nmxc.SILENT_BEATS * nmxc.heart_beat_rate(interval)
    assert silence + nmxc.PROBE_SECONDS < interval
