"""MPS daemons that NVIDIA's DRA driver started for claims that were taken over from it.

Such a daemon is the pod of a Deployment in the namespace of NVIDIA's driver, which starts it again when it
dies. Its sockets and logs, and a tmpfs that it shares with its clients, are below the plugin's directory, and
the containers of the claim mount them from there. So all of it stays as it is until the claim ends, and
nothing here starts such a daemon.

`end` takes one apart and may be repeated after any step:

1. Delete the Deployment, in the foreground: it goes after its pod. As long as the API server still has it, or
   the daemon answers without it, that is a `Retry`.
2. Delete the directory, with the tmpfs. NVIDIA's driver mounted that in the host's namespace, where this
   container cannot unmount. But the kernel detaches a mount when its directory is deleted in a namespace that
   does not have the mount (Linux 3.18 and later). So a thread enters its own mount namespace,
   drops the mount there, however often it shows, and deletes the directory.

The compute mode of the GPUs is given back after it, as for daemons of our own (`sharing`).
"""

import asyncio
import ctypes
import errno
import os
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from rackloom.claim.kube.api import KubeApi, KubeError, NotFound
from rackloom.claim.node.plugin import NodeValue
from rackloom.claim.node.tasks import to_the_end
from rackloom.core.cluster.objects import DEPLOYMENT
from rackloom.errors import Retry

ENDING_SECONDS = 1.0
"""Between two checks whether the Deployment is gone."""
FORBIDDEN_SECONDS = 10.0


class AdoptedMpsDaemon(NodeValue, frozen=True, kw_only=True):
    """A daemon of NVIDIA's driver. JSON in the checkpoint."""

    id: str
    """`<claim UID>-<five hexadecimal digits>`: the name of its directory."""
    namespace: str

    @property
    def deployment(self) -> str:
        """The name of its Deployment."""
        return f"mps-control-daemon-{self.id}"


class AdoptedMpsDaemons:
    """Ends the daemons of one node. `home` has a directory for each."""

    def __init__(self, api: KubeApi, home: Path, answers: Callable[[str], Awaitable[bool]]) -> None:
        """`answers` returns whether a daemon runs, by the name of its directory."""
        self._api = api
        self._home = home
        self._answers = answers

    async def end(self, daemon: AdoptedMpsDaemon) -> None:
        """Take a daemon apart. Raises `Retry` until it is gone, and `KubeError`."""
        name = f"Deployment {daemon.namespace}/{daemon.deployment}"
        try:
            await self._api.delete(DEPLOYMENT, daemon.deployment, daemon.namespace, propagation="Foreground")
        except NotFound:
            pass
        except KubeError as error:
            if error.code != 403:
                raise
            why = f"the MPS daemon of NVIDIA's driver cannot be ended: {name} may not be deleted"
            fix = f"apply rbac.yaml of examples/migrate-from-nvidia-dra for namespace {daemon.namespace}"
            raise Retry(f"{why} ({error}); {fix}", after=FORBIDDEN_SECONDS) from error
        else:
            raise Retry(f"{name}, an MPS daemon of NVIDIA's driver, is ending", after=ENDING_SECONDS)
        home = self._home / daemon.id
        if (home / "pipe").exists() and await self._answers(daemon.id):
            # The namespace was named at the takeover, and the Deployment may be in another one.
            raise Retry(
                f"there is no {name}, and its MPS daemon runs: delete its Deployment, wherever that is",
                after=FORBIDDEN_SECONDS,
            )
        try:
            await to_the_end(asyncio.to_thread(remove_with_mounts, home))
        except OSError as error:
            raise Retry(f"{home} cannot be removed: {error}", after=ENDING_SECONDS) from error


# The directory, and the mounts in it.


_CLONE_NEWNS, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x20000, 0x4000, 1 << 18, 2
_MOUNTS = Path("/proc/thread-self/mountinfo")
_MOUNT_POINT = 4
"""The field of a line of mountinfo."""
_libc = ctypes.CDLL(None, use_errno=True)


def remove_with_mounts(home: Path) -> None:
    """Delete a directory and the mounts in it, here or on the host. Raises `OSError`. Blocks."""
    if not _mounted_in(home):
        if home.exists():
            shutil.rmtree(home)
        return
    failures: list[OSError] = []

    def remove_alone() -> None:
        try:
            _check(_libc.unshare(_CLONE_NEWNS))
            _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
            _unmount(home)
            shutil.rmtree(home)
        except OSError as error:
            failures.append(error)

    # The namespace ends with the thread.
    thread = threading.Thread(target=remove_alone)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def _unmount(home: Path) -> None:
    """Drop the mounts of this namespace that are in the directory.

    The container sees the directory a second time below the host's root, where another mount may cover one of
    them. No path leads there, so the covering mount is dropped first. Each round drops one mount.
    """
    while points := _mounted_in(home):
        try:
            _check(_libc.umount2(os.fsencode(points[-1]), _MNT_DETACH))
        except OSError as error:
            covering = [point for point in _mount_points() if points[-1].startswith(f"{point}/")]
            if error.errno != errno.EINVAL or not covering or str(home).startswith(f"{covering[-1]}/"):
                raise
            _check(_libc.umount2(os.fsencode(covering[-1]), _MNT_DETACH))


def _mounted_in(home: Path) -> list[str]:
    """The mount points in a daemon's directory, by any path. The newest comes last."""
    ends = tuple(f"/{home.name}/{name}" for name in ("shm", "pipe", "log"))
    return [point for point in _mount_points() if point.endswith(ends)]


def _mount_points() -> list[str]:
    return [line.split(" ")[_MOUNT_POINT] for line in _MOUNTS.read_text().splitlines()]


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
