"""Where the plugin has its knowledge of GPUs from: NVIDIA's driver, or a declaration in its place."""

from typing import Protocol

from rackloom.claim.node.gpu.inventory import Inventory, Xid


class GpuSource(Protocol):
    """The GPUs of this node. Every method blocks, and belongs in a thread."""

    def read(self) -> Inventory:
        """All GPUs that answer. Raises `Retry` when that is unknown, `Refused` without a driver."""
        ...

    def wait(self, seconds: float) -> tuple[Xid, ...]:
        """Errors that happen within `seconds`; returns at the first. Raises `Retry`."""
        ...

    def unmonitored(self) -> frozenset[str]:
        """UUIDs of GPUs whose errors cannot be listened to."""
        ...

    def close(self) -> None:
        """Let go of the driver."""
        ...
