"""Fair queueing: the order of service among flows, so that no flow waits for the backlog of another.

This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with equal weights. A flow is a sender
with one backlog, here an organisation. Each flow has a start tag: its service so far, in virtual time. Next
is the flow with the smallest tag, and among equals the one that has waited longest. Within a flow, items keep
their order. Virtual time is the start tag of the item that was taken last, and a flow that begins to wait
starts there: neither saved-up credit nor past use counts. The cost of an item need not be known before:
`charge` adds it to the tag of its flow when it is known.

Guarantee: a flow that begins to wait waits for at most one item of each other flow, and for the item in
service. A flow that waits all the time gets its equal share of the service, as measured by the costs.
"""

from collections import deque
from collections.abc import Collection
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items that wait, each in the queue of its flow."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}
        self._tags: dict[str, float] = {}
        self._virtual_time = 0.0

    @property
    def flows(self) -> Collection[str]:
        """The flows that have items waiting."""
        return self._waiting.keys()

    def add(self, flow: str, item: T) -> None:
        """Put `item` behind the others of its flow."""
        queue = self._waiting.get(flow)
        if queue is not None:
            queue.append(item)
            return
        self._waiting[flow] = deque((item,))
        self._tags[flow] = max(self._tags.get(flow, 0.0), self._virtual_time)

    def next_flow(self) -> str | None:
        """The flow of the next item, or None if nothing waits."""
        return min(self._waiting, key=self._tags.__getitem__, default=None)

    def take(self) -> tuple[str, T]:
        """The next item and its flow, which is `next_flow`. Something must wait."""
        flow = min(self._waiting, key=self._tags.__getitem__)
        self._virtual_time = self._tags[flow]
        queue = self._waiting[flow]
        item = queue.popleft()
        if not queue:
            del self._waiting[flow]
        return flow, item

    def charge(self, flow: str, cost: float) -> None:
        """Count `cost` as service that `flow` had."""
        if self._waiting:
            self._tags[flow] = max(self._tags.get(flow, 0.0), self._virtual_time) + cost
        else:
            # The end of a busy period: no flow is ahead of another any more.
            self._tags.clear()
            self._virtual_time = 0.0
