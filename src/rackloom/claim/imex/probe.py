"""Kubelet's probes of an IMEX daemon, answered by the process that supervises it.

A probe that is a command starts a Python interpreter in the container: half a second of CPU, once a second
while the daemon starts, which is then what the job waits for, and every ten seconds ever after. Here a probe
is one HTTP request, and costs one run of nvidia-imex-ctl. The answer is 200 or 503 with the reason, for every
path.

Any pod may connect where NetworkPolicies are not enforced, so nobody can cost more than that: a request is at
most 2 KiB within 2 s, requests that come together share one look, and 16 connections are open at once:
another ends the oldest, so that nobody keeps kubelet, which asks at once, away by holding them open.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from rackloom.claim.imex.status import NotUnderstood
from rackloom.errors import Refused, Retry

LONGEST_REQUEST = 2048
CONNECTIONS = 16
SECONDS = 2.0

Look = Callable[[], Awaitable[None]]
"""Returns if the daemon is ready, or has nothing to do. Else raises `Retry`, `NotUnderstood` or `Refused`."""


@asynccontextmanager
async def probes_answered(address: str, port: int, look: Look) -> AsyncIterator[None]:
    """Answer probes at this address while the context is entered. Raises `Refused` if that cannot be had."""
    probe = _Probe(look)
    try:
        server = await asyncio.start_server(probe.answer, address, port, limit=LONGEST_REQUEST)
    except OSError as error:
        raise Refused(
            f"cannot listen on {address} port {port}: {error.strerror}",
            nearest_fix="choose another port with --probe-port",
        ) from error
    try:
        yield
    finally:
        server.close()


class _Probe:
    def __init__(self, look: Look) -> None:
        self._look = look
        self._looking: asyncio.Task[str] | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}
        """The oldest first."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: a request, an answer, the end."""
        if len(self._open) >= CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(SECONDS):
                await reader.readuntil(b"\r\n\r\n")
            writer.write(_response(await self._reason()))
            async with asyncio.timeout(SECONDS):
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # not a probe
        finally:
            self._open.pop(writer, None)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _reason(self) -> str:
        """Why the daemon is not ready; empty if it is."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._looked())
        return await asyncio.shield(self._looking)

    async def _looked(self) -> str:
        try:
            await self._look()
        except (Retry, NotUnderstood, Refused) as reason:
            return str(reason) or "not ready"
        return ""


def _response(reason: str) -> bytes:
    status = "503 Service Unavailable" if reason else "200 OK"
    body = f"{reason or 'ok'}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
