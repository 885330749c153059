"""An HTTP server that is one of several in its process, for the service and for simulated controllers."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn


class HttpServer(uvicorn.Server):
    """Leaves signals to its process, and says when it answers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answering = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the business of the process: uvicorn's servers would handle them against each other."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say when it answers."""
        await super().startup(sockets)
        self.answering.set()


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises OSError, or OverflowError for no port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.create_server((host, port), family=family)
    # Connections inherit it. asyncio sets it only on sockets that name their protocol (uvloop on all), and
    # without it an answer of two writes waits 40 ms for a delayed acknowledgement.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound
