"""What the store needs of a database."""

from collections.abc import AsyncGenerator, Callable
from typing import Protocol, TypeVar

import sqlalchemy as sa

T = TypeVar("T")


class Backend(Protocol):
    """One database; see `Store` for what each promise means."""

    is_shared: bool

    async def transact(self, work: Callable[[sa.Connection], T], *, write: bool) -> T:
        """Run `work` in one serializable (or read-only) transaction."""
        ...

    async def survey(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work`, which reads much, beside what else is asked meanwhile."""
        ...

    def changes(self) -> AsyncGenerator[str | None, None]:
        """Domains whose intent changed; None when some may have been missed."""
        ...

    async def close(self) -> None:
        """Finish and release everything."""
        ...
