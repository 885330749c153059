"""The control channel between two ends: authenticated frames over TCP, and their messages.

NIXL needs a side channel for agent metadata and addresses. A peer that can write to it decides which memory
is overwritten, so every frame carries an HMAC-SHA256 under a session key that only holders of the shared
secret can derive. Direction and sequence number are part of the MAC: no replay, no reflection. Frames are
not encrypted. They hold addresses and counters, no payload.

Frame: 4 bytes length of the body (big-endian), 32 bytes MAC, body (msgpack, 1 MiB at most).

Handshake: the initiator sends its nonce, the target answers with its own, the initiator proves the secret
over both nonces, then the target does. The initiator goes first, so a stranger who connects learns
nothing from which the secret could be guessed.

Messages: the initiator sends Offer, Begin, Finish. The target answers Served, Begun, Finished, or Refusal
to an offer that it cannot take. Every read and write ends by the deadline of the `Wire`. A peer that is
gone or too slow is Retry, a wrong secret or an altered frame is Refused.
"""

import hmac
import secrets
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, TypeVar

import msgspec

from rackloom.core.transfer.values import EndRecord, TransferSpec
from rackloom.errors import Refused, Retry, Undecodable
from rackloom.runtime.foreign_text import decode_msgpack

# Frames and handshake.


MAX_FRAME_BODY = 1 << 20
"""Largest body of a frame: metadata (hundreds of bytes) and MAX_BLOCKS descriptors fit well."""
MIN_SECRET_CHARACTERS = 16
NONCE_BYTES = 32
PROTOCOL_PREFIX = b"rackloom-transfer-1 "
_REJECTED = bytes(NONCE_BYTES)
"""In place of the target's proof: the initiator's was wrong."""
_HEAD = struct.Struct("!I32s")

Role = Literal["initiator", "target"]
M = TypeVar("M")


def check_secret(secret: str) -> bytes:
    """The secret as key bytes.

    Raises:
        Refused: shorter than MIN_SECRET characters, so that it could be guessed.
    """
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise Refused(
            f"the shared secret has {len(secret)} characters",
            nearest_fix=f"use at least {MIN_SECRET_CHARACTERS}, such as the output of `openssl rand -hex 32`",
        )
    return secret.encode()


