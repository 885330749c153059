"""Setting how GPUs are shared, and setting it back: each step can be repeated.

Source: nvidia-smi, `compute-policy --set-timeslice` (0 is the default) and `-c` (the compute mode).
"""

from collections.abc import Callable

from rackloom.claim.node.gpu.mps import MpsDaemons
from rackloom.claim.node.gpu.programs import Programs
from rackloom.claim.node.gpu.wanted import Sharing

DEFAULT_SLICE = 0
SHARED, EXCLUSIVE = "DEFAULT", "EXCLUSIVE_PROCESS"


async def share(wanted: Sharing, programs: Programs, daemons: MpsDaemons) -> None:
    """Have the GPUs shared as wanted. Raises `Retry` with what the program said, or `Refused`."""
    for uuid, number in wanted.time_slices.items():
        await programs.run(*compute_mode(uuid, SHARED))
        await programs.run(*time_slice(uuid, number))
    for uuid in wanted.exclusive:
        await programs.run(*compute_mode(uuid, EXCLUSIVE))
    for daemon in wanted.daemons:
        await daemons.ensure(daemon)


async def unshare(
    done: Sharing, programs: Programs, daemons: MpsDaemons, answers: Callable[[str], bool]
) -> None:
    """Undo `share`, whether it was finished or not. A GPU that is gone has lost its settings by itself."""
    for daemon in done.daemons:
        await daemons.stop(daemon.name)
    for uuid in filter(answers, done.exclusive):
        await programs.run(*compute_mode(uuid, SHARED))
    for uuid in filter(answers, done.time_slices):
        await programs.run(*time_slice(uuid, DEFAULT_SLICE))


def time_slice(uuid: str, number: int) -> tuple[str, ...]:
    """Sets the time slice of one GPU."""
    return ("nvidia-smi", "compute-policy", "-i", uuid, "--set-timeslice", str(number))


def compute_mode(uuid: str, mode: str) -> tuple[str, ...]:
    """Sets who may use one GPU: everybody, or one process (which is then MPS)."""
    return ("nvidia-smi", "-i", uuid, "-c", mode)
