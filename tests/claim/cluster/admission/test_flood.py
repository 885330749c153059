"""A flood from some addresses. The API server, at another one, gets answers, and memory is bounded."""

import asyncio
import resource
import ssl
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.claim.cluster.admission.test_over_tls import review
from tests.waiting import until_so

from rackloom.app.listeners import serve_http
from rackloom.app.webhook import BODIES, MAX_BODY
from rackloom.serving.acceptor import FairShare, address_key
from rackloom.serving.limits import HttpLimits

FLOOD = Path(__file__).parent / "flood.py"
SECONDS = 10.0
TIMEOUT = 5.0
"""The API server's timeout, as the manifests set it."""
BOUND_MIB = 320
"""Of the 512 that the manifests give it."""
FILES = 8192


def memory(process):
    """Peak resident memory of a process in MiB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM"))


@contextmanager
def running(*words, **more):
    process = subprocess.Popen([sys.executable, str(FLOOD), *map(str, words)], text=True, **more)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


async def asked(port, authority, until):
    """The seconds that each review took, each on a separate connection. An error counts as never."""
    context = ssl.create_default_context(cafile=str(authority))
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "m"}]}}
    took = []
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            async with httpx2.AsyncClient(verify=context, timeout=TIMEOUT) as http:
                url = f"https://localhost:{port}/mutate-pods"
                answer = await http.post(url, json=review("pods", pod))
            took.append(time.monotonic() - began if answer.status_code == 200 else float("inf"))
        except httpx2.HTTPError:
            took.append(float("inf"))
        await asyncio.sleep(0.1)
    return took


@pytest.mark.slow
def test_the_api_server_is_answered_while_others_flood(tmp_path, capsys):
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most[1] < FILES:
        pytest.skip(f"NEEDS {FILES} OPEN FILES: {most[1]} are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(FILES, most[0]), most[1]))
    authority = tmp_path / "ca.pem"
    try:
        with running("serve", authority, stdout=subprocess.PIPE) as server:
            port = next(int(line.split()[1]) for line in server.stdout if line.startswith("port "))
            time.sleep(1)
            with running("attack", port, SECONDS) as flood:
                took = asyncio.run(asked(port, authority, time.monotonic() + SECONDS))
                assert flood.poll() in (None, 0)
            peak = memory(server)
            assert server.poll() is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    with capsys.disabled():
        sys.stdout.write(
            f"\nflood: {len(took)} reviews, slowest {max(took):.2f} s, server at most {peak} MiB\n"
        )
    assert took
    assert max(took) < TIMEOUT
    assert peak < BOUND_MIB


def test_the_one_who_holds_most_gives_way_and_the_oldest_first():
    lost = []
    shares = FairShare(4, 4)
    for number in range(4):
        assert shares.take("flood", 1, lambda number=number: lost.append(number))
    assert shares.take("flood", 1, lambda: None) is None
    assert shares.take("api", 1, lambda: None)
    assert shares.take("api", 1, lambda: None)
    assert lost == [0, 1]
    assert shares.take("api", 1, lambda: None) is None
    assert shares.held == 4


def test_what_is_in_use_is_not_taken_away():
    shares = FairShare(2, 2)
    for _ in range(2):
        shares.take("flood", 1, lambda: None).is_needed = True
    assert shares.take("api", 1, lambda: None) is None


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.booleans()), max_size=40),
    st.integers(1, 12),
)
def test_never_more_than_there_is_and_nobody_poorer_loses(asks, total):
    shares, held = FairShare(total, total), {}
    for owner, amount, gives_back in asks:
        before = {
            owner: sum(share.amount for share in held.values() if share.owner == owner) for owner in "abc"
        }
        lost = []
        share = shares.take(owner, amount, lambda lost=lost: lost.append(1))
        for key in [key for key, known in held.items() if known not in shares._shares.get(known.owner, ())]:
            gone = held.pop(key)
            assert before[gone.owner] > before[owner]
        if share is not None:
            held[id(share)] = share
            if gives_back:
                share.release()
                share.release()
                del held[id(share)]
        assert shares.held == sum(known.amount for known in held.values()) <= total


def test_an_address_is_one_whatever_it_is_written_as():
    assert address_key("::ffff:10.0.0.1") == address_key("10.0.0.1")
    assert address_key("fd00::1") == address_key("fd00::2%eth0") != address_key("fd00:0:0:1::1")
    assert address_key("") == ""
    assert BODIES >= 4 * MAX_BODY


SMALL = HttpLimits(
    connections=4,
    connections_of_an_address=3,
    handshake_seconds=0.3,
    head_seconds=1.0,
    body_seconds=0.6,
    answer_seconds=0.6,
    unread_seconds=0.5,
    head_bytes=1000,
    head_fields=8,
)


async def hung(scope, receive, send):
    """Answers all requests at once, except those at /hang, which it never answers."""
    if scope["path"] == "/hang":
        await asyncio.Event().wait()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def bounded(tls=None):
    ended = []
    async with serve_http(hung, "127.0.0.1:0", tls=tls, limits=SMALL, ended=ended.append) as port:
        yield port, ended


GET = b"GET / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "answer", "why"),
    [
        (GET + b"\r\n", b"HTTP/1.1 200", []),
        (GET + b"X: " + b"y" * 2000 + b"\r\n\r\n", b"HTTP/1.1 400", []),
        (GET + b"X: " + b"y" * 2000, b"HTTP/1.1 400", []),
        (GET + b"X: 1\r\n" * 8 + b"\r\n", b"HTTP/1.1 400", []),
        (b"GET /" + b"y" * 2000, b"HTTP/1.1 400", []),
        (GET, b"", ["head"]),
        (b"\r\n" * 20, b"", ["head"]),
        (b"", b"", ["head"]),
        (GET.replace(b"/ ", b"/hang ") + b"\r\n", b"", ["answer"]),
    ],
)
def test_every_part_of_a_request_is_bounded(sent, answer, why):
    async def run():
        async with bounded() as (port, ended):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            async with asyncio.timeout(10):
                found = b""
                with suppress(ConnectionResetError):
                    found = await (reader.read(12) if answer else reader.read())
            writer.close()
            assert found == answer
            assert ended == why

    asyncio.run(run())


@pytest.mark.slow
def test_a_request_before_the_last_is_answered_ends_the_connection():
    async def run():
        async with bounded() as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET.replace(b"/ ", b"/hang ") + b"\r\n" + GET + b"\r\n")
            async with asyncio.timeout(10):
                assert (await reader.read(12)) == b"HTTP/1.1 400"
            writer.close()

    asyncio.run(run())


def test_a_handshake_that_does_not_come_is_cut():
    async def run():
        async with bounded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)) as (port, ended):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(10):
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
            writer.close()
            await until_so(lambda: ended == ["handshake"], "it is counted")

    asyncio.run(run())


def test_one_address_does_not_get_all_and_the_oldest_gives_way_to_another():
    async def run():
        async with bounded() as (port, ended):

            async def connected(address):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
                opened.append(writer)
                return reader, writer

            opened = []
            for _ in range(SMALL.connections_of_an_address):
                await connected("127.0.0.2")
            with suppress(ConnectionResetError):
                await connected("127.0.0.2")
            await until_so(lambda: ended == ["full"], "the fourth of one address is refused")
            await connected("127.0.0.3")
            reader, writer = await connected("127.0.0.3")
            await until_so(lambda: "evicted" in ended, "the oldest gives way")
            writer.write(GET + b"\r\n")
            async with asyncio.timeout(10):
                assert await reader.read(12) == b"HTTP/1.1 200"
            for connection in opened:
                connection.close()

    asyncio.run(run())
