"""Answers that no controller gives, over the real protocols: each ends as `FabricUnavailable`."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import httpx2
import pytest
from tests.carve.fabric.nmxm_rig import login

from rackloom.carve.fabric.controller import FabricUnavailable
from rackloom.carve.fabric.nmxc import driver
from rackloom.carve.fabric.nmxc import protocol as nmxc
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.fabric.nmxm import protocol as nmxm
from rackloom.carve.fabric.nmxm.driver import NmxmDriver
from rackloom.runtime.foreign_text import MAX_BYTES

DEEP = 5_000


@pytest.mark.parametrize(
    "content", [b"[" * DEEP + b"]" * DEEP, b'[{"a":' * DEEP, b"[" + b"9" * 100_000 + b"]", b"\xff"]
)
@pytest.mark.parametrize("status", [200, 400, 500])
def test_nmx_m(content: bytes, status: int) -> None:
    async def scenario() -> None:
        transport = httpx2.MockTransport(lambda _: httpx2.Response(status, content=content))
        driver = NmxmDriver("http://m/nmx/v1", login, clock=lambda: 1.0, transport=transport)
        with pytest.raises(FabricUnavailable, match="Hello: "):
            await driver.observe()
        await driver.close()

    asyncio.run(scenario())


def test_an_answer_of_nmx_m_without_end_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nmxm, "MAX_BYTES", 10_000)
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b"[" * 1_000

    async def scenario() -> None:
        transport = httpx2.MockTransport(lambda _: httpx2.Response(200, content=endless()))
        driver = NmxmDriver("http://m/nmx/v1", login, clock=lambda: 1.0, transport=transport)
        with pytest.raises(FabricUnavailable, match="Hello: more than 10000 bytes"):
            await driver.observe()
        await driver.close()

    asyncio.run(scenario())
    assert sent < 100


async def last_notification(call: Any) -> None:
    while True:
        await driver._read_notification(call, 10.0)


@pytest.mark.parametrize("answer", [b"\xff" * 8, b"\x0b" * DEEP + b"\x0c" * DEEP, b"", b"\x0a\x02\x08"])
def test_nmx_c(answer: bytes) -> None:
    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            async def unary(_request: bytes, _context: object) -> bytes:
                return answer

            async def stream(_request: bytes, _context: object) -> AsyncIterator[bytes]:
                yield answer

            if handler_call_details.method.endswith("/Subscribe"):
                return grpc.unary_stream_rpc_method_handler(stream)
            return grpc.unary_unary_rpc_method_handler(unary)

    async def scenario() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Handler(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        driver = NmxcDriver(f"http://127.0.0.1:{port}", clock=lambda: 1.0)
        try:
            with pytest.raises(FabricUnavailable, match="Hello: "):
                await driver.observe()
            call = driver._session.subscribe(1)
            with pytest.raises(FabricUnavailable, match="Subscribe: "):
                await last_notification(call)
        finally:
            await driver.close()
            await server.stop(None)

    asyncio.run(scenario())


def test_an_answer_of_nmx_c_has_a_largest_size() -> None:
    assert dict(nmxc._CHANNEL_OPTIONS)["grpc.max_receive_message_length"] == MAX_BYTES
