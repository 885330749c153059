"""The API server as one process reaches it, which may be cut off from it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

from rackloom.claim.kube.api import KubeApi, WatchEvent
from rackloom.twin.kube import Fault

PATIENCE = 5.0
"""Seconds after which a client stops waiting for an answer."""


class Link:
    """The way between, used through `api`. While it is cut nothing arrives, in either direction."""

    def __init__(self, api: KubeApi) -> None:
        self.api = cast(KubeApi, _Linked(api, self))
        self._whole = asyncio.Event()
        self._whole.set()

    def cut(self) -> None:
        """From now on requests are not answered, and watches are silent."""
        self._whole.clear()

    def mend(self) -> None:
        """It holds again."""
        self._whole.set()

    async def cross(self) -> None:
        """Get to the other side. Raises `KubeError` once a client would have given up."""
        if not self._whole.is_set():
            await asyncio.sleep(PATIENCE)
            raise Fault().error()

    async def hear(self) -> None:
        """Let a change be heard. Raises `KubeError`, once the way is mended, for one that was lost on it."""
        if not self._whole.is_set():
            await self._whole.wait()
            raise Fault().error()


class _Linked:
    def __init__(self, api: KubeApi, link: Link) -> None:
        self._api = api
        self._link = link

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._api, name)
        return self._watched(method) if name == "watch" else self._asked(method)

    def _asked(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._link.cross()
            answer = await method(*args, **kwargs)
            await self._link.cross()
            return answer

        return call

    def _watched(
        self, method: Callable[..., AsyncGenerator[WatchEvent, None]]
    ) -> Callable[..., AsyncGenerator[WatchEvent, None]]:
        async def follow(*args: Any, **kwargs: Any) -> AsyncGenerator[WatchEvent, None]:
            await self._link.cross()
            async with aclosing(method(*args, **kwargs)) as events:
                async for event in events:
                    await self._link.hear()
                    yield event

        return follow
