"""What can go wrong between a controller and its client, asked for by a test, one call at a time."""

from collections import defaultdict, deque

import msgspec

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """How one call is mistreated."""

    refuse: str | None = None
    """Answer with this return code, and do nothing."""
    delay: float = 0.0
    """Seconds to wait before anything else."""
    drop_reply: bool = False
    """Do what is asked, then lose the answer."""
    no_header: bool = False
    """Answer without the server header."""


NO_FAULT = Fault()


class Faults:
    """Faults to come, by RPC name, and partitions that lists leave out for a while."""

    def __init__(self) -> None:
        self._next: dict[str, deque[Fault]] = defaultdict(deque)
        self._hidden: dict[int, int] = {}

    def refuse_next(self, rpc: str, code: str) -> None:
        """Answer the next call of `rpc` with a return code, e.g. `NOT_READY`."""
        self._next[rpc].append(Fault(refuse=code))

    def delay_next(self, rpc: str, seconds: float) -> None:
        """Let the next call of `rpc` wait."""
        self._next[rpc].append(Fault(delay=seconds))

    def drop_reply_of_next(self, rpc: str) -> None:
        """Carry out the next call of `rpc`, and break the connection before it is answered."""
        self._next[rpc].append(Fault(drop_reply=True))

    def omit_header_of_next(self, rpc: str) -> None:
        """Answer the next call of `rpc` without saying whether it succeeded."""
        self._next[rpc].append(Fault(no_header=True))

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

    def take(self, rpc: str) -> Fault:
        """The fault for this call of `rpc`."""
        waiting = self._next[rpc]
        return waiting.popleft() if waiting else NO_FAULT

    def edit(self, reply: object) -> None:
        """Leave the hidden partitions out of a list of partitions."""
        if not isinstance(reply, pb.GetPartitionInfoListResponse):
            return
        hidden = self._hidden
        listed = [one for one in reply.partition_info_list if one.partition_id.partition_id not in hidden]
        del reply.partition_info_list[:]
        reply.partition_info_list.extend(listed)
        self._hidden = {number: lists - 1 for number, lists in hidden.items() if lists > 1}
