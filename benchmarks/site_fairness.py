"""What one tenant's requests wait for while another tenant writes with all its might, over HTTP on sockets.

The quiet tenant sends a write or a read every `PAUSE` seconds. The busy tenant has `WRITERS` connections,
each of which creates and deletes logical partitions, one request after another. Each tenant is a process of
its own. Rounds with and without the busy tenant take turns, so that what else the machine does meets both.
"""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import msgspec
from site_figures import load
from site_plant import plant
from site_tenants import Tenant

from rackloom.app.config import LimitsConfig
from rackloom.app.listeners import serve_http
from rackloom.app.process import shorten_switch_interval
from rackloom.app.site.service import caller_limits

WRITERS = 32
PAUSE = 0.03
"""Seconds between two requests of the quiet tenant: below the rate that a tenant may have."""
QUIET, BUSY = "quiet", "busy"


async def measured(rounds: int, seconds: int, folder: Path) -> list[dict[str, Any]]:
    """A row for a busy tenant that waits when it is asked to, and one for a busy tenant that never waits."""
    shorten_switch_interval()
    limits = caller_limits(LimitsConfig(), lambda _: None)
    async with (
        plant(1, folder, limits) as site,
        site.reconciling(),
        serve_http(site.app, "127.0.0.1:0") as port,
    ):
        where = (await site.ask("GET", "site"))[0]["id"]
        quiet, busy = (Tenant(port, org, site.token_of(org), where, seconds) for org in (QUIET, BUSY))
        quiet = msgspec.structs.replace(quiet, pause=PAUSE)
        busy = msgspec.structs.replace(busy, connections=WRITERS)
        return [
            await _row(quiet, msgspec.structs.replace(busy, polite=polite), rounds)
            for polite in (True, False)
        ]


async def _row(quiet: Tenant, busy: Tenant, rounds: int) -> dict[str, Any]:
    alone: list[tuple[str, float]] = []
    beside: list[tuple[str, float]] = []
    answers: Counter[int] = Counter()
    for _ in range(rounds):
        alone += await _measured(await _begin(QUIET, quiet))
        writing = await _begin(BUSY, busy)
        beside += await _measured(await _begin(QUIET, quiet))
        answers += Counter({int(status): number for status, number in (await _measured(writing)).items()})
    row: dict[str, Any] = {"measure": "two tenants", "writers": WRITERS, "waits_when_asked": busy.polite}
    for kind in ("write", "read"):
        before, after = (sorted(took for what, took in times if what == kind) for times in (alone, beside))
        row |= {f"{kind}_alone_p50_ms": _ms(before, 0.5), f"{kind}_alone_p99_ms": _ms(before, 0.99)}
        row |= {f"{kind}_beside_p50_ms": _ms(after, 0.5), f"{kind}_beside_p99_ms": _ms(after, 0.99)}
        row |= {f"{kind}_p99_factor": round(_at(after, 0.99) / _at(before, 0.99), 2), f"{kind}s": len(after)}
    served = sum(number for status, number in answers.items() if status < 300)
    sent = rounds * busy.seconds
    return row | {"busy_per_s": round(served / sent), "busy_429_per_s": round(answers[429] / sent), **load()}


async def _begin(kind: str, tenant: Tenant) -> Popen[bytes]:
    script = Path(__file__).with_name("site_tenants.py")
    # Not through the event loop, which forks: gRPC does not survive that.
    words = [sys.executable, script, kind, msgspec.json.encode(tenant)]
    process = await asyncio.to_thread(Popen, words, stdout=PIPE)
    assert process.stdout is not None
    await asyncio.to_thread(process.stdout.readline)
    return process


async def _measured(process: Popen[bytes]) -> Any:
    output, _ = await asyncio.to_thread(process.communicate)
    if process.returncode:
        raise RuntimeError(f"a tenant ended with {process.returncode}")
    return json.loads(output)


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def _ms(ordered: list[float], share: float) -> float:
    return round(_at(ordered, share) * 1e3, 1)
