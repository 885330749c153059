"""The answers of a daemon's probe to kubelet and to any other client."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from tests.ports import reserved_ports

from rackloom.claim.imex.daemon import answer_probes
from rackloom.errors import Refused, Retry
from rackloom.serving.limits import IMEX_PROBE

REQUEST = b"GET / HTTP/1.1\r\nHost: pod\r\nUser-Agent: kube-probe/1.36\r\n\r\n"


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_ports() as number:
        yield number


async def ask(port: int, request: bytes = REQUEST) -> bytes:
    """The whole answer until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def test_a_probe_passes_when_the_daemon_is_ready_and_says_why_not_before(port: int) -> None:
    async def scenario() -> None:
        reasons = ["nvidia-imex is INITIALIZING"]

        async def look() -> None:
            if reasons:
                raise Retry(reasons[0], after=1.0)

        async with answer_probes("127.0.0.1", port, look):
            answer = await ask(port)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert answer.endswith(b"\r\n\r\nnvidia-imex is INITIALIZING\n")
            reasons.clear()
            assert (await ask(port)).startswith(b"HTTP/1.1 200 OK\r\n")
        with pytest.raises(OSError, match="Connect"):
            await ask(port)

    asyncio.run(scenario())


def test_requests_that_come_together_share_a_look(port: int) -> None:
    async def scenario() -> None:
        looks = []

        async def look() -> None:
            looks.append(None)
            await asyncio.sleep(0.5)

        async with answer_probes("127.0.0.1", port, look):
            answers = await asyncio.gather(*(ask(port) for _ in range(IMEX_PROBE.connections)))
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
        assert len(looks) == 1

    asyncio.run(scenario())


@pytest.mark.slow
def test_who_sends_nothing_or_too_much_is_cut_off_and_kubelet_is_answered_after(port: int) -> None:
    async def scenario() -> None:
        async def look() -> None:
            pass

        async with answer_probes("127.0.0.1", port, look):
            began = time.monotonic()
            answers = await asyncio.gather(
                *(ask(port, b"") for _ in range(3 * IMEX_PROBE.connections)),
                ask(port, b"x" * (16 * IMEX_PROBE.head_bytes)),
            )
            assert not any(answers)
            assert time.monotonic() - began < 10
            assert (await ask(port)).startswith(b"HTTP/1.1 200")

    asyncio.run(scenario())


def test_connections_that_are_held_open_keep_no_probe_away(port: int) -> None:
    async def scenario() -> None:
        async def look() -> None:
            pass

        async with answer_probes("127.0.0.1", port, look):
            held = [
                await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * IMEX_PROBE.connections)
            ]
            assert (await asyncio.wait_for(ask(port), 1)).startswith(b"HTTP/1.1 200")
            for _, writer in held:
                writer.close()

    asyncio.run(scenario())


def test_a_port_in_use_is_refused_with_what_to_do(port: int) -> None:
    async def scenario() -> None:
        async def look() -> None:
            pass

        async with answer_probes("127.0.0.1", port, look):
            with pytest.raises(Refused, match="cannot listen") as refused:
                async with answer_probes("127.0.0.1", port, look):
                    pass
        assert "--probe-port" in refused.value.nearest_fix

    asyncio.run(scenario())
