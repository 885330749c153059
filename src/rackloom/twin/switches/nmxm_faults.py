"""What can go wrong between an NMX-M and its client, asked for by a test, one request at a time."""

from collections import defaultdict, deque

import msgspec


class NmxmFault(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is mistreated."""

    status: int = 0
    """Answer with this HTTP status, and do nothing; 0: answer as ever."""
    drop_reply: bool = False
    """Do what is asked, then break the connection."""
    fails: str = ""
    """Accept the change, and let its operation fail with this error."""
    stalls: bool = False
    """Accept the change, and leave its operation in progress until it is cancelled or `resume` is called."""
    garbage: bool = False
    """Answer with something that is no JSON."""


NO_FAULT = NmxmFault()


class NmxmFaults:
    """Faults to come, by method and collection as `PUT partitions`, and lists that lag behind."""

    def __init__(self) -> None:
        self._next: dict[str, deque[NmxmFault]] = defaultdict(deque)
        self.lag = 0
        """How many more lists of partitions are as before the newest change."""
        self.hidden_gpus: set[int] = set()
        """GUIDs that the list of GPUs leaves out though NMX-M counts them."""

    def next(self, request: str, fault: NmxmFault) -> None:
        """Mistreat the next request of this kind."""
        self._next[request].append(fault)

    def take(self, request: str) -> NmxmFault:
        """The fault for this request."""
        waiting = self._next[request]
        return waiting.popleft() if waiting else NO_FAULT
