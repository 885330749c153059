"""What a simulated kubelet leaves to others, as a real one does: devices, and processes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from rackloom.claim.kube.api import Object


class Devices(Protocol):
    """The DRA plugins of a node."""

    async def prepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        """Prepare the pod's allocated claims; called again after a failure, and after a restart.

        Raises:
            Retry, Refused: some claim is not prepared. As a kubelet does, the caller says so in an event on
                the pod and asks again.
        """
        ...

    async def unprepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        """Give back what `prepare` took; the claims are as they were then.

        Raises:
            Retry, Refused: something is still held. The caller asks again, and the pod stays until then.
        """
        ...


class Containers(Protocol):
    """The container runtime of a node."""

    async def run(self, node: str, pod: Object, ready: Callable[[], Awaitable[None]]) -> int:
        """Run all containers, call `ready` when they are, return the exit code; cancelled on deletion."""
        ...


class NoDevices:
    """No plugin: a pod with claims starts at once."""

    async def prepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        """Take nothing."""

    async def unprepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        """Give nothing back."""


class Idle:
    """Containers that are ready `start_s` seconds after their start and run until they are deleted."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._start_s = start_s

    async def run(self, node: str, pod: Object, ready: Callable[[], Awaitable[None]]) -> int:
        """Never returns."""
        await asyncio.sleep(self._start_s)
        await ready()
        await asyncio.Event().wait()
        return 0
