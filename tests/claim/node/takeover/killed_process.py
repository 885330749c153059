"""A real process that takes a node over, or gives it back, and is killed (SIGKILL) at a file operation.

Each is forked from a server that has the modules loaded and no threads, as the process of a test may have.
"""

import multiprocessing
import os
import signal
import sys

from rackloom.claim.node.takeover.node_files import DRIVERS, NodePlaces, apply_takeover, give_back

FILE_EVENTS = {"open", "os.remove", "os.rename", "fcntl.flock"}
ACTS = {"apply": apply_takeover, "back": give_back}
KILLED, ENDED = -signal.SIGKILL, 0

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


def act_until_killed(act: str, places: NodePlaces, death: int) -> int | None:
    """Exit code of a process that is killed at file operation number `death`: KILLED, ENDED, or a failure."""
    process = _processes.Process(target=_act, args=(act, places, death))
    process.start()
    process.join(60)
    return process.exitcode


def _act(act: str, places: NodePlaces, death: int) -> None:
    left = death

    def die(event: str, _arguments: object) -> None:
        nonlocal left
        if event in FILE_EVENTS:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    ACTS[act](places, DRIVERS)
    # The interpreter's work at its end is no part of it.
    os._exit(ENDED)
