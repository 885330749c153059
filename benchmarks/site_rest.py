"""REST reads against the same handlers without SQL.

Rounds of both sides take turns, and the median of the rounds' ratios is what counts: what else the machine
does meets both.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from site_figures import load, spent
from site_passes import fill
from site_plant import BASE, Plant, call, plant

from rackloom.carve.api.app import create_app

AT_ONCE = 16
"""Requests under way, as from so many clients."""


class Canned:
    """Stands in for the store: answers at once what the store answered to the one question of a round."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._answers: dict[Any, Any] = {}

    def on_behalf_of(self, _org: str) -> "Canned":
        """The same for every organisation."""
        return self

    async def run(self, *args: Any) -> Any:
        """Writes are real; only the admission of a tenant comes here."""
        return await self._store.run(*args)

    async def read(self, *args: Any) -> Any:
        """The answer of the first read of this kind since `forget`."""
        if args[0] not in self._answers:
            self._answers[args[0]] = await self._store.read(*args)
        return self._answers[args[0]]

    def forget(self) -> None:
        """The next question is another one."""
        self._answers.clear()


async def measured(domains: int, rounds: int, requests: int, folder: Path) -> list[dict[str, Any]]:
    """A row for each kind of read."""
    async with plant(domains, folder) as site:
        async with site.reconciling(acts=False):
            pass
        await fill(site, domains)
        return [await _reads(site, name, path, rounds, requests) for name, path in await _paths(site)]


async def _paths(site: Plant) -> list[tuple[str, str]]:
    instance = (await site.ask("GET", "instance?pageSize=1"))[0]
    partition = (await site.ask("GET", "nvlink-logical-partition?pageSize=1"))[0]
    return [
        ("one logical partition", f"nvlink-logical-partition/{partition['id']}"),
        ("one VPC", f"vpc/{instance['vpcId']}"),
        ("one instance", f"instance/{instance['id']}"),
        ("page of 20 instances", "instance?pageSize=20"),
    ]


async def _reads(site: Plant, name: str, path: str, rounds: int, requests: int) -> dict[str, Any]:
    canned: Any = Canned(site.store)
    bare = create_app(msgspec.structs.replace(site.app.state.deps, store=canned))

    async def read(app: Any) -> None:
        status, _ = await call(app, "GET", f"{BASE}/{path}", site.token)
        assert status == 200, (path, status)

    for app in (site.app, bare):
        await read(app)
    sides = [await _round(lambda: read(site.app), lambda: read(bare), requests) for _ in range(rounds)]
    return {"measure": "REST reads", "of": name, "against": "the same without SQL", **_ratios(sides)}


Side = tuple[float, float]
"""Requests per second of wall time, and CPU seconds per request."""


async def _round(
    ours: Callable[[], Awaitable[None]], theirs: Callable[[], Awaitable[None]], requests: int
) -> tuple[Side, Side]:
    return await _side(ours, requests), await _side(theirs, requests)


async def _side(work: Callable[[], Awaitable[None]], requests: int) -> Side:
    left = iter(range(requests))

    async def client() -> None:
        for _ in left:
            await work()

    before, began = spent(), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return requests / (time.perf_counter() - began), (spent() - before) / requests


def _ratios(sides: list[tuple[Side, Side]]) -> dict[str, Any]:
    ratios = [ours[0] / theirs[0] for ours, theirs in sides]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "cpu_ratio": round(statistics.median(theirs[1] / ours[1] for ours, theirs in sides), 3),
        "rounds": len(sides),
        "per_s": round(statistics.median(ours[0] for ours, _ in sides)),
        "against_per_s": round(statistics.median(theirs[0] for _, theirs in sides)),
        "cpu_ms": round(statistics.median(ours[1] for ours, _ in sides) * 1e3, 3),
        "against_cpu_ms": round(statistics.median(theirs[1] for _, theirs in sides) * 1e3, 3),
        **load(),
    }
