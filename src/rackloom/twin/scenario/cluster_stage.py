"""What a scenario can do to the processes of a cluster, wherever they run."""

from collections.abc import Sequence
from typing import Protocol

from rackloom.twin.imex.memory import ImexNetwork
from rackloom.twin.kube import FakeKube
from rackloom.twin.nodes.trays import Nodes


class Controllers(Protocol):
    """Rackloom's controllers, of which one life follows the other."""

    @property
    def ended(self) -> int:
        """Lives that were ended."""

    async def kill(self, down: float) -> None:
        """End this life, and let another begin after so many seconds."""

    def die(self, point: int, lives: int) -> None:
        """Let so many lives end at their `point`-th step: before a write, or after it."""

    def double(self) -> None:
        """Let others work beside these."""

    async def single(self) -> None:
        """End the others."""


class Candidates(Protocol):
    """Replicas of Rackloom's controllers, of which one leads. Leaders are called as in their Lease."""

    @property
    def leader(self) -> str | None:
        """Who leads now; None: nobody does."""

    @property
    def overlaps(self) -> Sequence[str]:
        """When two led at once, in words."""

    async def kill_leader(self, down: float) -> str | None:
        """End the leader without a word, and let it stand again so many seconds later; returns who it was."""

    def cut_off_leader(self) -> str | None:
        """Let it reach the API server no more; returns who it was."""

    def connect(self) -> None:
        """Let all reach it."""


class Clock(Protocol):
    """What the controllers' machine believes; `skew` is seconds more than the time."""

    skew: float


class Discovery(Protocol):
    """GPU Feature Discovery; `lag` is how many seconds later it writes what it found."""

    lag: float


class ClusterStage(Protocol):
    """A running cluster."""

    @property
    def kube(self) -> FakeKube:
        """The API server."""

    @property
    def nodes(self) -> Nodes:
        """The trays."""

    @property
    def imex(self) -> ImexNetwork:
        """Where the IMEX daemons truly are."""

    @property
    def controllers(self) -> Controllers:
        """Rackloom's; where several are elected, the first of them."""

    @property
    def candidates(self) -> Candidates | None:
        """Those who are elected; None: there is one, without an election."""

    @property
    def clock(self) -> Clock:
        """Theirs."""

    @property
    def discovery(self) -> Discovery:
        """The writer of nvidia.com/gpu.clique."""

    @property
    def addresses(self) -> dict[str, str]:
        """By node, the address that the next IMEX daemon's pod there gets."""
