"""MPS daemons: one control daemon for the devices of a claim that are shared alike.

It is a process of the plugin's own container, and the plugin starts it again when it does not answer. Whether
it runs is asked of it each time, never remembered, so a plugin that was restarted goes on where it was.
Source: NVIDIA's Multi-Process Service guide (control commands, pipe directory). A CUDA program finds its
daemon by CUDA_MPS_PIPE_DIRECTORY and shares memory with it in /dev/shm.
"""

import asyncio
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from weakref import WeakValueDictionary

import structlog

from rackloom.claim.node.gpu.programs import Programs
from rackloom.claim.node.gpu.wanted import Daemon
from rackloom.claim.node.values import Edits, Mount
from rackloom.errors import Refused, Retry

log = structlog.get_logger(__name__)

CONTROL = "nvidia-cuda-mps-control"
PIPES = Path("/tmp/nvidia-mps")  # noqa: S108 - where CUDA looks for its daemon
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's name for it
_START = f'mount --bind "$1" {SHARED_MEMORY} && shift && exec {CONTROL} -d "$@"'
"""In a mount namespace of its own: the daemon's shared memory is its clients', and no other's."""
_OPTIONS = ("rw", "nosuid", "nodev", "rbind", "rprivate")


class MpsDaemons:
    """The daemons of this node. `home` holds a directory for each, under one path here and below the root."""

    def __init__(self, programs: Programs, home: Path) -> None:
        self._programs = programs
        self._home = home
        self._wanted: dict[str, Daemon] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def ensure(self, daemon: Daemon) -> None:
        """Have `daemon` run with its settings. Raises `Retry`, or `Refused` on a node that cannot run it."""
        self._wanted[daemon.name] = daemon
        async with self._lock(daemon.name):
            await self._ensure(daemon)

    async def stop(self, name: str) -> None:
        """End a daemon and remove its directories. Raises `Retry` while it still answers."""
        self._wanted.pop(name, None)
        async with self._lock(name):
            if self._pipes(name).exists() and await self._answers(name):
                await self._tell(name, "quit")
                if await self._answers(name):
                    raise Retry(f"MPS daemon {name} has not ended yet", after=1.0)
            shutil.rmtree(self._memory(name), ignore_errors=True)
            shutil.rmtree(self._home / name, ignore_errors=True)

    async def keep(self, wanted: Collection[Daemon], used: Collection[str]) -> None:
        """Look after `wanted` from now on, and end those that are not `used` any more. Raises `Retry`."""
        self._wanted = {one.name: one for one in wanted}
        unused = {path.name for path in self._home.glob("*/")} - set(used)
        for name in sorted(unused):
            await self.stop(name)

    async def revive(self) -> None:
        """Start again those that do not answer any more."""
        for name in list(self._wanted):
            async with self._lock(name):
                if name in self._wanted:
                    await self._revive(self._wanted[name])

    def edits(self, name: str) -> Edits:
        """How a container reaches the daemon."""
        mounts = ((self._pipes(name), PIPES), (SHARED_MEMORY / _memory_name(name), SHARED_MEMORY))
        return Edits(
            env=(f"CUDA_MPS_PIPE_DIRECTORY={PIPES}",),
            mounts=tuple(
                Mount(host_path=str(host), container_path=str(inside), options=_OPTIONS)
                for host, inside in mounts
            ),
        )

    def _lock(self, name: str) -> asyncio.Lock:
        """A daemon must not be started and ended at once."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def _revive(self, daemon: Daemon) -> None:
        try:
            await self._ensure(daemon)
        except (Retry, Refused) as trouble:
            log.warning("gpu.mps-daemon-down", daemon=daemon.name, reason=trouble.reason)

    async def _ensure(self, daemon: Daemon) -> None:
        self._make_directories(daemon.name)
        if not await self._answers(daemon.name):
            await self._start(daemon)
        for command in _settings(daemon):
            await self._tell(daemon.name, command)

    def _make_directories(self, name: str) -> None:
        memory = self._memory(name)
        try:
            for directory in (self._pipes(name), self._home / name / "log", memory):
                directory.mkdir(parents=True, exist_ok=True, mode=0o755)
            # Clients of any user make their segments here, as in /dev/shm itself.
            memory.chmod(0o1777)
        except OSError as error:
            raise Refused(
                f"cannot make the directories of MPS daemon {name}: {error}",
                nearest_fix="mount the host's root so that it can be written",
            ) from error
        if not (self._programs.root / str(self._pipes(name)).lstrip("/")).exists():
            raise Refused(
                f"MPS daemons run in {self._programs.root} and would not find {self._home} there",
                nearest_fix="give the host's root as --driver-root",
            )

    async def _answers(self, name: str) -> bool:
        try:
            await self._tell(name, "get_default_active_thread_percentage")
        except Retry:
            return False
        return True

    async def _tell(self, name: str, command: str) -> None:
        await self._programs.run(CONTROL, stdin=command + "\n", env=self._environment(name))

    async def _start(self, daemon: Daemon) -> None:
        flags = ("-multiuser-server",) if daemon.multi_user else ()
        memory = str(SHARED_MEMORY / _memory_name(daemon.name))
        await self._programs.run(
            *("unshare", "--mount", "sh", "-c", _START, "mps", memory, *flags),
            env={**self._environment(daemon.name), "CUDA_VISIBLE_DEVICES": ",".join(daemon.uuids)},
        )

    def _environment(self, name: str) -> Mapping[str, str]:
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._pipes(name)),
            "CUDA_MPS_LOG_DIRECTORY": str(self._home / name / "log"),
        }

    def _pipes(self, name: str) -> Path:
        return self._home / name / "pipe"

    def _memory(self, name: str) -> Path:
        return self._programs.root / str(SHARED_MEMORY / _memory_name(name)).lstrip("/")


def _memory_name(name: str) -> str:
    return f"rackloom-mps-{name}"


def _settings(daemon: Daemon) -> list[str]:
    limits = [
        f"set_default_device_pinned_mem_limit {gpu} {most}" for gpu, most in daemon.memory_limits.items()
    ]
    share = daemon.threads_percent
    return limits if share is None else [*limits, f"set_default_active_thread_percentage {share}"]
