"""What every row says of the machine, and what this process has used of it."""

import os
import resource
from pathlib import Path
from typing import Any


def spent() -> float:
    """CPU seconds of this process so far, all threads, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def load() -> dict[str, Any]:
    """Load average over the last minute, next to the CPUs that there are: above them, wall times mislead."""
    return {"load": round(os.getloadavg()[0], 1), "cpus": len(os.sched_getaffinity(0))}


def resident_mib() -> float:
    """What this process holds in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def memory(field: str, process: int | None = None) -> float:
    """VmRSS or VmHWM of this process, or of another, in MiB."""
    text = Path(f"/proc/{process or 'self'}/status").read_text()
    return round(int(text.partition(f"{field}:")[2].split()[0]) / 1024, 1)
