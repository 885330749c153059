import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waiting import PATIENCE

from rackloom.core.transfer.values import TransferSpec
from rackloom.errors import Refused, Retry
from rackloom.prove.transfer.channel import (
    MAX_FRAME_BODY,
    Begin,
    Channel,
    Offer,
    Refusal,
    Served,
    Wire,
    accept_channel,
    check_secret,
    connect_channel,
    receive_served,
)

SECRET = b"0123456789abcdef"
KEY = b"k" * 32


def wire(sock: socket.socket, seconds: float = PATIENCE) -> Wire:
    return Wire(sock, time.monotonic() + seconds, time.monotonic)


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


def shake(initiator_secret: bytes, target_secret: bytes) -> tuple[object, object]:
    """The results of both halves of the handshake: a channel or the error."""

    def outcome(half: object, sock: socket.socket, secret: bytes) -> object:
        try:
            return half(wire(sock), secret)  # type: ignore[operator]
        except (Refused, Retry) as error:
            return error

    with pair() as (a, b), ThreadPoolExecutor(1) as pool:
        target = pool.submit(outcome, accept_channel, b, target_secret)
        initiator = outcome(connect_channel, a, initiator_secret)
        return initiator, target.result()


def frame(message: object, role: str = "initiator") -> bytes:
    """The bytes that the first frame of `role` puts on the wire."""
    with pair() as (a, b):
        Channel(wire(a), KEY, role).send(message)  # type: ignore[arg-type]
        return b.recv(1 << 16)


def receive(raw: bytes, count: int = 1) -> list[object]:
    """The messages that a target receives if `raw` arrives and the connection closes after it."""
    with pair() as (a, b):
        a.sendall(raw)
        a.shutdown(socket.SHUT_WR)
        channel = Channel(wire(b), KEY, "target")
        return [channel.receive(Offer) for _ in range(count)]


def test_the_same_secret_opens_a_channel_in_both_directions() -> None:
    with pair() as (a, b), ThreadPoolExecutor(1) as pool:
        opening = pool.submit(accept_channel, wire(b), SECRET)
        here = connect_channel(wire(a), SECRET)
        there = opening.result()
        offer = Offer(TransferSpec(block_size=1 << 20))
        here.send(offer)
        assert there.receive(Offer) == offer
        there.send(Served(b"meta", ((4096, 1 << 20, 0),)))
        assert receive_served(here) == Served(b"meta", ((4096, 1 << 20, 0),))
        there.send(Refusal("too large", "ask for less"))
        with pytest.raises(Refused, match="the target refused: too large; ask for less"):
            receive_served(here)


def test_different_secrets_are_refused_at_both_ends() -> None:
    for outcome in shake(SECRET, SECRET[::-1]):
        assert isinstance(outcome, Refused)
        assert "different secrets" in outcome.reason
        assert SECRET.decode() not in str(outcome)


def test_a_target_that_only_echoes_does_not_pass_for_one_with_the_secret() -> None:
    with pair() as (a, b), ThreadPoolExecutor(1) as pool:
        opening = pool.submit(connect_channel, wire(a), SECRET)
        b.sendall(b.recv(1 << 10))  # our own prefix and nonce
        b.sendall(b.recv(1 << 10))  # our own proof
        with pytest.raises(Refused, match="different secrets"):
            opening.result()


def test_a_session_cannot_be_replayed_to_the_target() -> None:
    with pair() as (a, b), ThreadPoolExecutor(1) as pool:
        opening = pool.submit(accept_channel, wire(b), SECRET)
        with _Recorded(a) as spied:
            connect_channel(wire(spied), SECRET)
        opening.result()
    with pair() as (a, b), ThreadPoolExecutor(1) as pool:
        opening = pool.submit(accept_channel, wire(b), SECRET)
        a.sendall(b"".join(spied.sent))
        with pytest.raises(Refused, match="different secrets"):
            opening.result()


class _Recorded(socket.socket):
    """A socket that records the bytes sent through it."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(fileno=sock.detach())
        self.sent: list[bytes] = []

    def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
        self.sent.append(bytes(data))
        super().sendall(data, flags)


@given(st.binary(max_size=300))
def test_no_bytes_of_a_stranger_open_a_channel(raw: bytes) -> None:
    with pair() as (a, b):
        a.sendall(raw)
        a.shutdown(socket.SHUT_WR)
        with pytest.raises((Refused, Retry)):
            accept_channel(wire(b), SECRET)


@given(st.binary(max_size=300))
def test_no_bytes_without_the_key_are_a_message(raw: bytes) -> None:
    with pytest.raises((Refused, Retry)):
        receive(raw)


OFFER = Offer(TransferSpec(block_size=4096))


@given(st.data())
def test_any_altered_byte_is_noticed(data: st.DataObject) -> None:
    raw = bytearray(frame(OFFER))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises((Refused, Retry)):
        receive(bytes(raw))


@given(st.integers(0, len(frame(OFFER)) - 1))
@settings(max_examples=30)
def test_a_truncated_message_means_that_the_peer_is_gone(length: int) -> None:
    with pytest.raises(Retry, match="closed"):
        receive(frame(OFFER)[:length])


def test_an_intact_message_is_received_and_a_replayed_one_is_not() -> None:
    assert receive(frame(OFFER)) == [OFFER]
    with pytest.raises(Refused, match="replayed"):
        receive(frame(OFFER) * 2, count=2)


def test_a_message_is_not_accepted_back_from_where_it_went() -> None:
    with pytest.raises(Refused, match="replayed"):
        receive(frame(OFFER, role="target"))


def test_an_oversized_announcement_is_refused_before_anything_is_read() -> None:
    with pytest.raises(Refused, match=f"limit is {MAX_FRAME_BODY}"):
        receive((MAX_FRAME_BODY + 1).to_bytes(4, "big") + bytes(32))


def test_an_oversized_message_is_not_sent() -> None:
    with pair() as (a, _), pytest.raises(Refused, match="fewer blocks"):
        Channel(wire(a), KEY, "initiator").send(Served(bytes(MAX_FRAME_BODY), ()))


@pytest.mark.parametrize("message", [Begin(), {"type": "Offer"}, {"type": "Offer", "spec": {"extra": 1}}, 7])
def test_an_authentic_but_wrong_message_is_refused(message: object) -> None:
    with pytest.raises(Refused, match="does not know"):
        receive(frame(message))


def test_an_authentic_offer_out_of_range_is_refused() -> None:
    spec = msgspec.to_builtins(TransferSpec()) | {"block_size": -1}
    with pytest.raises(Refused, match="block size: -1"):
        receive(frame({"type": "Offer", "spec": spec}))


def test_a_silent_peer_costs_no_more_than_the_deadline() -> None:
    with pair() as (_, b), pytest.raises(Retry):
        accept_channel(wire(b, seconds=0.05), SECRET)
    with pair() as (_, b), pytest.raises(Retry, match="over"):
        accept_channel(wire(b, seconds=-1.0), SECRET)


def test_a_gone_peer_is_noticed_without_waiting_or_taking_data() -> None:
    with pair() as (a, b):
        channel = Channel(wire(b), KEY, "target")
        assert channel.peer_is_there()
        a.sendall(frame(OFFER))
        assert channel.peer_is_there()
        assert channel.receive(Offer) == OFFER
        a.close()
        assert not channel.peer_is_there()


def test_a_guessable_secret_is_refused_without_repeating_it() -> None:
    with pytest.raises(Refused, match="7 characters") as refused:
        check_secret("hunter2")
    assert "hunter2" not in str(refused.value)
