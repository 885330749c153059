"""One IMEX daemon of a ComputeDomain, from joining its clique to leaving it.

`ImexDaemon.run` joins the clique, then follows the clique object, keeps nvidia-imex running, reports its
state, and checks its certificate every 30 s. If its entry or the object is removed, it joins again,
unless its pod is being deleted: then the node was given up, another daemon may have its index, and this one
ends. On the way out it removes its entry, within 10 s, so that peers do not wait for it.

Invariant: an index of a clique belongs to one daemon at a time. nvidia-imex takes its identity from the
index, and peers refuse a daemon that runs under a stale one. So nvidia-imex starts only after the entry is
written, restarts when its index changes (`supervisor`), and never runs on for an entry that was given away.

`DaemonReporter` queries nvidia-imex-ctl: often until the daemon is READY (a job waits for it), then every 2
s until it reaches all peers, then every 10 s. A query for the whole domain makes a daemon query every peer,
so a rack that waits for a node must not do that more often. It writes readiness to the clique entry and
the mesh or the last error to the pod, and only changes. A failed report is repeated at the next look. The
failure never ends the daemon, and jobs with it.

Probes of kubelet are HTTP requests to this process: a command probe would start a Python interpreter each
time. Any pod may connect if NetworkPolicies are not enforced, so a request is at most 2 KiB within 2
s, requests that come together share one look, and 16 connections are open at once. Another one ends the
oldest.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random

import msgspec
import structlog

from rackloom.claim.imex.member import CliqueMember, DaemonIdentity, OwnPod, peers_of
from rackloom.claim.imex.nvidia_imex import READY, ImexControl, PeerMesh, UnknownOutput, mesh_of
from rackloom.claim.imex.supervisor import Supervisor
from rackloom.claim.kube.api import KubeApi, KubeError
from rackloom.claim.kube.informer import Informer
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ComputeDomainClique, read_clique
from rackloom.core.cluster.objects import COMPUTE_DOMAIN_CLIQUE
from rackloom.errors import Refused, Retry
from rackloom.serving.limits import IMEX_PROBE

# Reporting.


FIRST_LOOK_SECONDS, EAGER_SECONDS, MESHING_SECONDS, CALM_SECONDS = 0.05, 0.5, 2.0, 10.0
"""Seconds between observations: until the daemon is ready (from `FIRST` on, growing by half each time up to
`EAGER`: nvidia-imex is READY 0.23 s after its start, and a job waits for it), until it reaches all peers (or
runs at all), and once all is well. A daemon that is queried for the whole domain queries every peer, so a
rack that waits for a node must not do that twice a second."""

_log = structlog.get_logger(__name__)


class _PodReport(msgspec.Struct, frozen=True):
    """The report on the pod. None means that there is nothing to report."""

    mesh: PeerMesh | None
    error: str | None


@dataclass(eq=False)
class DaemonReporter:
    """Observes the daemon and reports changes.

    `write_ready(bool)` writes the entry in the clique, `report(mesh as JSON, error)` the pod. `entered` is
    called once, when the entry holds an observation of this process and not of an earlier one. A report
    replaces the previous one: a daemon that has ended reaches no peer, and one that is READY has no error.
    """

    control: ImexControl
    daemon: Supervisor
    write_ready: Callable[[bool], Awaitable[None]]
    report: Callable[[str | None, str | None], Awaitable[None]]
    entered: Callable[[], None] = lambda: None
    _ready: bool | None = field(default=None, init=False)
    _reported: _PodReport | None = field(default=None, init=False)
    """None until something was reported: what an earlier daemon reported on the pod is not known."""

    async def run(self) -> None:
        """Observe until cancelled."""
        eager = FIRST_LOOK_SECONDS
        while True:
            well = await self.observe()
            if self._ready or self.daemon.failure:
                eager = FIRST_LOOK_SECONDS
                await asyncio.sleep(CALM_SECONDS if well else MESHING_SECONDS)
            else:
                await asyncio.sleep(eager)
                # Backing off starts with the daemon: before, an observation starts no program.
                runs = self.daemon.running_with is not None
                eager = min(1.5 * eager, EAGER_SECONDS) if runs else FIRST_LOOK_SECONDS

    async def observe(self) -> bool:
        """Observe once. Returns whether the daemon is ready and reaches all its peers."""
        ready = await self._is_ready()
        if ready:
            self.daemon.note_ready()
        if ready != self._ready:
            await self.write_ready(ready)
            if self._ready is None:
                self.entered()
            self._ready = ready
        mesh = await self._read_mesh() if ready else None
        # The last mesh stays in the report while the daemon is ready and shows none.
        report = None
        if ready:
            report = _PodReport(mesh or (self._reported.mesh if self._reported else None), None)
        elif self.daemon.failure:
            report = _PodReport(None, self.daemon.failure)
        if report is not None and report != self._reported and not await self._write_report(report):
            return False
        return mesh is not None and mesh.complete

    async def _write_report(self, report: _PodReport) -> bool:
        """Whether it was written. An API server that is away must not end the daemon, and jobs with it."""
        mesh = None if report.mesh is None else msgspec.json.encode(report.mesh).decode()
        try:
            await self.report(mesh, report.error)
        except KubeError as error:
            _log.warning("imex.report_lost", reason=error.message)
            return False
        self._reported = report
        return True

    async def _is_ready(self) -> bool:
        if self.daemon.running_with is None:
            return False
        try:
            return await self.control.local_status() == READY
        except (Retry, UnknownOutput) as reason:
            _log.debug("imex.not_ready", reason=str(reason))
            return False

    async def _read_mesh(self) -> PeerMesh | None:
        peers = self.daemon.running_with
        if peers is None or peers.own_index is None:
            return None
        try:
            mesh = mesh_of(await self.control.domain(), peers.own_index, peers.addresses)
        except (Retry, UnknownOutput) as reason:
            _log.warning("imex.mesh_unknown", reason=str(reason))
            return None
        count = mesh.peers + len(peers.unusable)
        missing = (*mesh.missing, *peers.unusable)
        return PeerMesh(complete=not missing, peers=count, missing=missing)


# Probes.


ReadinessCheck = Callable[[], Awaitable[None]]
"""Returns if the daemon is ready, or has nothing to do. Else raises `Retry`, `UnknownOutput` or `Refused`."""


@asynccontextmanager
async def answer_probes(address: str, port: int, is_ready: ReadinessCheck) -> AsyncIterator[None]:
    """Answer probes at this address while the context is entered. Raises `Refused` if it is not available."""
    probe = _Probe(is_ready)
    try:
        server = await asyncio.start_server(probe.answer, address, port, limit=IMEX_PROBE.head_bytes)
    except OSError as error:
        raise Refused(
            f"cannot listen on {address} port {port}: {error.strerror}",
            nearest_fix="choose another port with --probe-port",
        ) from error
    try:
        yield
    finally:
        server.close()


class _Probe:
    def __init__(self, is_ready: ReadinessCheck) -> None:
        self._is_ready = is_ready
        self._check: asyncio.Task[str] | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}
        """The oldest first."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: a request, an answer, the end."""
        if len(self._open) >= IMEX_PROBE.connections:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(IMEX_PROBE.head_seconds):
                await reader.readuntil(b"\r\n\r\n")
            writer.write(_probe_response(await self._reason()))
            async with asyncio.timeout(IMEX_PROBE.unread_seconds):
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # not a probe
        finally:
            self._open.pop(writer, None)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _reason(self) -> str:
        """The reason why the daemon is not ready. Empty if it is."""
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._run_check())
        return await asyncio.shield(self._check)

    async def _run_check(self) -> str:
        try:
            await self._is_ready()
        except (Retry, UnknownOutput, Refused) as reason:
            return str(reason) or "not ready"
        return ""


