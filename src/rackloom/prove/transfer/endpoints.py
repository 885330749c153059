"""The two ends of one measurement: the target serves a buffer, the initiator moves and times it.

Sequence of a measurement, in the messages of `channel`:

1. Both ends pin themselves to their processors, check that only their claim's devices are visible, and
   describe their host.
2. Handshake. The initiator sends Offer. Both ends register a buffer, and that of the source is filled from
   a seed. The target sends Served with its metadata and one descriptor per block.
3. The initiator makes the connection and one reusable request, and runs the warm-ups.
4. Begin: the sink is wiped, so that warm-up data cannot pass for timed data, and both ends read device
   counters and CPU usage. Then the timed iterations run.
5. Finish: counters are read again, buffers are hashed, and the target sends its record. Equal digests at
   both ends prove the data.

Software transports move data only while a thread drives them. At the target NIXL's progress thread does
it in native code, so the process can wait on the control channel. A target that sleeps and polls is sixteen
times slower over TCP. The initiator polls, and looks at its deadline and at the channel ten times a
second.
"""

import os
import platform
import resource
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from rackloom.core.transfer.proof import traffic_between
from rackloom.core.transfer.values import (
    EndConfig,
    EndRecord,
    EndUsage,
    HostFacts,
    Measurement,
    TransferSpec,
)
from rackloom.errors import Refused, Retry
from rackloom.prove.transfer.agent import NixlAgent, nixl_version, open_agent, ucx_version
from rackloom.prove.transfer.buffers import Buffer
from rackloom.prove.transfer.channel import (
    Begin,
    Begun,
    Channel,
    Finish,
    Finished,
    Offer,
    Refusal,
    Served,
    Wire,
    accept_channel,
    connect_channel,
    receive_served,
)
from rackloom.prove.transfer.devices import read_counters, read_links, require_isolation
from rackloom.serving.limits import TRANSFER_CONTROL

# Host of an end.


def prepare_end(config: EndConfig) -> HostFacts:
    """Pin the process, check that only the claim's devices are visible, and describe the host.

    Raises:
        Refused: a device too many or too few is visible, or the processors are not this process' to use.
    """
    visible = require_isolation(config.allocated)
    if config.cores:
        try:
            os.sched_setaffinity(0, config.cores)
        except OSError as error:
            raise Refused(
                f"this end may not run on processors {', '.join(map(str, config.cores))}: {error}",
                nearest_fix=f"use some of {', '.join(map(str, sorted(os.sched_getaffinity(0))))}",
            ) from error
    return HostFacts(
        hostname=platform.node(),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        processors=os.cpu_count() or 1,
        usable_processors=len(os.sched_getaffinity(0)),
        load_average=os.getloadavg()[0],
        python=platform.python_version(),
        nixl=nixl_version(),
        ucx=config.ucx,
        gpu_driver=_gpu_driver(),
        device=config.device,
        cores=config.cores,
        links=read_links(),
        visible=visible,
    )


class UsageMeter:
    """CPU time and context switches of this process, from its creation until `stop`."""

    def __init__(self) -> None:
        self._own = resource.getrusage(resource.RUSAGE_SELF)
        self._start = time.monotonic()

    def stop(self) -> EndUsage:
        """The usage since the start."""
        wall = time.monotonic() - self._start
        own = resource.getrusage(resource.RUSAGE_SELF)
        return EndUsage(
            wall_seconds=wall,
            cpu_seconds=(own.ru_utime + own.ru_stime) - (self._own.ru_utime + self._own.ru_stime),
            voluntary_switches=own.ru_nvcsw - self._own.ru_nvcsw,
            involuntary_switches=own.ru_nivcsw - self._own.ru_nivcsw,
        )


