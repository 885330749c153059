"""The processes that a host's proc shows."""

from rackloom.topology.discovery.sysroot import Sysroot


def processes(host: Sysroot) -> tuple[int, ...]:
    """Their numbers."""
    names = (name for name in host.names("proc") if name.isascii() and name.isdigit())
    return tuple(sorted(int(name) for name in names))


def called(host: Sysroot, name: str) -> tuple[int, ...]:
    """Numbers of those that are called `name`."""
    return tuple(one for one in processes(host) if host.text(f"proc/{one}/comm") == name)
