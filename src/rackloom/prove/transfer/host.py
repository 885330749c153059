"""What the host was doing while a transfer was timed.

Both ends poll, so each needs a processor of its own; any third runnable thread turns microseconds into
scheduler slices. An end that polled but got less processor time than went by was pushed aside, by another
process or by the hypervisor, and the report says so.
"""

import os
import platform
import resource
import time
from pathlib import Path

from rackloom.errors import Refused
from rackloom.prove.transfer.isolation import require_isolation
from rackloom.prove.transfer.links import read_links
from rackloom.prove.transfer.memory import nixl_version
from rackloom.prove.transfer.values import Host, Seat, Usage

POLLING_SHARE = 0.95
"""Below this share of one processor an end was not polling all the time; undisturbed ends reach 0.98."""


def take(seat: Seat) -> Host:
    """Sit down where told, check that nothing but the claim's devices is in reach, and describe the host.

    Raises:
        Refused: a device too many or too few is visible, or the processors are not this process' to use.
    """
    visible = require_isolation(seat.allocated)
    if seat.cores:
        _stay_on(seat.cores)
    return Host(
        hostname=platform.node(),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        processors=os.cpu_count() or 1,
        usable_processors=len(os.sched_getaffinity(0)),
        load_average=os.getloadavg()[0],
        python=platform.python_version(),
        nixl=nixl_version(),
        ucx=seat.ucx,
        gpu_driver=_gpu_driver(),
        device=seat.device,
        cores=seat.cores,
        links=read_links(),
        visible=visible,
    )


class Meter:
    """Counts from its creation until `stop`."""

    def __init__(self) -> None:
        self._own = resource.getrusage(resource.RUSAGE_SELF)
        self._start = time.monotonic()

    def stop(self) -> Usage:
        """What was used since the start."""
        wall = time.monotonic() - self._start
        own = resource.getrusage(resource.RUSAGE_SELF)
        return Usage(
            wall_seconds=wall,
            cpu_seconds=(own.ru_utime + own.ru_stime) - (self._own.ru_utime + self._own.ru_stime),
            voluntary_switches=own.ru_nvcsw - self._own.ru_nvcsw,
            involuntary_switches=own.ru_nivcsw - self._own.ru_nivcsw,
        )


def contention(initiator: Usage, target: Usage) -> str | None:
    """One sentence if an end was pushed off its processor while it polled, else None."""
    shares = {"initiator": _share(initiator), "target": _share(target)}
    name = min(shares, key=lambda end: shares[end])
    if shares[name] >= POLLING_SHARE:
        return None
    return f"the {name} got {shares[name]:.0%} of a processor while it polled"


def _share(usage: Usage) -> float:
    return usage.cpu_seconds / usage.wall_seconds if usage.wall_seconds > 0 else 1.0


def _stay_on(cores: tuple[int, ...]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise Refused(
            f"this end may not run on processors {', '.join(map(str, cores))}: {error}",
            nearest_fix=f"use some of {', '.join(map(str, sorted(os.sched_getaffinity(0))))}",
        ) from error


def _gpu_driver() -> str | None:
    """First line of what the NVIDIA kernel module says of itself."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
