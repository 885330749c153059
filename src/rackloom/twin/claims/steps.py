"""The steps of a story at which something may die: before and after whatever changes the world."""

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from unittest.mock import patch

from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.kinds import LEASE
from rackloom.twin.claims.life import Life, current
from rackloom.twin.kube.faults import Fault

_READS = ("get", "list")


class Steps:
    """Counts. `strike(step number, tray)` is called at each; it may kill whatever it likes.

    `server_is_down` is set while requests are answered by nobody.
    """

    def __init__(self, strike: Callable[[int, str], None]) -> None:
        self._strike = strike
        self.taken = 0
        self.server_is_down = False

    def take(self, tray: str) -> None:
        """A step on a tray; "" is where the controller runs."""
        self.taken += 1
        self._strike(self.taken, tray)

    def take_as(self, life: Life) -> None:
        """A step of a process, which may be its last. Raises `Killed`."""
        life.check()
        self.take(life.tray)
        life.check()

    @contextmanager
    def of_files(self) -> Iterator[None]:
        """Take a step wherever a process makes something durable; the sync itself is left out."""

        def synced(_handle: int) -> None:
            life = current()
            if life is not None:
                self.take_as(life)

        with patch.object(os, "fsync", synced):
            yield


def stepped(api: KubeApi, life: Life, steps: Steps) -> KubeApi:
    """`api` as `life` has it: every write is a step before it is sent and one after it was carried out."""
    return cast(KubeApi, _Stepped(api, life, steps))


class _Stepped:
    def __init__(self, api: KubeApi, life: Life, steps: Steps) -> None:
        self._api = api
        self._life = life
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._api, name)
        if name == "watch":
            return method
        return self._read(method) if name in _READS else self._written(method)

    def _read(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self._life.check()
            answer = await method(*args, **kwargs)
            self._life.check()
            return answer

        return call

    def _written(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            # The heartbeat of a leader is no step: how many there are says only how long a story is.
            take = self._life.check if LEASE in args else partial(self._steps.take_as, self._life)
            take()
            answer = await method(*args, **kwargs)
            take()
            if self._steps.server_is_down:
                raise Fault(lost="reply").error()
            return answer

        return call