def _gpu_driver() -> str | None:
    """First line of the NVIDIA kernel module's version file."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


# An end's record of the timed iterations.


class EvidenceRecorder:
    """Reads the counters when it is made. The sink of the transfer wipes its buffer before."""

    def __init__(self, host: HostFacts) -> None:
        self._host = host
        self._counters = read_counters()
        self._meter = UsageMeter()

    def finish(self, buffer: Buffer) -> EndRecord:
        """Stop counting, then hash `buffer` (which takes longer than many a transfer)."""
        usage = self._meter.stop()
        moved = traffic_between(self._counters, read_counters())
        host = msgspec.structs.replace(self._host, ucx_version=ucx_version())
        return EndRecord(digest=buffer.digest(), traffic=moved, usage=usage, host=host)


# Target.


def listen_for_initiator(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0 lets the kernel choose.

    Raises:
        Refused: the address is not ours or taken.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise Refused(
            f"cannot listen on {host} port {port}: {error}",
            nearest_fix="give an address of this host and a free port",
        ) from error


def serve_target(
    listener: socket.socket,
    secret: bytes,
    config: EndConfig,
    turned_away: Callable[[str, str], None],
    *,
    once: bool,
    deadline: float | None,
) -> None:
    """Take one initiator after the other. With `once` stop after the first that completes.

    `turned_away` is called with (peer address, reason) of each initiator that does not hold the secret or
    breaks off.

    Raises:
        Retry: no initiator completed before `deadline` (of time.monotonic).
    """
    while True:
        listener.settimeout(None if deadline is None else max(0.01, deadline - time.monotonic()))
        try:
            sock, address = listener.accept()
        except TimeoutError:
            raise Retry("no initiator came in time", after=1.0) from None
        wire = Wire(sock, time.monotonic() + TRANSFER_CONTROL.handshake_seconds, time.monotonic)
        try:
            serve_measurement(wire, secret, config)
        except (Refused, Retry) as trouble:
            turned_away(f"{address[0]} port {address[1]}", trouble.reason)
        else:
            if once:
                return
        finally:
            wire.close()


def serve_measurement(wire: Wire, secret: bytes, config: EndConfig) -> None:
    """Serve one measurement over a fresh connection.

    Raises:
        Refused: the initiator does not hold the secret, or its request is beyond this host.
        Retry: the initiator is gone or too slow.
    """
    channel = accept_channel(wire, secret)
    spec = channel.receive(Offer).spec
    wire.deadline = time.monotonic() + spec.timeout_seconds
    with ExitStack() as stack:
        try:
            host = prepare_end(config)
            agent = stack.enter_context(open_agent("target", spec, config, progress_thread=True))
        except Refused as refused:
            channel.send(Refusal(refused.reason, refused.nearest_fix))
            raise
        if spec.op == "READ":
            agent.buffer.fill(spec.seed)
        channel.send(
            Served(agent.nixl.get_agent_metadata(), agent.buffer.blocks(spec.block_size), agent.buffer.memory)
        )
        record_timed_part(channel, agent, spec, host)
        with suppress(Retry):  # the initiator closes the connection once its request is released
            channel.receive(Begin)


def record_timed_part(channel: Channel, agent: NixlAgent, spec: TransferSpec, host: HostFacts) -> None:
    """From the end of the warm-ups to the digest. Warm-up data cannot pass for timed data."""
    channel.receive(Begin)
    if spec.op == "WRITE":
        agent.buffer.wipe()
    recorder = EvidenceRecorder(host)
    channel.send(Begun())
    channel.receive(Finish)
    channel.send(Finished(recorder.finish(agent.buffer)))


# Initiator.


CONNECT_SECONDS = 10.0
"""The longest time to keep trying to reach a target that may still be starting."""
POLL_CHECK_SECONDS = 0.1
"""Seconds of polling between two checks of the deadline and of the control channel."""


def run_initiator(
    host: str,
    port: int,
    secret: bytes,
    spec: TransferSpec,
    config: EndConfig,
    ready: Callable[[float], None] | None = None,
) -> Measurement:
    """Measure `spec` against the target at `host`, `port`.

    `ready` is called after the warm-ups with the seconds that are left. Timing begins when it returns.

    Raises:
        Refused: wrong secret, or the target cannot carry out `spec`.
        Retry: the target is not there, went away, or took longer than the timeout.
    """
    facts = prepare_end(config)
    deadline = time.monotonic() + spec.timeout_seconds
    wire = Wire(_connect_to_target(host, port, deadline), deadline, time.monotonic)
    try:
        channel = connect_channel(wire, secret)
        channel.send(Offer(spec))
        with open_agent("initiator", spec, config, progress_thread=False) as agent:
            if spec.op == "WRITE":
                agent.buffer.fill(spec.seed)
            session = _InitiatorSession(channel, agent, spec, deadline)
            return session.measure(receive_served(channel), facts, ready or (lambda _: None))
    finally:
        wire.close()


def _connect_to_target(host: str, port: int, deadline: float) -> socket.socket:
    give_up = min(deadline, time.monotonic() + CONNECT_SECONDS)
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(0.01, give_up - time.monotonic()))
        except OSError as error:
            if time.monotonic() + 0.2 > give_up:
                raise Retry(
                    f"the target at {host} port {port} does not answer: {error}", after=5.0
                ) from error
            time.sleep(0.2)


class _InitiatorSession:
    """One measurement once both ends have their buffers."""

    def __init__(self, channel: Channel, agent: NixlAgent, spec: TransferSpec, deadline: float) -> None:
        self._channel, self._agent, self._spec, self._deadline = channel, agent, spec, deadline
        self._request: Any = None

    def measure(self, offer: Served, facts: HostFacts, ready: Callable[[float], None]) -> Measurement:
        connect_seconds = self._connect(offer)
        warm = [self._move() for _ in range(self._spec.warmup_iters)]
        ready(self._deadline - time.monotonic())
        recorder = self._begin(facts)
        began = time.monotonic()
        times = [self._move() for _ in range(self._spec.iters)]
        ended = time.monotonic()
        self._channel.send(Finish())
        mine = recorder.finish(self._agent.buffer)
        theirs = self._channel.receive(Finished).record
        copy_seconds = self._agent.buffer.copy_seconds()  # the target is idle by now
        nixl = self._agent.nixl
        backend = nixl.query_xfer_backend(self._request)
        nixl.release_xfer_handle(self._request)
        nixl.remove_remote_agent(self._peer)
        return Measurement(
            backend=backend,
            connect_seconds=connect_seconds,
            first_seconds=sum((warm or times)[0]),
            seconds=tuple(post + poll for post, poll in times),
            post_seconds=tuple(post for post, _ in times),
            protocols=self._agent.protocols(self._spec.op),
            initiator=mine,
            target=theirs,
            copy_seconds=copy_seconds,
            began=began,
            ended=ended,
        )

    def _connect(self, offer: Served) -> float:
        """Seconds from the peer's metadata to a request that can be posted."""
        spec, nixl = self._spec, self._agent.nixl
        if [length for _, length, _ in offer.descriptors] != [spec.block_size] * spec.batch_size:
            size = sum(length for _, length, _ in offer.descriptors)
            raise Refused(f"the target registered {size} bytes where {spec.total_bytes} were asked for")
        start = time.perf_counter()
        try:
            name = nixl.add_remote_agent(offer.metadata)
            self._peer = name.decode() if isinstance(name, bytes) else name
            nixl.make_connection(self._peer)
            self._request = self._agent.request(spec, self._peer, offer.descriptors, offer.memory)
        except Exception as error:
            raise self._trouble(f"NIXL could not connect to the target: {error}") from error
        return time.perf_counter() - start

    def _begin(self, facts: HostFacts) -> EvidenceRecorder:
        self._channel.send(Begin())
        if self._spec.op == "READ":
            self._agent.buffer.wipe()
        self._channel.receive(Begun)
        return EvidenceRecorder(facts)

    def _move(self) -> tuple[float, float]:
        """One transfer: seconds until the post returned, and from there until it was done."""
        nixl, request, clock = self._agent.nixl, self._request, time.perf_counter
        start = clock()
        try:
            state = nixl.transfer(request)
            posted = clock()
            next_check = posted + POLL_CHECK_SECONDS
            while state == "PROC":
                state = nixl.check_xfer_state(request)
                if clock() > next_check:
                    if time.monotonic() > self._deadline:
                        raise self._trouble(f"the transfer took longer than {self._spec.timeout_seconds:g} s")
                    if not self._channel.peer_is_there():
                        raise self._trouble("the target ended in the middle of the transfer")
                    next_check = clock() + POLL_CHECK_SECONDS
            done = clock()
        except Retry:
            raise
        except Exception as error:
            raise self._trouble(f"the transfer broke off: {error}") from error
        if state != "DONE":
            raise self._trouble("NIXL reported an error for the transfer")
        return posted - start, done - posted

    def _trouble(self, problem: str) -> Retry:
        return Retry(self._agent.explain(problem), after=1.0)
