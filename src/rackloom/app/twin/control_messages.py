"""What the control of a running simulated site and its clients send one another, as JSON."""

from pathlib import Path

import msgspec


class ControlAccess(msgspec.Struct, frozen=True):
    """The content of `control.json`."""

    url: str
    token: str
    pid: int


def control_file(home: Path) -> Path:
    """Where the control of the site in a home says how it is reached."""
    return home / "control.json"


class TrayReport(msgspec.Struct, frozen=True):
    """A tray."""

    name: str
    """As `rack-01/slot-2`."""
    node: str
    """Its name in the cluster."""
    machine: str
    """Its id in REST."""


class SiteReport(msgspec.Struct, frozen=True, kw_only=True):
    """A running simulated site."""

    url: str
    """Of REST and the rack map."""
    kubeconfig: str
    """Path of the file that opens the cluster."""
    profile: str
    racks: int
    """Domains, each with a switch controller."""
    seed: str
    nodes_up: bool
    """Whether every tray has been registered as a node."""
    trays: tuple[TrayReport, ...]


class PlayRequest(msgspec.Struct, frozen=True):
    """A scenario file to play; `where` is how errors call it."""

    text: str
    name: str
    where: str


class Refusal(msgspec.Struct, frozen=True):
    """The body of a 400."""

    reason: str
    fix: str | None


class ClearedReport(msgspec.Struct, frozen=True):
    """What a clearing did."""

    seen: str
