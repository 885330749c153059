"""The bytes between an NRI plugin and a runtime: two logical connections over one socket, ttrpc in each.

Facts: a mux frame is connection number and length (32 bits each, big endian), then data. A ttrpc message is
length, stream number, type and flags (32, 32, 8, 8 bits), then data of at most 4 MiB; it may be spread over
several mux frames. Streams that a client opens have odd numbers.
"""

import asyncio
import struct
from collections.abc import AsyncIterator

import msgspec

PLUGIN, RUNTIME = 1, 2
"""Connections: on the first the runtime calls the plugin, on the second the plugin calls the runtime."""
REQUEST, RESPONSE = 1, 2
LARGEST = 4 << 20
_MUX = struct.Struct(">II")
_TTRPC = struct.Struct(">IIBB")


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One ttrpc message."""

    connection: int
    stream: int
    type: int
    data: bytes

    def encode(self) -> bytes:
        """The bytes on the socket: one mux frame, so that the reader needs no memory of earlier ones."""
        message = _TTRPC.pack(len(self.data), self.stream, self.type, 0) + self.data
        return _MUX.pack(self.connection, len(message)) + message


class Malformed(Exception):
    """The other side does not speak ttrpc."""


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[Frame]:
    """Frames until the other side hangs up. Raises `Malformed`."""
    pending = {PLUGIN: b"", RUNTIME: b""}
    while True:
        try:
            connection, length = _MUX.unpack(await reader.readexactly(_MUX.size))
            if length > LARGEST + _TTRPC.size:
                raise Malformed(f"a frame of {length} bytes")
            data = await reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        if connection not in pending:
            continue
        pending[connection] += data
        while (found := _first(connection, pending[connection])) is not None:
            frame, size = found
            pending[connection] = pending[connection][size:]
            yield frame


def _first(connection: int, data: bytes) -> tuple[Frame, int] | None:
    if len(data) < _TTRPC.size:
        return None
    length, stream, kind, _ = _TTRPC.unpack_from(data)
    if length > LARGEST:
        raise Malformed(f"a message of {length} bytes")
    size = _TTRPC.size + length
    if len(data) < size:
        return None
    return Frame(connection=connection, stream=stream, type=kind, data=data[_TTRPC.size : size]), size
