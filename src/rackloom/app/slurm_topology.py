"""`rackloom topology slurm`: Slurm's topology.yaml, kept up to date as a file or as a ConfigMap for Slinky.

The source is the nodes of a cluster, which are followed, or files with nodes. A look at the files every few
seconds shows if they have changed, and only then are they read again. A source that cannot be read, or shows
no block, changes nothing: the topology stays, and the log has the time since when the source is unknown.

`TopologyFile` replaces the file whole and durably, and then has Slurm read it (`--hook`). A mark beside the
file is written before it and removed after the hook has succeeded, so a crash in between loses no hook. A
hook that fails or takes too long is run again, at growing intervals, until it succeeds.
"""

import asyncio
import contextlib
import os
import random
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from rackloom.app.process import freeze_loaded_objects, run_until_stopped, stop_on_signals
from rackloom.claim.cluster.slurm_controller import (
    WAITING_SECONDS,
    SlinkyTopology,
    SlurmCaches,
    SlurmController,
    SlurmRule,
    SourceLog,
    log_step,
)
from rackloom.claim.kube.client import KubeClient, RateLimiter
from rackloom.claim.kube.connection import http_client
from rackloom.claim.manifests.documents import read_documents
from rackloom.core.cluster.objects import NODE
from rackloom.core.place.slurm_topology import (
    SlurmTopology,
    entering_nodes,
    next_topology,
    read_topology,
    topology_text,
)
from rackloom.errors import Refused, Retry, file_error_text
from rackloom.runtime.durable_files import remove_durably, write_durably

log = structlog.get_logger(__name__)

# Commands of Slurm.


COMMAND_SECONDS = 60.0
"""A command that takes longer is ended, with the processes that it started."""
_MOST_OUTPUT = 400
"""Characters of a failed command's output in the log."""


class CommandFailed(Exception):
    """A command ended with another code than 0, took too long, or could not be started."""


async def run_command(command: str, *, limit: float = COMMAND_SECONDS) -> str:
    """The standard output of a command (split as by a shell, but run without one). Raises CommandFailed.

    `limit`: seconds.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise CommandFailed(f"{command}: {error.strerror}") from error
    try:
        async with asyncio.timeout(limit):
            output, errors = await process.communicate()
    except TimeoutError as slow:
        # Processes that it left behind may hold its output open after it has ended itself.
        _end_session(process.pid)
        raise CommandFailed(f"{command} took more than {limit:.0f} s") from slow
    finally:
        if process.returncode is None:
            _end_session(process.pid)
            await process.wait()
    if process.returncode != 0:
        text = (errors or output).decode(errors="replace").strip()[:_MOST_OUTPUT]
        raise CommandFailed(f"{command} ended with {process.returncode}: {text}")
    return output.decode(errors="replace")


def _end_session(leader: int) -> None:
    """A command has its own session, so that the processes that it started end too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


# The file.


SHORTEST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 60.0
"""Between two runs of a hook that fails."""


class TopologyFile:
    """The topology.yaml at `path`. `hook` has Slurm read it. `busy` prints the nodes that have jobs.

    Without `busy` no node is taken for busy. A `busy` that fails leaves every node that would enter a block
    outside.
    """

    def __init__(self, path: Path, *, hook: str | None = None, busy: str | None = None) -> None:
        self._path = path
        self._mark = path.with_name(f".{path.name}.reconfigure")
        self._hook = hook
        self._busy = busy
        self._failures = 0

    async def publish(self, found: SlurmTopology) -> None:
        """Write `found` as far as jobs allow, and run the hook. Raises Retry where something is left to do.

        A file that cannot be written keeps its old content.
        """
        try:
            waiting = await self._write(found)
        except OSError as error:
            log.warning("slurm.not_written", to=str(self._path), why=file_error_text(error))
            why = f"{self._path} could not be written: {file_error_text(error)}"
            raise Retry(why, after=LONGEST_RETRY_SECONDS) from error
        await self._run_hook()
        if waiting:
            raise Retry("nodes wait for their jobs", after=WAITING_SECONDS)

    async def _write(self, found: SlurmTopology) -> tuple[str, ...]:
        """Returns the nodes that wait for their jobs."""
        before = self._path.read_text(errors="replace") if self._path.exists() else None
        last = None if before is None else read_topology(before)
        step = next_topology(last, found, await self._busy_nodes(last, found))
        log_step(step)
        if step.topology is not None and (text := topology_text(step.topology)) != before:
            if self._hook is not None:
                write_durably(self._mark, b"")
            write_durably(self._path, text.encode(), mode=0o644)
            log.info("slurm.topology_written", to=str(self._path), blocks=len(step.topology.blocks))
        return step.waiting

    async def _busy_nodes(self, last: SlurmTopology | None, found: SlurmTopology) -> frozenset[str] | None:
        if self._busy is None or not entering_nodes(last, found):
            return frozenset()
        try:
            printed = await run_command(self._busy)
        except CommandFailed as failed:
            log.warning("slurm.busy_unknown", why=str(failed))
            return None
        if "[" in printed:
            # `sinfo` without -N. No node has such a name, so all of them would count as idle.
            log.warning("slurm.busy_unknown", why=f"{self._busy} prints ranges of nodes")
            return None
        return frozenset(printed.replace(",", " ").split())

    async def _run_hook(self) -> None:
        if self._hook is None or not self._mark.exists():
            return
        try:
            await run_command(self._hook)
        except CommandFailed as failed:
            ceiling = SHORTEST_RETRY_SECONDS * 2.0 ** min(self._failures, 16)
            self._failures += 1
            again = min(LONGEST_RETRY_SECONDS, ceiling)
            log.warning("slurm.hook_failed", why=str(failed), again_in=again)
            raise Retry(str(failed), after=again) from failed
        self._failures = 0
        remove_durably(self._mark)
        log.info("slurm.hook_done", command=self._hook)


