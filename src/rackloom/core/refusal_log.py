"""Which refused requests get an entry in a log, so that a flood of them neither fills the log nor is lost.

Refused requests are counted in groups: those of one flow (here an organisation) that are alike (same key).
The first of a group is emitted at once. Later ones are counted, and emitted as one entry with their number
every `GROUP_SECONDS`. An emission takes a token of the flow: `BURST` at first, and one more every
`TOKEN_SECONDS` (a token bucket). A group that finds no token goes on counting. A flow has `MAX_GROUPS` groups
at most. Requests of further groups are left out, and counted in one group of the flow that needs no token
and is emitted every `GROUP_SECONDS`. Flows beyond `MAX_FLOWS` share one.

Guarantees: each refused request is counted in exactly one emission, once that is due. A flow causes at most
`BURST` emissions and then two a minute, whatever it sends. The memory is bounded.

`due` gives the entries to write, and `written` confirms them. Entries that cannot be written stay here.
"""

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

BURST = 30
TOKEN_SECONDS = 60.0
GROUP_SECONDS = 60.0
MAX_GROUPS = 30
MAX_FLOWS = 1024
MAX_EMISSIONS = 200
"""At a time: they are written in one transaction."""
SHARED_FLOW = ""
"""The flow of those beyond `MAX_FLOWS`."""


class Emission(msgspec.Struct, Generic[T], frozen=True):
    """Requests that one entry stands for: the first of them, how many, and the times of first and last."""

    flow: str
    key: Hashable
    """None if the requests are not alike and were left out."""
    sample: T
    requests: int
    first: float
    last: float


class _Group(Generic[T]):
    def __init__(self, sample: T) -> None:
        self.sample = sample
        self.requests = 0
        self.first = 0.0
        self.last = 0.0
        self.emitted_at: float | None = None

    def count(self, sample: T, now: float) -> None:
        if not self.requests:
            self.sample, self.first = sample, now
        self.requests += 1
        self.last = now

    def waits(self, now: float) -> bool:
        """Whether it is too early for another emission."""
        return self.emitted_at is not None and now - self.emitted_at < GROUP_SECONDS


class _Flow(Generic[T]):
    def __init__(self, now: float) -> None:
        self.groups: dict[Hashable, _Group[T]] = {}
        self.tokens = float(BURST)
        self.filled_at = now

    def fill(self, now: float) -> None:
        self.tokens = min(self.tokens + max(0.0, now - self.filled_at) / TOKEN_SECONDS, BURST)
        self.filled_at = max(now, self.filled_at)

    def sweep(self, now: float) -> None:
        """Forget the groups that have nothing to say."""
        self.groups = {key: group for key, group in self.groups.items() if group.requests or group.waits(now)}


class RefusalLog(Generic[T]):
    """Refused requests that are not written yet."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[T]] = {}

    def add(self, flow: str, key: Hashable, sample: T, now: float) -> None:
        """Count a refused request. `key` must not be None."""
        if flow not in self._flows and len(self._flows) >= MAX_FLOWS:
            flow = SHARED_FLOW
        state = self._flows.setdefault(flow, _Flow(now))
        if key not in state.groups and len(state.groups) >= MAX_GROUPS:
            key = None
        state.groups.setdefault(key, _Group(sample)).count(sample, now)

    def due(self, now: float, *, all_of_it: bool = False) -> Sequence[Emission[T]]:
        """At most `MAX_EMISSIONS` that are to be written now, oldest first.

        With `all_of_it` nothing waits for its time or for tokens.
        """
        found: list[Emission[T]] = []
        for name, flow in self._flows.items():
            flow.fill(now)
            tokens = int(flow.tokens)
            for key, group in flow.groups.items():
                if not group.requests:
                    continue
                if not all_of_it:
                    if group.waits(now) or (key is not None and tokens <= 0):
                        continue
                    tokens -= key is not None
                found.append(Emission(name, key, group.sample, group.requests, group.first, group.last))
        return sorted(found, key=lambda emission: emission.first)[:MAX_EMISSIONS]

    def written(self, emissions: Sequence[Emission[T]], now: float) -> None:
        """These were written. Later counts stay."""
        for emission in emissions:
            flow = self._flows[emission.flow]
            group = flow.groups[emission.key]
            group.requests -= emission.requests
            group.first, group.emitted_at = group.last, now
            flow.tokens -= emission.key is not None
        for flow in self._flows.values():
            flow.sweep(now)
        self._flows = {name: flow for name, flow in self._flows.items() if flow.groups or flow.tokens < BURST}
