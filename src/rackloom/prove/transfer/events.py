"""How an end is told what to do and tells what happened: one line of JSON each.

On standard input: the shared secret (a line of its own, so that no order ever holds it), then one order; when
standard input closes, whoever gave the order is gone and the end ends itself. On standard output: events.
"""

import msgspec

from rackloom.errors import Refused, Retry
from rackloom.prove.transfer.values import Measured, Seat, TransferSpec


class BeTarget(msgspec.Struct, frozen=True, tag=True):
    """Listen at `host`, `port` (0: any) and serve one initiator, or without `once` all that come."""

    host: str
    port: int
    seat: Seat
    once: bool
    timeout_seconds: float


class BeInitiator(msgspec.Struct, frozen=True, tag=True):
    """Measure `spec` against the target at `host`, `port`."""

    host: str
    port: int
    seat: Seat
    spec: TransferSpec
    hold: bool = False
    """Say Warm after the warm-ups, and time only once a further line arrives on standard input."""


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The target can be reached."""

    host: str
    port: int


class TurnedAway(msgspec.Struct, frozen=True, tag=True):
    """A connection did not lead to a measurement."""

    peer: str
    reason: str


class Warm(msgspec.Struct, frozen=True, tag=True):
    """The warm-ups are over; the initiator waits for the word to start."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The initiator has measured; a target has nothing to add."""

    measured: Measured | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The end gave up. `after` is set when trying again may help."""

    reason: str
    nearest_fix: str | None = None
    after: float | None = None

    def error(self) -> Refused | Retry:
        """The error that the end raised."""
        if self.after is not None:
            return Retry(self.reason, after=self.after)
        return Refused(self.reason, nearest_fix=self.nearest_fix)


Order = BeTarget | BeInitiator
Event = Listening | TurnedAway | Warm | Done | Failed
