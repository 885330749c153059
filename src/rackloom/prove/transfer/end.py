"""The process of one end: `python -m rackloom.prove.transfer.end`, spoken to as in `processes`.

It takes the secret and one order from standard input, carries it out and exits with 0, with 1 after a
Failed event, or with 3 when standard input closes, because then no process is left to read a result. Standard
output is kept for events: whatever a library prints goes to standard error. The process leaves with
`os._exit`, since destructors of a backend can block for ever after its peer has vanished.
"""

import os
import sys
import threading
import time
from functools import partial
from typing import BinaryIO, TextIO

import msgspec

from rackloom.errors import Refused, Retry
from rackloom.prove.transfer import endpoints
from rackloom.prove.transfer.channel import check_secret
from rackloom.prove.transfer.processes import (
    BeTarget,
    Done,
    Event,
    Failed,
    Listening,
    Order,
    TurnedAway,
    Warm,
)
from rackloom.runtime.foreign_text import decode_json

ORPHANED = 3
"""Exit code when standard input closed: the parent process is gone."""
_started = threading.Event()


def main() -> None:
    """Take the secret and one order from standard input, carry it out, exit 0, or 1 after a Failed."""
    out = _private_stdout()
    try:
        secret = check_secret(sys.stdin.buffer.readline().decode().rstrip("\n"))
        order = decode_json(sys.stdin.buffer.readline(), "the order", Order)
        threading.Thread(target=_watch_parent, args=(sys.stdin.buffer,), daemon=True).start()
        _emit(out, carry_out(order, secret, out))
        code = 0
    except Retry as retry:
        _emit(out, Failed(retry.reason, after=retry.after))
        code = 1
    except Refused as refused:
        _emit(out, Failed(refused.reason, refused.nearest_fix))
        code = 1
    # Destructors of a backend can wait for ever for a peer that vanished. The report is already out.
    os._exit(code)


def carry_out(order: Order, secret: bytes, out: TextIO) -> Done:
    """Run the end that `order` describes, until it is over.

    Raises:
        Refused, Retry: as the end in question.
    """
    if not isinstance(order, BeTarget):
        ready = partial(_await_start, out) if order.hold else None
        return Done(endpoints.run_initiator(order.host, order.port, secret, order.spec, order.config, ready))
    with endpoints.listen_for_initiator(order.host, order.port) as listener:
        _emit(out, Listening(order.host, listener.getsockname()[1]))
        endpoints.serve_target(
            listener,
            secret,
            order.config,
            lambda peer, reason: _emit(out, TurnedAway(peer, reason)),
            once=order.once,
            deadline=time.monotonic() + order.timeout_seconds if order.once else None,
        )
    return Done()


def _private_stdout() -> TextIO:
    """Keep standard output for events: whatever a library prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _emit(out: TextIO, event: Event) -> None:
    out.write(msgspec.json.encode(event).decode() + "\n")
    out.flush()


def _await_start(out: TextIO, seconds: float) -> None:
    _emit(out, Warm())
    if not _started.wait(seconds):
        raise Retry("nobody said when to start", after=1.0)


def _watch_parent(stdin: BinaryIO) -> None:
    """Any further line starts the timing. End of input means that the parent process is gone."""
    for _ in stdin:
        _started.set()
    os._exit(ORPHANED)


if __name__ == "__main__":
    main()
