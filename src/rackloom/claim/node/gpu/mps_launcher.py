"""Starting MPS control daemons in a container, which decides when they end.

A container's processes end with it. `OwnContainer` starts daemons in the container of the GPU plugin, so that
an upgrade of the plugin ends them, and with them the CUDA contexts of their clients. `PodLauncher` has them
started in the pod of `rackloom node mps`, which no rollout replaces: `serve_launches` listens there on
`launcher.sock` in the directory of the daemons.

The launcher knows nothing of claims. It starts a daemon on request of the plugin, and the plugin queries,
rules and ends the daemon by the daemon's own pipe. A daemon's life depends on the launcher's container alone.

One connection carries one request, a line of JSON: a `DaemonStart`, or `null`. The reply is a line with a
`StartReply`. Connections are served one after the other, in the order in which they were made, so that the
reply to `null` means that no earlier start is under way. Both ends may be of different releases, since the
pod is older than the plugin after an upgrade: fields that one end does not know are ignored, and new ones
need defaults.
"""

import asyncio
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from rackloom.claim.node.gpu.driver_programs import (
    PROGRAM_RETRY_SECONDS,
    PROGRAM_SECONDS,
    DriverPrograms,
)
from rackloom.core.cluster.names import GPU_DRIVER
from rackloom.errors import Retry, Undecodable
from rackloom.runtime.foreign_text import decode_json
from rackloom.serving.limits import MPS_LAUNCHER

MPS_CONTROL = "nvidia-cuda-mps-control"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the kernel's name for it
LAUNCHER_POD = "DaemonSet rackloom-node-mps"
_START = f'mount --bind "$1" {SHARED_MEMORY} && shift && exec {MPS_CONTROL} -d "$@"'
"""In a separate mount namespace, so that only the daemon's clients share memory with it."""
_REPLY_SECONDS = PROGRAM_SECONDS + 2 * MPS_LAUNCHER.handshake_seconds


class DaemonStart(msgspec.Struct, frozen=True, kw_only=True):
    """A daemon to be started. JSON between releases."""

    memory: str
    """The directory that it has as /dev/shm, in the driver's root."""
    flags: tuple[str, ...] = ()
    """Of nvidia-cuda-mps-control."""
    env: Mapping[str, str]
    """Its whole environment: its directories and devices, and the paths of the driver's programs and
    libraries."""

    async def run(self, programs: DriverPrograms) -> None:
        """Start it in this container. Raises `Retry` with the output of the program."""
        command = ("unshare", "--mount", "sh", "-c", _START, "mps", self.memory, *self.flags)
        await programs.run(*command, env=self.env)


class StartReply(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a request. JSON between releases."""

    error: str | None = None


class MpsLauncher(Protocol):
    """Starts daemons."""

    async def start(self, daemon: DaemonStart) -> None:
        """Start a daemon that does not run. Raises `Retry`, but the daemon may be started nevertheless."""
        ...

    async def settle(self) -> None:
        """Wait until no earlier start is under way. Raises `Retry`."""
        ...


class OwnContainer(MpsLauncher):
    """Starts daemons in the container of this process. They end with it."""

    def __init__(self, programs: DriverPrograms) -> None:
        self._programs = programs

    async def start(self, daemon: DaemonStart) -> None:
        """Start it here. Raises `Retry` with the output of the program."""
        await daemon.run(self._programs)

    async def settle(self) -> None:
        """Nothing: a start ends with the call of `start`, and with this process."""


class PodLauncher(MpsLauncher):
    """Has daemons started in the pod that listens on `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def start(self, daemon: DaemonStart) -> None:
        """Start it there. Raises `Retry` with the output of the program, or while there is no such pod."""
        try:
            await self._request(daemon)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise Retry(
                f"nothing listens on {self._path}: the pod of {LAUNCHER_POD} does not run on this node",
                after=PROGRAM_RETRY_SECONDS,
            ) from error

    async def settle(self) -> None:
        """Wait for its turn. If nothing listens, there is no launcher, and so no daemon either."""
        with suppress(FileNotFoundError, ConnectionRefusedError):
            await self._request(None)

    async def _request(self, request: DaemonStart | None) -> None:
        try:
            async with asyncio.timeout(_REPLY_SECONDS):
                reader, writer = await asyncio.open_unix_connection(str(self._path))
                try:
                    writer.write(msgspec.json.encode(request) + b"\n")
                    await writer.drain()
                    reply = decode_json(await reader.readline(), LAUNCHER_POD, StartReply)
                finally:
                    writer.close()
        except (FileNotFoundError, ConnectionRefusedError):
            raise
        except (OSError, Undecodable) as error:
            raise Retry(
                f"{LAUNCHER_POD} gave no reply on {self._path}: {error or type(error).__name__}",
                after=PROGRAM_RETRY_SECONDS,
            ) from error
        if reply.error is not None:
            raise Retry(reply.error, after=PROGRAM_RETRY_SECONDS)


def daemons_home(plugins: Path) -> Path:
    """The directory of all MPS daemons, in kubelet's plugins directory."""
    return plugins / GPU_DRIVER / "mps"


def launcher_socket(home: Path) -> Path:
    """The socket of the launcher, in the directory of the daemons."""
    return home / "launcher.sock"


async def serve_launches(path: Path, programs: DriverPrograms) -> None:
    """Start the daemons requested on `path`, until cancelled. Only this process's owner may connect."""
    with _listener(path) as listener:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await _serve(connection, programs)


@contextmanager
def _listener(path: Path) -> Iterator[socket.socket]:
    path.parent.mkdir(parents=True, exist_ok=True)
    # An earlier launcher was killed, or is about to end.
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.setblocking(False)
        listener.bind(str(path))
        # No process can connect before it listens.
        path.chmod(0o600)
        listener.listen()
        yield listener


async def _serve(connection: socket.socket, programs: DriverPrograms) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        async with asyncio.timeout(MPS_LAUNCHER.handshake_seconds):
            line = await reader.readuntil()
        writer.write(msgspec.json.encode(await _reply(line, programs)) + b"\n")
        await writer.drain()
    finally:
        writer.close()


async def _reply(line: bytes, programs: DriverPrograms) -> StartReply:
    try:
        request = decode_json(line, "the request", DaemonStart | None)
        if request is not None:
            await request.run(programs)
    except Undecodable as error:
        return StartReply(error=f"{LAUNCHER_POD} does not know what it was asked: {error.reason}")
    except Retry as retry:
        return StartReply(error=retry.reason)
    return StartReply()
