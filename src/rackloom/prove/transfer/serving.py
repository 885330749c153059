"""Several targets at once, a process for each: UCX reads its pins from the environment of its process."""

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack

import msgspec

from rackloom.prove.transfer.events import BeTarget, Done, Failed, Listening, TurnedAway
from rackloom.prove.transfer.memory import require
from rackloom.prove.transfer.pairing import spread_cores
from rackloom.prove.transfer.processes import End
from rackloom.prove.transfer.values import Seat

_START_SECONDS = 30.0


def serve_seats(
    host: str,
    port: int,
    secret: str,
    seats: Sequence[Seat],
    say: Callable[[str], None],
    *,
    once: bool,
    timeout: float,
) -> None:
    """Serve seat k at `port` + k, until every one has served (`once`, within `timeout` seconds) or for ever.

    Raises:
        Refused, Retry: what the first target that failed failed with.
    """
    require()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(seats)))  # left last: its threads end with the ends
        ends = []
        for k, seat in enumerate(_on_own_cores(seats)):
            order = BeTarget(host, port + k, seat, once, timeout)
            ends.append(stack.enter_context(End((), secret, order)))
            ends[-1].expect(Listening, time.monotonic() + _START_SECONDS)
            nics = ", ".join(seat.ucx.net_devices)
            say(f"listening on {host} port {port + k} for {seat.device} over {nics}")
        deadline = time.monotonic() + timeout + _START_SECONDS if once else math.inf
        following = [pool.submit(_follow, end, deadline, say) for end in ends]
        over, _ = wait(following, return_when=FIRST_EXCEPTION)
        for one in over:
            one.result()


def _on_own_cores(seats: Sequence[Seat]) -> Sequence[Seat]:
    """The seats with a part of the processors each, if there are enough; the reports say if not."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < len(seats):
        return seats
    parts = spread_cores(len(seats), usable)
    return [msgspec.structs.replace(seat, cores=part) for seat, part in zip(seats, parts, strict=True)]


def _follow(end: End, deadline: float, say: Callable[[str], None]) -> None:
    """Repeat what a target says until it is done."""
    while not isinstance(event := end.event(deadline), Done):
        if isinstance(event, TurnedAway):
            say(f"{event.peer}: {event.reason}")
        elif isinstance(event, Failed):
            raise event.error()
