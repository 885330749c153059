"""One end of a transfer with a fault in it. It is run in place of `python -m rackloom.prove.transfer.end`."""

import os
import sys
import threading
from typing import Any

from rackloom.core.transfer.values import EndRecord, HostFacts
from rackloom.prove.transfer import end, endpoints
from rackloom.prove.transfer.buffers import Buffer, HostBuffer, MemoryKind
from rackloom.prove.transfer.channel import BlockDescriptor, Served
from rackloom.prove.transfer.endpoints import EvidenceRecorder


class Corrupting(EvidenceRecorder):
    """Flips one bit of the target's buffer before it is hashed."""

    def finish(self, buffer: Buffer) -> EndRecord:
        assert isinstance(buffer, HostBuffer)
        buffer.array[buffer.array.size // 2] ^= 1
        return super().finish(buffer)


class Dying(EvidenceRecorder):
    """Ends the target's process while the timed iterations run."""

    def __init__(self, host: HostFacts) -> None:
        super().__init__(host)
        threading.Timer(0.3, os._exit, (9,)).start()


def half(metadata: bytes, descriptors: tuple[BlockDescriptor, ...], memory: MemoryKind) -> Served:
    """Serves fewer blocks than were requested."""
    return Served(metadata, descriptors[:1], memory)


def record_at_target(recorder: type[EvidenceRecorder]) -> None:
    """Replace the recorder at the target alone: the initiator of this program stays sound."""
    timed_part = endpoints.record_timed_part

    def sabotaged(*arguments: Any) -> None:
        endpoints.EvidenceRecorder = recorder
        timed_part(*arguments)

    endpoints.record_timed_part = sabotaged


if __name__ == "__main__":
    fault = sys.argv[1]
    if fault == "corrupt":
        record_at_target(Corrupting)
    elif fault == "die":
        record_at_target(Dying)
    elif fault == "stunted":
        endpoints.Served = half
    elif fault == "silent":
        sys.stdin.read()
    elif fault == "crash":
        sys.exit("the reason it crashed")
    end.main()