class Wire:
    """Exact reads and writes on one connected socket, all before `deadline` (of `clock`, seconds)."""

    def __init__(self, sock: socket.socket, deadline: float, clock: Callable[[], float]) -> None:
        self._sock, self.deadline, self._clock = sock, deadline, clock
        with suppress(OSError):  # a socket pair has no Nagle delay to turn off
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        """Send all of `data`.

        Raises:
            Retry: the peer is gone or too slow.
        """
        self._set_timeout()
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise Retry(f"the peer stopped listening: {error}", after=1.0) from error

    def receive(self, size: int) -> bytes:
        """Exactly `size` bytes.

        Raises:
            Retry: the peer closed the connection or is too slow.
        """
        data = bytearray()
        while len(data) < size:
            self._set_timeout()
            try:
                piece = self._sock.recv(size - len(data))
            except OSError as error:
                raise Retry(f"the peer stopped answering: {error}", after=1.0) from error
            if not piece:
                raise Retry("the peer closed the control channel", after=1.0)
            data += piece
        return bytes(data)

    def peer_is_there(self) -> bool:
        """Whether the connection stands. Takes no byte from it and never waits."""
        readable, _, _ = select.select([self._sock], [], [], 0)
        try:
            return not readable or bool(self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _set_timeout(self) -> None:
        left = self.deadline - self._clock()
        if left <= 0:
            raise Retry("the time for this transfer is over", after=1.0)
        self._sock.settimeout(left)


class Channel:
    """Authenticated messages over a `Wire`. Made by `connect_channel` and `accept_channel`."""

    def __init__(self, wire: Wire, key: bytes, role: Role) -> None:
        self._wire, self._key = wire, key
        self._mine = role.encode()
        self._theirs = b"target" if role == "initiator" else b"initiator"
        self._sent = self._received = 0

    def send(self, message: object) -> None:
        """Encode and send `message`.

        Raises:
            Refused: it is larger than a frame may be.
            Retry: the peer is gone or too slow.
        """
        body = msgspec.msgpack.encode(message)
        if len(body) > MAX_FRAME_BODY:
            raise Refused(f"a control message of {len(body)} bytes", nearest_fix="ask for fewer blocks")
        # The sender's role prevents reflection of a frame, the sequence number its replay or removal.
        mac = _frame_mac(self._key, self._mine, self._sent, body)
        self._sent += 1
        self._wire.send(_HEAD.pack(len(body), mac) + body)

    def receive(self, kind: type[M]) -> M:
        """The next message, which must be a `kind`.

        Raises:
            Refused: oversized, altered, replayed or malformed.
            Retry: the peer is gone or too slow.
        """
        size, mac = _HEAD.unpack(self._wire.receive(_HEAD.size))
        if size > MAX_FRAME_BODY:
            raise Refused(
                f"the peer announced a control message of {size} bytes; the limit is {MAX_FRAME_BODY}"
            )
        body = self._wire.receive(size)
        if not hmac.compare_digest(mac, _frame_mac(self._key, self._theirs, self._received, body)):
            raise Refused("a control message was altered or replayed")
        self._received += 1
        try:
            return decode_msgpack(body, "the peer", kind)
        except Undecodable as error:
            raise Refused(
                f"the peer sent a message this version does not know: {error.reason}",
                nearest_fix="run the same version of rackloom at both ends",
            ) from error

    def peer_is_there(self) -> bool:
        """Whether the peer still holds the connection."""
        return self._wire.peer_is_there()


def connect_channel(wire: Wire, secret: bytes) -> Channel:
    """The initiator's half of the handshake.

    Raises:
        Refused: the peer does not speak this protocol, or does not hold the same secret.
        Retry: the peer is gone or too slow.
    """
    mine = secrets.token_bytes(NONCE_BYTES)
    wire.send(PROTOCOL_PREFIX + mine)
    theirs = _receive_nonce(wire)
    # Both nonces are in every proof, so a recorded handshake cannot be replayed by either side.
    wire.send(_secret_proof(secret, b"initiator", mine, theirs))
    if not hmac.compare_digest(wire.receive(NONCE_BYTES), _secret_proof(secret, b"target", mine, theirs)):
        raise _wrong_secret()
    return Channel(wire, _secret_proof(secret, b"session", mine, theirs), "initiator")


def accept_channel(wire: Wire, secret: bytes) -> Channel:
    """The target's half of the handshake. The initiator has to prove itself first.

    Raises:
        Refused: the peer does not speak this protocol, or does not hold the same secret.
        Retry: the peer is gone or too slow.
    """
    theirs = _receive_nonce(wire)
    mine = secrets.token_bytes(NONCE_BYTES)
    wire.send(PROTOCOL_PREFIX + mine)
    if not hmac.compare_digest(wire.receive(NONCE_BYTES), _secret_proof(secret, b"initiator", theirs, mine)):
        wire.send(_REJECTED)
        raise _wrong_secret()
    wire.send(_secret_proof(secret, b"target", theirs, mine))
    return Channel(wire, _secret_proof(secret, b"session", theirs, mine), "target")


def _wrong_secret() -> Refused:
    return Refused("the two ends hold different secrets", nearest_fix="give both ends the same secret")


def _receive_nonce(wire: Wire) -> bytes:
    if wire.receive(len(PROTOCOL_PREFIX)) != PROTOCOL_PREFIX:
        raise Refused(
            "the peer does not speak this version of the control channel",
            nearest_fix="run the same version of rackloom at both ends",
        )
    return wire.receive(NONCE_BYTES)


def _secret_proof(secret: bytes, purpose: bytes, initiator_nonce: bytes, target_nonce: bytes) -> bytes:
    return hmac.digest(secret, PROTOCOL_PREFIX + purpose + b" " + initiator_nonce + target_nonce, "sha256")


def _frame_mac(key: bytes, sender: bytes, sequence: int, body: bytes) -> bytes:
    return hmac.digest(key, sender + b" " + sequence.to_bytes(8, "big") + body, "sha256")


# Messages.


BlockDescriptor = tuple[int, int, int]
"""Address, length in bytes, device: NIXL's own triple."""


class Offer(msgspec.Struct, frozen=True, tag=True):
    """The measurement the initiator wants to make."""

    spec: TransferSpec


class Served(msgspec.Struct, frozen=True, tag=True):
    """The target's buffer is registered: NIXL agent metadata as raw bytes, one descriptor per block."""

    metadata: bytes
    descriptors: tuple[BlockDescriptor, ...]
    memory: Literal["DRAM", "VRAM"] = "DRAM"


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The target declines the measurement."""

    reason: str
    nearest_fix: str | None


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Warm-ups are over: wipe the sink, read the counters."""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The counters are read. The timed iterations may start."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The last timed iteration is complete: read the counters, hash the buffer."""


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The target's side of the evidence."""

    record: EndRecord


def receive_served(channel: Channel) -> Served:
    """The target's answer to an offer.

    Raises:
        Refused: the target declined, with its reason.
        Retry: the peer is gone or too slow.
    """
    answer = channel.receive(Served | Refusal)  # type: ignore[arg-type]  # a union is a type to msgspec
    if isinstance(answer, Refusal):
        raise Refused(f"the target refused: {answer.reason}", nearest_fix=answer.nearest_fix)
    return answer
