"""Runs a command as a container runtime would: `python confined.py CAP,CAP [--sysctl] COMMAND...`.

With the capabilities that are named (as in a manifest, without CAP_) and no others, and with /proc/sys
read-only, as runc mounts it (readonlyPaths of the OCI runtime specification). `--sysctl` mounts the host's
/proc/sys/net where the plugin's manifest does. All mounts are in a separate namespace of the command.
"""

import ctypes
import os
import sys
from pathlib import Path

NUMBERS = {"NET_ADMIN": 12, "NET_RAW": 13, "SYS_ADMIN": 21}
_LAST = Path("/proc/sys/kernel/cap_last_cap")
_NEWNS, _RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 0x20000, 1, 32, 4096, 16384, 1 << 18
_CAPBSET_DROP = 24
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    done = _libc.mount(
        source.encode(), target.encode(), None if kind is None else kind.encode(), ctypes.c_ulong(flags), None
    )
    if done:
        raise OSError(ctypes.get_errno(), f"cannot mount {target}")


def confine(capabilities: set[str], *, sysctl: bool) -> None:
    last = int(_LAST.read_text())
    if _libc.unshare(_NEWNS):
        raise OSError(ctypes.get_errno(), "cannot have a mount namespace")
    mount("none", "/", None, _REC | _PRIVATE)
    if sysctl:
        mount("tmpfs", "/mnt", "tmpfs", 0)
        Path("/mnt/proc-sys-net").mkdir()
        mount("/proc/sys/net", "/mnt/proc-sys-net", None, _BIND)
    mount("/proc/sys", "/proc/sys", None, _BIND)
    mount("/proc/sys", "/proc/sys", None, _BIND | _REMOUNT | _RDONLY)
    kept = {NUMBERS[name] for name in capabilities}
    for number in range(last + 1):
        if number not in kept and _libc.prctl(_CAPBSET_DROP, number, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"cannot give up capability {number}")


if __name__ == "__main__":
    names, *command = sys.argv[1:]
    wanted = command[:1] == ["--sysctl"]
    confine(set(names.split(",")), sysctl=wanted)
    command = command[wanted:]
    os.execvp(command[0], command)  # noqa: S606
