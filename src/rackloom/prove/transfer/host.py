"""What the host was doing while a transfer was timed.

Both ends poll, so each needs a processor of its own; any third runnable thread turns microseconds into
scheduler slices. An end that polled but got less processor time than went by was pushed aside, by another
process or by the hypervisor, and the report says so.
"""

import os
import platform
import resource
import time

from rackloom.prove.transfer.memory import nixl_version
from rackloom.prove.transfer.values import Host, Ucx, Usage

POLLING_SHARE = 0.95
"""Below this share of one processor an end was not polling all the time; undisturbed ends reach 0.98."""


def describe(pins: Ucx) -> Host:
    """The facts of this host, before the measurement."""
    return Host(
        hostname=platform.node(),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        processors=os.cpu_count() or 1,
        usable_processors=len(os.sched_getaffinity(0)),
        load_average=os.getloadavg()[0],
        python=platform.python_version(),
        nixl=nixl_version(),
        ucx=pins,
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
