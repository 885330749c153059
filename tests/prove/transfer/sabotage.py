"""One end of a transfer with a fault in it; run in place of `python -m rackloom.prove.transfer.end`."""

import os
import sys
import threading

from rackloom.prove.transfer import channel, end, endpoints
from rackloom.prove.transfer.buffers import Buffer, HostBuffer, MemoryKind
from rackloom.prove.transfer.channel import BlockDescriptor, Served
from rackloom.prove.transfer.endpoints import EvidenceRecorder
from rackloom.prove.transfer.values import EndRecord, HostFacts


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
    """Serves fewer blocks than were asked for."""
    return Served(metadata, descriptors[:1], memory)


if __name__ == "__main__":
    fault = sys.argv[1]
    if fault == "corrupt":
        endpoints.EvidenceRecorder = Corrupting
    elif fault == "die":
        endpoints.EvidenceRecorder = Dying
    elif fault == "stunted":
        channel.Served = half
    elif fault == "silent":
        sys.stdin.read()
    elif fault == "crash":
        sys.exit("the reason it crashed")
    end.main()
