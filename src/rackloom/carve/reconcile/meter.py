"""What the reconciler tells of its work to whoever counts: facts, not names of metrics."""

from typing import Protocol

import msgspec

from rackloom.carve.plan.values import Observation, Operation


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one operation; `state` is done, refused or unknown (no answer came)."""

    kind: str
    partition_name: str
    state: str
    message: str
    """The words of the controller: for operators."""
    code: str | None = None
    """Its name for why it refused."""


class Meter(Protocol):
    """Times are in seconds."""

    def passed(self, endpoint_id: str, seconds: float) -> None:
        """A pass over an endpoint ended."""
        ...

    def observed(self, endpoint_id: str, observation: Observation) -> None:
        """An endpoint was read."""
        ...

    def unreachable(self, endpoint_id: str, reason: str) -> None:
        """An endpoint could not be read, or an answer of it did not come."""
        ...

    def drifted(self, domain: str, operations: int) -> None:
        """A domain was found to differ from an intent that it was once seen to meet."""
        ...

    def refused(self, domain: str) -> None:
        """A plan was refused, by the check or because its facts no longer hold."""
        ...

    def operated(self, endpoint_id: str, operation: Operation, outcome: Outcome, seconds: float) -> None:
        """An operation was asked for, and answered or not."""
        ...

    def applied(self, domain: str, seconds: float) -> None:
        """All operations of a plan were asked for."""
        ...


class Silent:
    """Counts nothing."""

    def passed(self, endpoint_id: str, seconds: float) -> None:
        """Nothing."""

    def observed(self, endpoint_id: str, observation: Observation) -> None:
        """Nothing."""

    def unreachable(self, endpoint_id: str, reason: str) -> None:
        """Nothing."""

    def drifted(self, domain: str, operations: int) -> None:
        """Nothing."""

    def refused(self, domain: str) -> None:
        """Nothing."""

    def operated(self, endpoint_id: str, operation: Operation, outcome: Outcome, seconds: float) -> None:
        """Nothing."""

    def applied(self, domain: str, seconds: float) -> None:
        """Nothing."""
