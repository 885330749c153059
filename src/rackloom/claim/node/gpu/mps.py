"""MPS control daemons: one for the devices of a claim that have the same MPS settings.

A daemon runs in a mount namespace with its own /dev/shm, so that only its clients share memory with it.
`mps_launcher` starts it, in a container that outlives the plugin's. Its state is queried each time and never
remembered, so a restarted plugin continues where it was. Daemons that stop answering are started
again. Clients find their daemon by CUDA_MPS_PIPE_DIRECTORY.

Source: NVIDIA's Multi-Process Service guide.
"""

import asyncio
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from weakref import WeakValueDictionary

import structlog

from rackloom.claim.node.gpu.driver_programs import DriverPrograms, ProgramFailed
from rackloom.claim.node.gpu.mps_launcher import MPS_CONTROL, SHARED_MEMORY, DaemonStart, MpsLauncher
from rackloom.claim.node.plugin import ContainerEdits, ContainerMount, NodeValue
from rackloom.errors import Refused, Retry

log = structlog.get_logger(__name__)

MPS_PIPES = Path("/tmp/nvidia-mps")  # noqa: S108 - where CUDA looks for its daemon
_MPS_MOUNT_OPTIONS = ("rw", "nosuid", "nodev", "rbind", "rprivate")


class MpsDaemon(NodeValue, frozen=True, kw_only=True):
    """An MPS daemon, for the devices of a claim that have one configuration. JSON in the checkpoint."""

    name: str
    """`<claim UID>-<number>`."""
    uuids: tuple[str, ...]
    threads_percent: int | None = None
    memory_limits: Mapping[str, str] = {}
    """By UUID: `953M`."""
    multi_user: bool = False


class MpsDaemons:
    """The daemons of this node. `home` holds a directory for each, under one path here and below the root."""

    def __init__(self, programs: DriverPrograms, launcher: MpsLauncher, home: Path) -> None:
        self._programs = programs
        self._launcher = launcher
        self._home = home
        self._wanted: dict[str, MpsDaemon] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def ensure(self, daemon: MpsDaemon) -> None:
        """Make `daemon` run with its settings. Raises `Retry`, or `Refused` on a node that cannot run it."""
        self._wanted[daemon.name] = daemon
        async with self._lock(daemon.name):
            await self._ensure(daemon)

    async def stop(self, name: str) -> None:
        """End a daemon and remove its directories. Raises `Retry` while it still answers."""
        self._wanted.pop(name, None)
        async with self._lock(name):
            # A daemon that a plugin of before had started may be about to come up.
            await self._launcher.settle()
            if self._pipes(name).exists() and await self.answers(name):
                await self._control(name, "quit")
                if await self.answers(name):
                    raise Retry(f"MPS daemon {name} has not ended yet", after=1.0)
            shutil.rmtree(self._memory(name), ignore_errors=True)
            shutil.rmtree(self._home / name, ignore_errors=True)

    async def keep(self, wanted: Collection[MpsDaemon], used: Collection[str]) -> None:
        """Look after `wanted` from now on, and end those that are not `used` any more. Raises `Retry`."""
        self._wanted = {daemon.name: daemon for daemon in wanted}
        for name in sorted({path.name for path in self._home.glob("*/")} - set(used)):
            await self.stop(name)

    async def revive(self) -> None:
        """Restart daemons that do not answer any more."""
        for name in list(self._wanted):
            async with self._lock(name):
                # It may have been stopped while this waited for the lock.
                if name not in self._wanted:
                    continue
                try:
                    await self._ensure(self._wanted[name])
                except (Retry, Refused) as trouble:
                    log.warning("gpu.mps-daemon-down", daemon=name, reason=trouble.reason)

    def edits(self, name: str) -> ContainerEdits:
        """How a container reaches the daemon."""
        mounts = ((self._pipes(name), MPS_PIPES), (SHARED_MEMORY / _mps_memory_name(name), SHARED_MEMORY))
        return ContainerEdits(
            env=(f"CUDA_MPS_PIPE_DIRECTORY={MPS_PIPES}",),
            mounts=tuple(
                ContainerMount(host_path=str(host), container_path=str(inside), options=_MPS_MOUNT_OPTIONS)
                for host, inside in mounts
            ),
        )

    def _lock(self, name: str) -> asyncio.Lock:
        """A daemon must not be started and ended at the same time."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def _ensure(self, daemon: MpsDaemon) -> None:
        name = daemon.name
        self._make_directories(name)
        if not await self.answers(name):
            start = DaemonStart(
                memory=str(SHARED_MEMORY / _mps_memory_name(name)),
                flags=("-multiuser-server",) if daemon.multi_user else (),
                env={
                    **self._programs.environment(),
                    **self._environment(name),
                    "CUDA_VISIBLE_DEVICES": ",".join(daemon.uuids),
                },
            )
            await self._launcher.start(start)
        for gpu, limit in daemon.memory_limits.items():
            await self._control(name, f"set_default_device_pinned_mem_limit {gpu} {limit}")
        if daemon.threads_percent is not None:
            await self._control(name, f"set_default_active_thread_percentage {daemon.threads_percent}")

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

    async def answers(self, name: str) -> bool:
        """Whether a daemon runs. Raises `Retry` if that is unclear: a hanging daemon still has its GPUs."""
        try:
            await self._control(name, "get_default_active_thread_percentage")
        except ProgramFailed:
            return False
        return True

    async def _control(self, name: str, command: str) -> None:
        await self._programs.run(MPS_CONTROL, stdin=command + "\n", env=self._environment(name))

    def _environment(self, name: str) -> Mapping[str, str]:
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._pipes(name)),
            "CUDA_MPS_LOG_DIRECTORY": str(self._home / name / "log"),
        }

    def _pipes(self, name: str) -> Path:
        return self._home / name / "pipe"

    def _memory(self, name: str) -> Path:
        return self._programs.root / str(SHARED_MEMORY / _mps_memory_name(name)).lstrip("/")


def _mps_memory_name(name: str) -> str:
    return f"rackloom-mps-{name}"
