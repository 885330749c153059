"""What the reconciler needs of a switch controller, whichever protocol it speaks."""

from collections.abc import AsyncIterator
from typing import Protocol

from rackloom.carve.plan.values import Observation, Operation


class FabricUnavailable(Exception):
    """The controller could not be asked, or gave no complete answer: its state is unknown, not empty."""


class FabricRefused(Exception):
    """The controller answered and refused: it did nothing.

    `code` is its own name for the reason: for NMX-C the StReturnCode without `NMX_ST_` (RESOURCE_IN_USE),
    its number where it is not a published one, or the gRPC status by which the call was turned away. Tenants
    read the code, and never the message, which may hold addresses.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class FabricDriver(Protocol):
    """One controller endpoint."""

    async def observe(self) -> Observation:
        """Read the whole domain. Raises FabricUnavailable; never returns a partial reading."""
        ...

    async def execute(self, operation: Operation) -> int:
        """Carry out one operation and return the partition id it acted on.

        Raises FabricRefused when the controller says no, FabricUnavailable when the outcome is unknown.
        """
        ...

    def notifications(self) -> AsyncIterator[None]:
        """One item each time the fabric says that something changed. A wake-up, never a fact."""
        ...

    async def close(self) -> None:
        """Release the connection."""
        ...
