"""Messages between the control of a running simulated site and its clients, as JSON."""

from pathlib import Path

import msgspec


class ControlAccess(msgspec.Struct, frozen=True):
    """The content of `control.json`."""

    url: str
    token: str
    pid: int


def control_file(home: Path) -> Path:
    """The file in a home with the address and token of its site's control."""
    return home / "control.json"


class TrayReport(msgspec.Struct, frozen=True):
    """A tray."""

    name: str
    """The tray's name, such as `rack-01/slot-2`."""
    node: str
    """Its name in the cluster."""
    machine: str
    """Its id in REST."""


class SiteReport(msgspec.Struct, frozen=True, kw_only=True):
    """A running simulated site."""

    url: str
    """The address of REST and the rack map."""
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
    """A scenario file to play. `where` is its name in errors."""

    text: str
    name: str
    where: str


class Refusal(msgspec.Struct, frozen=True):
    """The body of a 400."""

    reason: str
    fix: str | None


class ClearedReport(msgspec.Struct, frozen=True):
    """The result of a clearing."""

    seen: str
