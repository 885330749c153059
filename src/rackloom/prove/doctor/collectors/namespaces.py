"""Whose processes a proc shows: a container's has a process 1 too, which is not the host's."""

from rackloom.topology.discovery.sysroot import Sysroot

_INITIAL = "pid:[4026531836]"
"""The first namespace of processes (Linux' PROC_PID_INIT_INO)."""
_LINKS = ("proc/1", "proc/self")
"""Of whom to ask: the namespace of process 1 shows to its superiors alone, one's own to everybody."""


def shows_all_processes(host: Sysroot) -> bool:
    """Whether process 1 of `host` is the host's own. A copied tree has no such links, and is taken for it."""
    told = [found for one in _LINKS if (found := _namespace(host, one)) is not None]
    return not told or told[0] == _INITIAL


def _namespace(host: Sysroot, process: str) -> str | None:
    """What the link says: it leads to no path."""
    found = host.real(process)
    try:
        return None if found is None else str(host.root.joinpath(*found.parts[1:], "ns/pid").readlink())
    except OSError:
        return None
