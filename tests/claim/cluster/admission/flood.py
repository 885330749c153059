"""Two programs for the test of a flood: the webhook on loopback, and an attacker who wants to stop it.

`serve CA` writes the authority's certificate to CA and prints the port. `attack PORT SECONDS` attacks for
that long.
"""

import asyncio
import random
import ssl
import sys
import time
from contextlib import suppress
from pathlib import Path

ADDRESSES = [f"127.0.0.{number}" for number in range(2, 8)]
EACH = 120
"""Connections that each address tries to have of each kind. There are five kinds."""


async def serve(authority: str) -> None:
    from tests.claim.cluster.admission.test_over_tls import issued, trusted

    from rackloom.app.webhook import WebhookOptions, webhook
    from rackloom.claim.cluster.admission.webhook import AdmissionSettings

    api = await issued()
    options = WebhookOptions(identity="w", listen="127.0.0.1:0")
    async with webhook(api, AdmissionSettings(), options) as port:
        Path(authority).write_text(await trusted(api))  # noqa: ASYNC240
        sys.stdout.write(f"port {port}\n")
        sys.stdout.flush()
        await asyncio.sleep(300)


def blind() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


TLS = blind()
HEAD = b"POST /mutate-pods HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def no_handshake(address: str, port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    await asyncio.sleep(60)
    writer.close()


async def opened(address: str, port: int):
    return await asyncio.open_connection("127.0.0.1", port, ssl=TLS, local_addr=(address, 0))


async def idle(address: str, port: int) -> None:
    _, writer = await opened(address, port)
    await asyncio.sleep(60)
    writer.close()


async def slow_head(address: str, port: int) -> None:
    _, writer = await opened(address, port)
    writer.write(HEAD)
    while True:
        writer.write(b"X-More: 1\r\n")
        await writer.drain()
        await asyncio.sleep(0.3)


async def big_body(address: str, port: int) -> None:
    reader, writer = await opened(address, port)
    size = 7 << 20
    writer.write(HEAD + f"Content-Length: {size}\r\n\r\n".encode())
    part = b"[" + b"{}," * 21845
    for _ in range(size // len(part)):
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(random.random() * 0.05)
    await reader.read(100)
    writer.close()


async def pipelined(address: str, port: int) -> None:
    _, writer = await opened(address, port)
    while True:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
        await writer.drain()
        await asyncio.sleep(0)


KINDS = (no_handshake, idle, slow_head, big_body, pipelined)


async def again(kind, address: str, port: int, until: float) -> None:
    """Repeat for as long as the flood goes on: a client that is thrown out comes again."""
    while time.monotonic() < until:
        with suppress(OSError, EOFError, TimeoutError):
            async with asyncio.timeout(max(0.1, until - time.monotonic())):
                await kind(address, port)
        await asyncio.sleep(0.05)


async def attack(port: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    await asyncio.gather(
        *(again(kind, address, port, until) for address in ADDRESSES for kind in KINDS for _ in range(EACH))
    )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[4]))
    if sys.argv[1] == "serve":
        asyncio.run(serve(sys.argv[2]))
    else:
        asyncio.run(attack(int(sys.argv[2]), float(sys.argv[3])))