def _probe_response(reason: str) -> bytes:
    status = "503 Service Unavailable" if reason else "200 OK"
    body = f"{reason or 'ok'}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


# The daemon.


LEAVE_SECONDS = 10.0
"""Limit for removing the entry at an orderly end. The controller removes entries that are left over."""
CREDENTIALS_SECONDS = 30.0
"""Between looks at the certificate on disk. kubelet refreshes a Secret about once a minute."""

_log = structlog.get_logger(__name__)


class _PodDeletedError(Exception):
    """The pod is being deleted: no job waits for this daemon."""


@dataclass(eq=False)
class ImexDaemon:
    """Joins, follows the clique object, keeps the daemon running, and reports its state."""

    api: KubeApi
    identity: DaemonIdentity
    supervisor: Supervisor
    control: ImexControl
    random: Random
    entered: Callable[[], None] = lambda: None
    _member: CliqueMember = field(init=False)
    _pod: OwnPod = field(init=False)
    _unusable: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self._member = CliqueMember(self.api, self.identity, self.random)
        self._pod = OwnPod(self.api, self.identity)

    async def run(self) -> None:
        """Run until cancelled, or until its node was given up: its entry taken, and its pod being deleted.

        Raises `Refused` when the clique is full.
        """
        self._follow(await self._member.join())
        reporter = DaemonReporter(
            self.control, self.supervisor, self._member.set_ready, self._pod.report, self.entered
        )
        endless = (self._watch, self.supervisor.run, reporter.run, self._poll_credentials)
        try:
            async with asyncio.TaskGroup() as group:
                for work in (*endless, self._pod.report_clique):
                    group.create_task(work())
        except* Refused as refused:
            raise _first_refusal(refused) from refused
        except* _PodDeletedError:
            _log.warning("imex.given_up", node=self.identity.node)
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._member.leave()

    async def _watch(self) -> None:
        name = names.clique_object_name(self.identity.compute_domain, self.identity.clique_id)
        informer = Informer(
            self.api,
            COMPUTE_DOMAIN_CLIQUE,
            self.identity.namespace,
            fields=f"metadata.name={name}",
            rng=self.random,
        )
        informer.on_change(lambda obj: self._follow(read_clique(obj)))
        async with asyncio.TaskGroup() as group:
            group.create_task(informer.run())
            group.create_task(self._stay_in(informer))

    async def _stay_in(self, informer: Informer) -> None:
        """Join again if the entry, or the whole object, was removed.

        Not so if the pod is being deleted: its node was lost, and another daemon may have the index by
        now.
        """
        await informer.synced()
        while True:
            if not self._is_entered(informer):
                try:
                    is_deleted = await self._pod.is_deleted()
                except KubeError:
                    pass  # the next round tries again
                else:
                    if is_deleted:
                        raise _PodDeletedError
                    self._follow(await self._member.join())
            await asyncio.sleep(self.random.uniform(1.0, 2.0))

    def _is_entered(self, informer: Informer) -> bool:
        own = None
        for obj in informer.cache:
            own = read_clique(obj).on(self.identity.node)
        return own is not None and own.ip_address == self.identity.address

    def _follow(self, value: ComputeDomainClique) -> None:
        self._member.observed(value)
        peers = peers_of(value, self.identity.node)
        if peers.unusable != self._unusable:
            self._unusable = peers.unusable
            _log.warning("imex.members_unusable", members=peers.unusable)
        if peers.own_index is not None:
            self.supervisor.set_peers(peers)

    async def _poll_credentials(self) -> None:
        while True:
            await asyncio.sleep(CREDENTIALS_SECONDS)
            self.supervisor.recheck()


def _first_refusal(group: BaseExceptionGroup[Refused]) -> Refused:
    """One error of the group: the program has one line to say why it ends."""
    exception = group.exceptions[0]
    return _first_refusal(exception) if isinstance(exception, BaseExceptionGroup) else exception
