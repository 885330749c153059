"""One end of a transfer with a fault in it; run in place of `python -m rackloom.prove.transfer.end`."""

import os
import sys
import threading

from rackloom.prove.transfer import end, target
from rackloom.prove.transfer.buffers import Buffer, HostBuffer, Memory
from rackloom.prove.transfer.evidence import Recorder
from rackloom.prove.transfer.messages import Descriptor, Served
from rackloom.prove.transfer.values import EndRecord, Host


class Corrupting(Recorder):
    """Flips one bit of the target's buffer before it is hashed."""

    def finish(self, buffer: Buffer) -> EndRecord:
        assert isinstance(buffer, HostBuffer)
        buffer.array[buffer.array.size // 2] ^= 1
        return super().finish(buffer)


class Dying(Recorder):
    """Ends the target's process while the timed iterations run."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        threading.Timer(0.3, os._exit, (9,)).start()


def half(metadata: bytes, descriptors: tuple[Descriptor, ...], memory: Memory) -> Served:
    """Serves fewer blocks than were asked for."""
    return Served(metadata, descriptors[:1], memory)


if __name__ == "__main__":
    fault = sys.argv[1]
    if fault == "corrupt":
        target.Recorder = Corrupting
    elif fault == "die":
        target.Recorder = Dying
    elif fault == "stunted":
        target.Served = half
    elif fault == "silent":
        sys.stdin.read()
    elif fault == "crash":
        sys.exit("the reason it crashed")
    end.main()
