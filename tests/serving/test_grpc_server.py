"""The relay in front of gRPC: the calls that it ends for strangers, and access to the socket behind it."""

import asyncio
import socket
import stat
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
import uvloop
from tests.attacks import PATIENCE, connected, is_closed
from tests.conftest import Authority
from tests.waiting import until_so

from rackloom.serving import acceptor
from rackloom.serving.acceptor import bound_socket
from rackloom.serving.grpc_server import GrpcServer, client_address
from rackloom.serving.limits import GrpcLimits

FEW = GrpcLimits(connections=4, connections_of_an_address=4)
LINGER_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with 0 seconds: `close` sends a reset."""
Call = Callable[[bytes], Awaitable[bytes]]


class Slow:
    """Answers a call when `finish` is set, or at once if the request is `now`."""

    def __init__(self) -> None:
        self.begun = 0
        self.finish = asyncio.Event()

    async def answer(self, request: bytes, _context: Any) -> bytes:
        self.begun += 1
        if request != b"now":
            await self.finish.wait()
        return b"done"

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        methods = {"Wait": grpc.unary_unary_rpc_method_handler(self.answer)}
        return [grpc.method_handlers_generic_handler("test.Slow", methods)]


@asynccontextmanager
async def served(
    slow: Slow, ended: list[str], authority: Authority, client: str | None, limits: GrpcLimits = FEW
) -> AsyncIterator[tuple[int, Call]]:
    """The port of a server, and a call of a client with this name in its certificate (None: no TLS)."""
    server_side = client_side = None
    if client is not None:
        pem, shown = authority.issue("server"), authority.issue(client)
        server_side = grpc.ssl_server_credentials(
            [(pem.key, pem.certificate)], authority.certificate, require_client_auth=True
        )
        client_side = grpc.ssl_channel_credentials(authority.certificate, shown.key, shown.certificate)
    server = GrpcServer(slow.handlers(), limits, server_side, ended.append)
    listener = bound_socket("127.0.0.1", 0)
    target = f"localhost:{listener.getsockname()[1]}"
    await server.start(listener)
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
    channel = (
        grpc.aio.insecure_channel(target, options)
        if client_side is None
        else grpc.aio.secure_channel(target, client_side, options)
    )
    try:
        yield int(target.rpartition(":")[2]), channel.unary_unary("/test.Slow/Wait")
    finally:
        await channel.close()
        await server.stop(0)


async def crowd_silently(port: int, addresses: list[str], ended: list[str]) -> None:
    """One silent connection after another from each address. Each is accepted before the next."""
    with ExitStack() as stack:
        for number, address in enumerate(addresses, 1):
            with suppress(OSError):
                stack.enter_context(await asyncio.to_thread(connected, port, address))
            if number >= FEW.connections:
                await until_so(lambda: bool(ended), "there is room for no more")
    await asyncio.sleep(0)


FROM_EVERYWHERE = [f"127.0.0.{number}" for number in range(2, 14)]
FROM_THE_SAME = ["127.0.0.1"] * 12


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("addresses", [FROM_EVERYWHERE, FROM_THE_SAME], ids=["everywhere", "same address"])
def test_strangers_do_not_end_a_call_of_a_client_with_a_certificate(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, addresses: list[str], run: Any
) -> None:
    monkeypatch.setattr(acceptor, "SPARED_SECONDS", 0.0)

    async def story() -> None:
        slow, ended = Slow(), []  # type: ignore[var-annotated]
        async with served(slow, ended, authority, "admin") as (port, call):
            answer = asyncio.ensure_future(call(b""))
            await until_so(lambda: slow.begun == 1, "the call is under way")
            assert await call(b"now") == b"done"
            await crowd_silently(port, addresses, ended)
            assert not answer.done()
            slow.finish.set()
            assert await answer == b"done"

    run(asyncio.wait_for(story(), PATIENCE))


def test_a_client_without_a_certificate_is_no_better_than_a_stranger(authority: Authority) -> None:
    async def story() -> None:
        slow, ended = Slow(), []  # type: ignore[var-annotated]
        async with served(slow, ended, authority, None) as (port, call):
            answer = asyncio.ensure_future(call(b""))
            await until_so(lambda: slow.begun == 1, "the call is under way")
            await crowd_silently(port, FROM_EVERYWHERE, ended)
            with pytest.raises(grpc.aio.AioRpcError):
                await answer

    asyncio.run(asyncio.wait_for(story(), PATIENCE))


def test_after_its_calls_a_connection_gives_way_again(authority: Authority) -> None:
    async def story() -> None:
        slow, ended = Slow(), []  # type: ignore[var-annotated]
        async with served(slow, ended, authority, "admin") as (port, call):
            assert await call(b"now") == b"done"
            await crowd_silently(port, FROM_EVERYWHERE, ended)
            assert set(ended) == {"evicted"}

    asyncio.run(asyncio.wait_for(story(), PATIENCE))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_of_a_client_that_reset_its_connection_nothing_is_held_or_logged(
    authority: Authority, caplog: pytest.LogCaptureFixture, run: Any
) -> None:
    async def story() -> None:
        slow, ended = Slow(), []  # type: ignore[var-annotated]
        async with served(slow, ended, authority, None) as (port, call):
            assert await call(b"now") == b"done"
            before = open_files()
            for _ in range(FEW.connections):
                # The event loop does not run during this, so it accepts connections that are already reset.
                for _ in range(FEW.connections - 1):
                    stranger = connected(port)
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
                    stranger.close()
                assert await call(b"now") == b"done"
                await until_so(lambda: open_files() == before, "nothing is held of the connections")
            assert ended == []

    run(asyncio.wait_for(story(), PATIENCE))
    assert caplog.records == []


@pytest.mark.parametrize("client", ["admin", None], ids=["tls", "plain"])
def test_a_client_that_never_says_anything_is_closed(authority: Authority, client: str | None) -> None:
    """A handshake has a time limit, with TLS or without."""
    limits = msgspec.structs.replace(FEW, handshake_seconds=0.3)

    async def story() -> None:
        slow, ended = Slow(), []  # type: ignore[var-annotated]
        async with served(slow, ended, authority, client, limits) as (port, call):
            with await asyncio.to_thread(connected, port) as stranger:
                await until_so(lambda: is_closed(stranger), "the stranger is closed")
            assert await call(b"now") == b"done"

    asyncio.run(asyncio.wait_for(story(), PATIENCE))


def open_files() -> int:
    """The number of open files and sockets of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("address", ["192.0.2.1", "::ffff:192.0.2.1"])
