"""What the two ends say to each other over the control channel.

initiator: Offer, Begin, Finish; target: Served, Begun, Finished, or Refusal to an offer it cannot take.
"""

from typing import Literal

import msgspec

from rackloom.errors import Refused
from rackloom.prove.transfer.channel import Channel
from rackloom.prove.transfer.values import EndRecord, TransferSpec

Descriptor = tuple[int, int, int]
"""Address, length in bytes, device: NIXL's own triple."""


class Offer(msgspec.Struct, frozen=True, tag=True):
    """The measurement the initiator wants to make."""

    spec: TransferSpec


class Served(msgspec.Struct, frozen=True, tag=True):
    """The target's buffer is registered: NIXL agent metadata as raw bytes, one descriptor per block."""

    metadata: bytes
    descriptors: tuple[Descriptor, ...]
    memory: Literal["DRAM", "VRAM"] = "DRAM"


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The target will not do it."""

    reason: str
    nearest_fix: str | None


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Warm-ups are over: wipe the sink, read the counters."""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """Done; the timed iterations may start."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The last timed iteration is complete: read the counters, hash the buffer."""


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The target's side of the evidence."""

    record: EndRecord


def served(channel: Channel) -> Served:
    """The target's answer to an offer.

    Raises:
        Refused: the target declined, with its reason.
        Retry: the peer is gone or too slow.
    """
    answer = channel.receive(Served | Refusal)  # type: ignore[arg-type]  # a union is a type to msgspec
    if isinstance(answer, Refusal):
        raise Refused(f"the target refused: {answer.reason}", nearest_fix=answer.nearest_fix)
    return answer
