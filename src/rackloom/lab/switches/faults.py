"""Faults of simulated controllers that a test or a scenario requests, one call at a time.

For NMX-C a fault belongs to the next call of an RPC: refuse it with a return code, delay it, lose its
reply, fail it with a gRPC status, or answer without the server header or without the id of a new
partition. Another writer may act right after a call. Lists may leave a partition out for a number of
reads. A frozen controller answers nothing and sends nothing, while its connections stay open.

For NMX-M a fault belongs to the next request of a method and collection: answer with an HTTP status,
lose the reply, fail or stall the operation, or answer with something that is not JSON. Lists of
partitions may lag behind the newest change, and GPUs may be missing from lists.

`NmxcFaults.untaken` names faults that no call met. A scenario with such a fault proves nothing.
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

import grpc
import msgspec

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb


class NmxcFault(msgspec.Struct, frozen=True, kw_only=True):
    """How one call fails."""

    refuse: str | None = None
    """Answer with this return code, and do nothing."""
    delay: float = 0.0
    """Seconds to wait before anything else."""
    drop_reply: bool = False
    """Carry out the call, then lose the answer."""
    no_header: bool = False
    """Answer without the server header."""
    no_id: bool = False
    """Answer without the id of the partition."""
    no_effect: bool = False
    """Answer with success, and do nothing."""
    status: tuple[grpc.StatusCode, str] | None = None
    """Fail with this gRPC status and these details, and do nothing."""
    afterwards: Callable[[], None] | None = None
    """The action of another writer after the answer has been made."""


Fault = TypeVar("Fault")


class CallFaults(Generic[Fault]):
    """Faults of coming calls, by the name of the call. Each strikes one call, in the order of `next`."""

    def __init__(self, no_fault: Fault) -> None:
        self._no_fault = no_fault
        self._next: dict[str, deque[Fault]] = defaultdict(deque)

    def next(self, call: str, fault: Fault) -> None:
        """Let the next call of this name fail."""
        self._next[call].append(fault)

    def take(self, call: str) -> Fault:
        """The fault of the call that is made now."""
        waiting = self._next[call]
        return waiting.popleft() if waiting else self._no_fault


class NmxcFaults(CallFaults[NmxcFault]):
    """Faults by RPC name, and partitions that lists leave out for a while."""

    def __init__(self) -> None:
        super().__init__(NmxcFault())
        self._hidden: dict[int, int] = {}
        self._is_awake = asyncio.Event()
        self._is_awake.set()
        self.calls: Counter[str] = Counter()
        """Calls that have arrived, by RPC."""

    def take(self, call: str) -> NmxcFault:
        """Count an RPC that is made now, and return its fault."""
        self.calls[call] += 1
        return super().take(call)

    def refuse_next(self, rpc: str, code: str) -> None:
        """Answer the next call of `rpc` with a return code, e.g. `NOT_READY`."""
        self.next(rpc, NmxcFault(refuse=code))

    def drop_reply_of_next(self, rpc: str) -> None:
        """Carry out the next call of `rpc`, and break the connection before it is answered."""
        self.next(rpc, NmxcFault(drop_reply=True))

    def omit_header_of_next(self, rpc: str) -> None:
        """Answer the next call of `rpc` without saying whether it succeeded."""
        self.next(rpc, NmxcFault(no_header=True))

    def omit_id_of_next(self, rpc: str, *, carried_out: bool = False) -> None:
        """Answer the next call of `rpc` with success and without an id, whether or not it was carried out."""
        self.next(rpc, NmxcFault(no_id=True, no_effect=not carried_out))

    def freeze(self) -> None:
        """Answer nothing and send nothing until `thaw`. Connections stay open."""
        self._is_awake.clear()

    def thaw(self) -> None:
        """Answer again, also the calls that came while frozen."""
        self._is_awake.set()

    async def until_awake(self) -> None:
        """Return at once unless the controller is frozen."""
        await self._is_awake.wait()

    def hide_partition(self, partition_id: int, lists: int) -> None:
        """Leave a partition out of the next `lists` lists of partitions, though GPUs still name it."""
        self._hidden[partition_id] = lists

    def clear(self) -> None:
        """Cancel the faults that have not struck yet."""
        self._next.clear()
        self._hidden.clear()

    def untaken(self) -> list[str]:
        """The faults that have not struck yet."""
        calls = [f"{len(waiting)} calls of {rpc}" for rpc, waiting in self._next.items() if waiting]
        return calls + [f"{lists} lists without partition {number}" for number, lists in self._hidden.items()]

    def edit(self, reply: object) -> None:
        """Leave the hidden partitions out of a list of partitions."""
        if not isinstance(reply, pb.GetPartitionInfoListResponse):
            return
        hidden = self._hidden
        listed = [info for info in reply.partition_info_list if info.partition_id.partition_id not in hidden]
        del reply.partition_info_list[:]
        reply.partition_info_list.extend(listed)
        self._hidden = {number: lists - 1 for number, lists in hidden.items() if lists > 1}


# NMX-M.


class NmxmFault(msgspec.Struct, frozen=True, kw_only=True):
    """How one request fails."""

    status: int = 0
    """Answer with this HTTP status, and do nothing. 0 means no such fault."""
    drop_reply: bool = False
    """Carry out the request, then break the connection."""
    fails: str = ""
    """Accept the change, and let its operation fail with this error."""
    stalls: bool = False
    """Accept the change, and leave its operation in progress until it is cancelled or `resume` is called."""
    garbage: bool = False
    """Answer with something that is no JSON."""


class NmxmFaults(CallFaults[NmxmFault]):
    """Faults by method and collection, as `PUT partitions`, and lists that lag behind."""

    def __init__(self) -> None:
        super().__init__(NmxmFault())
        self.lag = 0
        """How many more lists of partitions are as before the newest change."""
        self.hidden_gpus: set[int] = set()
        """GUIDs that the list of GPUs leaves out though NMX-M counts them."""
        self.hidden_partitions: set[int] = set()
        """Numbers of partitions that their list leaves out."""
