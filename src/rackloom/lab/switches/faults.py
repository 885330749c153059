"""Faults of simulated controllers that a test or a scenario asks for, one call at a time.

For NMX-C a fault belongs to the next call of an RPC: refuse it with a return code, delay it, lose its
reply, or answer without the server header. Lists may leave a partition out for a number of reads.

For NMX-M a fault belongs to the next request of a method and collection: answer with an HTTP status,
lose the reply, fail or stall the operation, or answer with something that is not JSON. Lists of
partitions may lag behind the newest change, and GPUs may be missing from lists.

`NmxcFaults.untaken` names faults that struck nothing; a scenario in which that happens shows nothing.
"""

from collections import Counter, defaultdict, deque

import msgspec

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb


class NmxcFault(msgspec.Struct, frozen=True, kw_only=True):
    """How one call is mistreated."""

    refuse: str | None = None
    """Answer with this return code, and do nothing."""
    delay: float = 0.0
    """Seconds to wait before anything else."""
    drop_reply: bool = False
    """Do what is asked, then lose the answer."""
    no_header: bool = False
    """Answer without the server header."""


NO_NMXC_FAULT = NmxcFault()


class NmxcFaults:
    """Faults to come, by RPC name, and partitions that lists leave out for a while."""

    def __init__(self) -> None:
        self._next: dict[str, deque[NmxcFault]] = defaultdict(deque)
        self._hidden: dict[int, int] = {}
        self.calls: Counter[str] = Counter()
        """Calls that have arrived, by RPC."""

    def refuse_next(self, rpc: str, code: str) -> None:
        """Answer the next call of `rpc` with a return code, e.g. `NOT_READY`."""
        self._next[rpc].append(NmxcFault(refuse=code))

    def delay_next(self, rpc: str, seconds: float) -> None:
        """Let the next call of `rpc` wait."""
        self._next[rpc].append(NmxcFault(delay=seconds))

    def drop_reply_of_next(self, rpc: str) -> None:
        """Carry out the next call of `rpc`, and break the connection before it is answered."""
        self._next[rpc].append(NmxcFault(drop_reply=True))

    def omit_header_of_next(self, rpc: str) -> None:
        """Answer the next call of `rpc` without saying whether it succeeded."""
        self._next[rpc].append(NmxcFault(no_header=True))

    def hide_partition(self, partition_id: int, lists: int) -> None:
        """Leave a partition out of the next `lists` lists of partitions, though GPUs still name it."""
        self._hidden[partition_id] = lists

    def clear(self) -> None:
        """What was asked for and has not come yet does not come."""
        self._next.clear()
        self._hidden.clear()

    def untaken(self) -> list[str]:
        """What was asked for and has not come yet."""
        calls = [f"{len(waiting)} calls of {rpc}" for rpc, waiting in self._next.items() if waiting]
        return calls + [f"{lists} lists without partition {number}" for number, lists in self._hidden.items()]

    def take(self, rpc: str) -> NmxcFault:
        """The fault for this call of `rpc`."""
        self.calls[rpc] += 1
        waiting = self._next[rpc]
        return waiting.popleft() if waiting else NO_NMXC_FAULT

    def edit(self, reply: object) -> None:
        """Leave the hidden partitions out of a list of partitions."""
        if not isinstance(reply, pb.GetPartitionInfoListResponse):
            return
        hidden = self._hidden
        listed = [one for one in reply.partition_info_list if one.partition_id.partition_id not in hidden]
        del reply.partition_info_list[:]
        reply.partition_info_list.extend(listed)
        self._hidden = {number: lists - 1 for number, lists in hidden.items() if lists > 1}


# NMX-M.


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


NO_NMXM_FAULT = NmxmFault()


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
        return waiting.popleft() if waiting else NO_NMXM_FAULT
