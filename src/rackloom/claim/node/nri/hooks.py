"""What a runtime tells of pod sandboxes, and who listens."""

from typing import Protocol

import msgspec


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """One pod sandbox."""

    id: str
    pod: str
    """UID of the pod."""
    namespace: str
    name: str
    netns: str
    """Path of its network namespace; empty for a pod in the host's."""


class Hooks(Protocol):
    """Told of sandboxes, in the order in which things happen to each."""

    async def synchronize(self, living: tuple[Sandbox, ...]) -> None:
        """All sandboxes there are, whenever the connection is made anew. Must not raise."""
        ...

    async def run(self, sandbox: Sandbox) -> None:
        """It is being started. An error fails the pod, which kubelet then tries again."""
        ...

    async def stop(self, sandbox: Sandbox) -> None:
        """It is being stopped; its namespace is still there. Must not raise."""
        ...
