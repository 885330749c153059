"""What one tenant's requests wait for while another tenant writes with all its might, over HTTP on sockets.

The quiet tenant sends a write or a read every `PAUSE` seconds. The busy tenant has `WRITERS` connections,
each of which creates and deletes logical partitions, one request after another. Each tenant is a process of
its own. Rounds with and without the busy tenant take turns, so that what else the machine does meets both.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from site_figures import load
from site_plant import plant

from rackloom.app.config import LimitsConfig
from rackloom.app.listeners import serve_http
from rackloom.app.site.service import caller_limits

WRITERS = 32
PAUSE = 0.03
"""Seconds between two requests of the quiet tenant: well below the rate that a tenant may have."""
QUIET, BUSY = "quiet", "busy"


async def measured(rounds: int, seconds: int, folder: Path) -> list[dict[str, Any]]:
    """A row for a busy tenant that waits when it is asked to, and one for a busy tenant that never waits."""
    limits = caller_limits(LimitsConfig(), lambda _: None)
    async with (
        plant(1, folder, limits) as site,
        site.reconciling(),
        serve_http(site.app, "127.0.0.1:0") as port,
    ):
        where = (await site.ask("GET", "site"))[0]["id"]
        tenants = {org: Tenant(port, org, site.token_of(org), where) for org in (QUIET, BUSY)}
        return [await _row(tenants, polite, rounds, seconds) for polite in (True, False)]


class Tenant(msgspec.Struct, frozen=True):
    """Where a tenant sends its requests, and as whom."""

    port: int
    org: str
    token: str
    site_id: str


async def _row(tenants: dict[str, Tenant], polite: bool, rounds: int, seconds: int) -> dict[str, Any]:
    alone: list[tuple[str, float]] = []
    beside: list[tuple[str, float]] = []
    answers: Counter[int] = Counter()
    for _ in range(rounds):
        alone += await asyncio.to_thread(_in_process, _quiet, tenants[QUIET], seconds)
        busy = asyncio.to_thread(_in_process, _busy, tenants[BUSY], seconds + 2, polite)
        running = asyncio.create_task(busy)
        await asyncio.sleep(1)
        beside += await asyncio.to_thread(_in_process, _quiet, tenants[QUIET], seconds)
        answers += await running
    row: dict[str, Any] = {"measure": "two tenants", "writers": WRITERS, "busy_honours_retry_after": polite}
    for kind in ("write", "read"):
        before, after = (sorted(took for what, took in times if what == kind) for times in (alone, beside))
        row |= {f"{kind}_alone_p50_ms": _ms(before, 0.5), f"{kind}_alone_p99_ms": _ms(before, 0.99)}
        row |= {f"{kind}_beside_p50_ms": _ms(after, 0.5), f"{kind}_beside_p99_ms": _ms(after, 0.99)}
        row |= {f"{kind}_p99_factor": round(_at(after, 0.99) / _at(before, 0.99), 2), f"{kind}s": len(after)}
    sent = rounds * (seconds + 2)
    served = sum(number for status, number in answers.items() if status < 300)
    return row | {"busy_per_s": round(served / sent), "busy_429_per_s": round(answers[429] / sent), **load()}


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def _ms(ordered: list[float], share: float) -> float:
    return round(_at(ordered, share) * 1e3, 1)


# The tenants, each in a process.


def _in_process(work: Any, *arguments: Any) -> Any:
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_report, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def _report(parent: Connection, work: Any, arguments: tuple[Any, ...]) -> None:
    parent.send(uvloop.run(work(*arguments)))


class Client:
    """A connection of a tenant, as small as can be: its cost would hide ours."""

    def __init__(self, tenant: Tenant, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tenant, self._reader, self._writer = tenant, reader, writer

    @classmethod
    async def connect(cls, tenant: Tenant) -> "Client":
        """A connection that stays open."""
        return cls(tenant, *await asyncio.open_connection("127.0.0.1", tenant.port))

    async def request(self, method: str, path: str, body: Any = None) -> tuple[int, float, bytes]:
        """Status, seconds to wait before the next attempt, and body of the answer."""
        tenant, content = self._tenant, b"" if body is None else msgspec.json.encode(body)
        self._writer.write(
            f"{method} /v2/org/{tenant.org}/nico/{path} HTTP/1.1\r\nHost: benchmark\r\n"
            f"Authorization: Bearer {tenant.token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        answer = await self._reader.readexactly(int(headers.get("content-length", "0")))
        return int(lines[0].split()[1]), float(headers.get("retry-after", "0")), answer

    async def partition(self, name: str) -> tuple[int, float, str]:
        """Create a logical partition; the path of the new one is empty where that was refused."""
        body = {"siteId": self._tenant.site_id, "name": name}
        status, pause, answer = await self.request("POST", "nvlink-logical-partition", body)
        made = f"nvlink-logical-partition/{msgspec.json.decode(answer)['id']}" if status == 201 else ""
        return status, pause, made


async def _quiet(tenant: Tenant, seconds: float) -> list[tuple[str, float]]:
    """What each request was, and how long it took."""
    taken: list[tuple[str, float]] = []
    client, until = await Client.connect(tenant), time.perf_counter() + seconds

    async def timed(kind: str, request: Coroutine[Any, Any, tuple[int, float, Any]]) -> Any:
        began = time.perf_counter()
        status, _, answer = await request
        taken.append((kind, time.perf_counter() - began))
        if status >= 300:
            raise RuntimeError(f"the quiet tenant was answered {status}: {answer!r}")
        await asyncio.sleep(PAUSE)
        return answer

    await client.partition(f"first-{time.time()}")
    while time.perf_counter() < until:
        made = await timed("write", client.partition(f"quiet-{time.time()}"))
        await timed("read", client.request("GET", made))
        await timed("write", client.request("DELETE", made))
    return taken


async def _busy(tenant: Tenant, seconds: float, polite: bool) -> Counter[int]:
    """How many answers there were of each status."""
    answers: Counter[int] = Counter()
    until = time.perf_counter() + seconds

    async def write(writer: int) -> None:
        client, made = await Client.connect(tenant), ""
        while time.perf_counter() < until:
            if made:
                status, pause, _ = await client.request("DELETE", made)
                made = made if status == 429 else ""
            else:
                status, pause, made = await client.partition(f"busy-{writer}-{time.time()}")
            answers[status] += 1
            await asyncio.sleep(pause if polite else 0)

    await asyncio.gather(*(write(writer) for writer in range(WRITERS)))
    return answers
