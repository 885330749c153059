"""What the map is drawn from, and what it asks of whoever knows the site."""

from typing import Protocol

import msgspec

from rackloom.prove.doctor.findings import Finding
from rackloom.prove.picture.join import JoinedShares
from rackloom.prove.picture.values import Picture


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """One operation on a fabric, as a line of the timeline."""

    at: float
    """When it ended, or began where it has not; seconds since the epoch."""
    seconds: float | None = None
    """How long it took; None: it has not ended."""
    tenant: str | None
    """The organisation that asked for it; None: the site itself."""
    what: str
    where: str
    places: tuple[str, ...] = ()
    """What it was asked of, as `Finding.where` names things."""
    outcome: str
    """As the audit says it: done, refused, pending, unknown."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """All that is drawn, read at about one moment."""

    picture: Picture
    joined: JoinedShares | None = None
    """The GPUs of the picture, where somebody has joined them already."""
    findings: tuple[Finding, ...] | None = None
    """What the doctor objects to, the worst first; None: it has not examined this site."""
    examined_at: float | None = None
    """The moment of the picture that it examined, which may be an earlier one."""
    happenings: tuple[Happening, ...] = ()
    """Newest first."""


class Source(Protocol):
    """Who knows the site."""

    async def read(self) -> Reading:
        """The whole site now. Raises Retry or Unknown when it cannot be read."""
        ...

    async def changed(self) -> None:
        """Return when something may have changed since the last reading."""
        ...
