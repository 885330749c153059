"""Where a scenario is played: a site whose switches can be broken, with the production service on it."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from rackloom.prove.doctor.findings import Finding
from rackloom.twin.scenario.site_actions import NetworkBad
from rackloom.twin.switches.fabric import SimulatedFabric
from rackloom.twin.switches.faults import Faults

Json = dict[str, Any]


class NotSeen(Exception):
    """A step did not come about; the text says what was seen instead."""


class Answer(msgspec.Struct, frozen=True):
    """What REST answered; `body` is None where there was none."""

    status: int
    body: Any


class Switch(Protocol):
    """The controller of one NVLink domain, and the fabric behind it as it truly is."""

    @property
    def fabric(self) -> SimulatedFabric:
        """GPUs and partitions; whoever changes it is a hand behind the site's back."""

    @property
    def faults(self) -> Faults:
        """How coming calls are mistreated."""

    @property
    def url(self) -> str:
        """Where it answers, or did before it went away."""

    async def stand_by(self) -> str:
        """Have another controller of the domain ready to lead; returns where it answers. It lists no GPU."""

    async def move(self) -> None:
        """That one leads: nobody answers at the address of before any more, and subscriptions end."""

    async def old_leader_returns(self) -> str:
        """Where the leader moved from one answers again, as leader, with what it knew; returns its URL."""

    async def old_leader_yields(self) -> None:
        """That one has learned who leads, and lists no GPU; nothing happens where it is away."""

    async def go_away(self) -> None:
        """Nobody answers there any more, and subscriptions end."""

    async def come_back(self) -> None:
        """It answers again; nothing happens where it does."""


class Site(Protocol):
    """The carve part: switches, and the service in front of them. Times are in seconds."""

    @property
    def switches(self) -> Sequence[Switch]:
        """One for each domain, in the order of racks."""

    async def rest(self, tenant: str, method: str, path: str, body: Json | None = None) -> Answer | None:
        """One request below `/v2/org/{tenant}/nico/`; None: the connection was lost before the answer."""

    async def operate(self, method: str, path: str, body: Json | None = None) -> Answer | None:
        """The same as the site's operator, below the operator's org."""

    async def kill(self, down: float) -> None:
        """End the service, and start it again after so long."""

    def kill_at(self, point: int) -> None:
        """Let the service end at one of its next writes or calls, and start again."""

    def set_clock(self, by: float) -> None:
        """Set the clock of its machine."""

    def spoil(self, switch: int, how: NetworkBad) -> None:
        """Make the network in front of a switch bad."""

    def untaken(self) -> Sequence[str]:
        """What was asked of the network and of the service's lives, and has not happened yet."""

    def mend(self) -> None:
        """Networks and clock are good again."""

    async def findings(self) -> Sequence[Finding]:
        """What the doctor finds now. Raises Refused where there is none."""