# The process.


REQUESTS_PER_SECOND, BURST = 20.0, 200
_NAME = "rackloom-slurm"


class SlurmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The source of the nodes and the destination of the topology."""

    rule: SlurmRule
    sites: tuple[Path, ...] = ()
    """Files with nodes. Without any, the cluster of a kubeconfig."""
    every: float = 30.0
    """Seconds between two looks at the files."""
    kubeconfig: Path | None = None
    context: str | None = None
    file: Path | None = None
    hook: str | None = None
    busy: str | None = None
    config_map: str | None = None
    """`namespace/name`, in place of a file."""
    once: bool = False
    """Write the topology of the files once, run the hook, and end."""


def run_slurm_topology(options: SlurmOptions) -> None:
    """Keep the topology up to date until SIGTERM or SIGINT, or write it once with `once`.

    Raises Refused and Retry only if `once` is set.
    """
    asyncio.run(_run(options))


async def _run(options: SlurmOptions) -> None:
    topology_file = TopologyFile(options.file, hook=options.hook, busy=options.busy) if options.file else None
    if topology_file is not None and options.sites:
        if options.once:
            await topology_file.publish(read_site_files(options.sites, options.rule))
            return
        work = follow_site_files(options.sites, options.rule, topology_file, options.every, time.time)
    else:
        work = _follow_cluster(options, topology_file)
    stopped = stop_on_signals()
    freeze_loaded_objects()
    await run_until_stopped(stopped, work)


async def _follow_cluster(options: SlurmOptions, topology_file: TopologyFile | None) -> None:
    client = http_client(options.kubeconfig, options.context)
    client.headers["User-Agent"] = _NAME
    rng = random.Random()  # noqa: S311 (jitter)
    async with KubeClient(client, RateLimiter(REQUESTS_PER_SECOND, BURST)) as api:
        caches = SlurmCaches(api, rng, with_pods=topology_file is None)
        if topology_file is not None:
            publish = topology_file.publish
        else:
            namespace, _, name = (options.config_map or "").partition("/")
            publish = SlinkyTopology(api, caches, namespace, name).publish
        controller = SlurmController(api, caches, options.rule, publish, time.time, rng)
        await controller.run()


def read_site_files(paths: tuple[Path, ...], rule: SlurmRule) -> SlurmTopology:
    """The topology of the nodes in the files. Raises Refused for no block, or an unreadable file."""
    documents = (document for path in paths for document in read_documents(path, (NODE.kind,)))
    found = rule.topology_of(
        [found.decoded or found.value for found in documents if found.value.get("kind") == "Node"]
    )
    if not found.blocks:
        raise Refused(
            "no node of Slurm has a clique, and slurmctld does not start without a block",
            nearest_fix=f"taint the nodes with {rule.taint}, or say --all-nodes"
            if rule.taint
            else "name files of which the nodes have the label of the clique",
        )
    return found


SETTLED_SECONDS = 2.0
"""A file may change twice within one tick of its clock: 2 s on FAT, less on others."""


def file_stamps(paths: tuple[Path, ...], now: float) -> list[tuple[int, ...]] | None:
    """Values that differ after each change of a file. None if a file has just changed, or cannot be read.

    `now`: seconds since the epoch.
    """
    try:
        found = [path.stat() for path in paths]
    except OSError:
        return None
    if any(now - stat.st_ctime <= SETTLED_SECONDS for stat in found):
        return None
    return [(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in found]


async def follow_site_files(
    paths: tuple[Path, ...],
    rule: SlurmRule,
    topology_file: TopologyFile,
    every: float,
    wall: Callable[[], float],
) -> None:
    """Look at the files every `every` seconds, and publish their topology, until cancelled."""
    source, found, read = SourceLog(wall), None, None
    while True:
        # Stamps from before the reading: a change during it makes the next look differ.
        pause, stamps = every, file_stamps(paths, wall())
        try:
            if found is None or stamps is None or stamps != read:
                found = None
                found, read = read_site_files(paths, rule), stamps
        except Refused as refused:
            source.lost(str(refused))
        else:
            source.found()
            try:
                await topology_file.publish(found)
            except Retry as retry:
                pause = min(every, retry.after)
        await asyncio.sleep(pause)
