"""Hearing of changed links."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress

_LINKS = 1
"""RTMGRP_LINK: the kernel tells of every link that comes, goes or changes."""


async def link_changes(*, settle: float, at_least_every: float) -> AsyncIterator[None]:
    """Yield at the start, `settle` seconds into each burst of changes, and every `at_least_every` seconds."""
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC) as handle:
        handle.setblocking(False)
        handle.bind((0, _LINKS))
        loop.add_reader(handle, _drain, handle, changed)
        try:
            while True:
                yield
                await asyncio.sleep(settle)
                with suppress(TimeoutError):
                    async with asyncio.timeout(at_least_every):
                        await changed.wait()
                changed.clear()
        finally:
            loop.remove_reader(handle)


def _drain(handle: socket.socket, changed: asyncio.Event) -> None:
    """What is told does not matter; a lost message (ENOBUFS) is a change too."""
    changed.set()
    with suppress(OSError):
        while handle.recv(1 << 16):
            pass
