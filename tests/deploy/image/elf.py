"""The header fields of an ELF file that the tests of the image need (64 bits, little-endian)."""

import struct
from collections.abc import Iterator

LOAD, DYNAMIC = 1, 2
NEEDED, STRTAB = 1, 5


def machine(data: bytes) -> int | None:
    """e_machine, or None if it is not an ELF file."""
    return struct.unpack_from("<H", data, 18)[0] if data[:4] == b"\x7fELF" else None


def needed(data: bytes) -> list[str]:
    """The libraries that the file names as needed."""
    segments = list(_segments(data))
    dynamic = [(offset, size) for kind, offset, _, size in segments if kind == DYNAMIC]
    if not dynamic:
        return []
    offset, size = dynamic[0]
    tags = list(struct.iter_unpack("<qQ", data[offset : offset + size - size % 16]))
    strings = next(value for tag, value in tags if tag == STRTAB)
    at = next(
        start + strings - address
        for kind, start, address, length in segments
        if kind == LOAD and address <= strings < address + length
    )
    return [data[at + value : data.index(b"\0", at + value)].decode() for tag, value in tags if tag == NEEDED]


def _segments(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Kind, offset, address and size in the file of each program header."""
    (start,), (size, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
    for number in range(count):
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", data, start + number * size)
        yield kind, offset, address, length