def test_a_client_over_ipv4_has_the_same_address_on_every_listener(address: str) -> None:
    assert client_address(f"unix:/tmp/x/7@{address}") == "192.0.2.1"


def found_in(directory: Path) -> list[tuple[Path, str]]:
    """The entries of a directory and their permissions."""
    return [(entry, stat.filemode(entry.stat().st_mode)) for entry in directory.iterdir()]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files. The path of pytest's is too long for a socket's name."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("TMPDIR", short)
        yield Path(short)


def test_no_other_user_reaches_the_socket_behind(authority: Authority, temporary: Path) -> None:
    async def story() -> None:
        slow = Slow()
        slow.finish.set()
        async with served(slow, [], authority, None) as (_, call):
            assert await call(b"") == b"done"
            ((directory, mode),) = found_in(temporary)
            assert mode == "drwx------"
            assert [mode[0] for _, mode in found_in(directory)] == ["s"]
        assert found_in(temporary) == []

    asyncio.run(asyncio.wait_for(story(), PATIENCE))


def test_a_long_temporary_directory_is_not_used(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("d" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))

    async def story() -> None:
        slow = Slow()
        slow.finish.set()
        async with served(slow, [], authority, None) as (_, call):
            assert await call(b"") == b"done"
            assert found_in(long) == []

    asyncio.run(asyncio.wait_for(story(), PATIENCE))


def test_a_server_that_never_started_leaves_nothing(temporary: Path) -> None:
    async def story() -> None:
        server = GrpcServer([], FEW)
        assert len(found_in(temporary)) == 1
        await server.stop(0)
        assert found_in(temporary) == []

    asyncio.run(story())
