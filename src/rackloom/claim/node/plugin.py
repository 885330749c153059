"""What a kind of device has to say for itself; everything else is the framework's."""

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any, Protocol

from rackloom.claim.node.values import Claim, DeviceHealth, Entry, Pool, Prepared


class Plugin(Protocol):
    """The devices of one driver on one node.

    `prepare` and `unprepare` are single attempts: they are called again, so they must be idempotent, and they
    may be cut off after any step. They raise `Retry` for what may pass and `Refused` for what will not.
    """

    @property
    def driver(self) -> str:
        """Name of the driver, as device classes and claims spell it."""
        ...

    @property
    def kinds(self) -> tuple[str, ...]:
        """Every `PreparedDevice.kind` that it can prepare."""
        ...

    def missing(self) -> str | None:
        """What has to appear on this node before it has devices at all, such as a driver; None for nothing.

        The plugin waits for it, and answers kubelet meanwhile: claims of before must be given back.
        """
        ...

    async def pools(self) -> tuple[Pool, ...]:
        """What to publish now. Raises `Retry` when the devices cannot be read at present."""
        ...

    def intent(self, claim: Claim) -> Mapping[str, Any]:
        """What `unprepare` needs to undo a `prepare` that was cut off; stored before the first attempt.

        Raises `Refused` for a claim that can never be prepared. Touches nothing.
        """
        ...

    async def prepare(self, claim: Claim) -> Prepared:
        """Make the devices of `claim` usable."""
        ...

    def changes(self, claim: Claim) -> AsyncIterator[None]:
        """Yield whenever a waiting claim is worth another attempt before its time."""
        ...

    async def unprepare(self, entry: Entry, others: Collection[Entry]) -> None:
        """Undo `prepare`, whether it was finished or not, but leave what `others` on this node still use.

        The claim may be gone from the API server.
        """
        ...

    async def tidy(self, claims: Collection[Entry]) -> None:
        """Remove what no claim uses any more and `unprepare` leaves behind."""
        ...

    async def run(self, wake: Callable[[], None]) -> None:
        """Watch the devices for as long as the plugin runs; `wake` has them published again."""
        ...

    async def health(self) -> tuple[DeviceHealth, ...]:
        """Health of every published device."""
        ...
