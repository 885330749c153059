"""What one end collects over the timed iterations: its counters, its usage, and its buffer's digest."""

import msgspec

from rackloom.prove.transfer.buffers import Buffer
from rackloom.prove.transfer.host import Meter
from rackloom.prove.transfer.memory import ucx_version
from rackloom.prove.transfer.path import read_counters, traffic
from rackloom.prove.transfer.values import EndRecord, Host


class Recorder:
    """Starts counting when made. The sink of the transfer wipes its buffer before."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._counters = read_counters()
        self._meter = Meter()

    def finish(self, buffer: Buffer) -> EndRecord:
        """Stop counting, then hash `buffer` (which takes longer than many a transfer)."""
        usage = self._meter.stop()
        moved = traffic(self._counters, read_counters())
        host = msgspec.structs.replace(self._host, ucx_version=ucx_version())
        return EndRecord(digest=buffer.digest(), traffic=moved, usage=usage, host=host)
