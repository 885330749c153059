"""The tenants of the fairness benchmark, each a process: `python site_tenants.py quiet|busy JSON`.

Prints a line when it begins and one with what it measured. Imports little: to start it must cost little.
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import msgspec
import uvloop


class Tenant(msgspec.Struct, frozen=True):
    """Where a tenant sends its requests, as whom, and for how long."""

    port: int
    org: str
    token: str
    site_id: str
    seconds: float
    connections: int = 1
    pause: float = 0.0
    """Seconds between two requests of a quiet tenant."""
    polite: bool = True
    """Whether a busy tenant waits for as long as it is asked to."""


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


async def quiet(tenant: Tenant) -> list[tuple[str, float]]:
    """What each request was, and how long it took; one after another."""
    taken: list[tuple[str, float]] = []
    client = await Client.connect(tenant)

    async def timed(kind: str, request: Coroutine[Any, Any, tuple[int, float, Any]]) -> Any:
        began = time.perf_counter()
        status, _, answer = await request
        taken.append((kind, time.perf_counter() - began))
        if status >= 300:
            raise RuntimeError(f"the quiet tenant was answered {status}: {answer!r}")
        await asyncio.sleep(tenant.pause)
        return answer

    await client.partition(f"first-{time.time()}")
    until = time.perf_counter() + tenant.seconds
    while time.perf_counter() < until:
        made = await timed("write", client.partition(f"quiet-{time.time()}"))
        await timed("read", client.request("GET", made))
        await timed("write", client.request("DELETE", made))
    return taken


async def busy(tenant: Tenant) -> Counter[int]:
    """How many answers of each status all connections had, each of which writes as fast as it can."""
    answers: Counter[int] = Counter()
    until = time.perf_counter() + tenant.seconds

    async def write(writer: int) -> None:
        client, made = await Client.connect(tenant), ""
        while time.perf_counter() < until:
            if made:
                status, pause, _ = await client.request("DELETE", made)
                made = made if status == 429 else ""
            else:
                status, pause, made = await client.partition(f"busy-{writer}-{time.time()}")
            answers[status] += 1
            await asyncio.sleep(pause if tenant.polite else 0)

    await asyncio.gather(*(write(writer) for writer in range(tenant.connections)))
    return answers


if __name__ == "__main__":
    print("begins", flush=True)
    chosen: Any = {"quiet": quiet, "busy": busy}[sys.argv[1]]
    print(json.dumps(uvloop.run(chosen(msgspec.json.decode(sys.argv[2], type=Tenant)))), flush=True)
