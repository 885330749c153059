"""The initiator: fills a buffer, moves it again and again with one reusable request, and keeps the time."""

import socket
import time
from collections.abc import Callable
from typing import Any

from rackloom.errors import Refused, Retry
from rackloom.prove.transfer.channel import Channel, Wire, connect
from rackloom.prove.transfer.evidence import Recorder
from rackloom.prove.transfer.host import take
from rackloom.prove.transfer.memory import Agent, open_agent
from rackloom.prove.transfer.messages import Begin, Begun, Finish, Finished, Offer, Served, served
from rackloom.prove.transfer.values import Host, Measured, Seat, TransferSpec

CONNECT_SECONDS = 10.0
"""How long to keep trying to reach a target that may still be starting."""
LOOK_EVERY = 0.1
"""Seconds of polling between two looks at the clock's deadline and at the control channel."""


def run(
    host: str,
    port: int,
    secret: bytes,
    spec: TransferSpec,
    seat: Seat,
    ready: Callable[[float], None] | None = None,
) -> Measured:
    """Measure `spec` against the target at `host`, `port`.

    `ready` is called after the warm-ups with the seconds that are left; timing begins when it returns.

    Raises:
        Refused: wrong secret, or the target cannot do what `spec` asks.
        Retry: the target is not there, went away, or took longer than the timeout.
    """
    facts = take(seat)
    deadline = time.monotonic() + spec.timeout_seconds
    wire = Wire(_reach(host, port, deadline), deadline, time.monotonic)
    try:
        channel = connect(wire, secret)
        channel.send(Offer(spec))
        with open_agent("initiator", spec, seat, progress_thread=False) as agent:
            if spec.op == "WRITE":
                agent.buffer.fill(spec.seed)
            session = _Session(channel, agent, spec, deadline)
            return session.measure(served(channel), facts, ready or (lambda _: None))
    finally:
        wire.close()


def _reach(host: str, port: int, deadline: float) -> socket.socket:
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


class _Session:
    """One measurement once both ends have their buffers."""

    def __init__(self, channel: Channel, agent: Agent, spec: TransferSpec, deadline: float) -> None:
        self._channel, self._agent, self._spec, self._deadline = channel, agent, spec, deadline
        self._request: Any = None

    def measure(self, offer: Served, facts: Host, ready: Callable[[float], None]) -> Measured:
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
        return Measured(
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

    def _begin(self, facts: Host) -> Recorder:
        self._channel.send(Begin())
        if self._spec.op == "READ":
            self._agent.buffer.wipe()
        self._channel.receive(Begun)
        return Recorder(facts)

    def _move(self) -> tuple[float, float]:
        """One transfer: seconds until the post returned, and from there until it was done."""
        nixl, request, clock = self._agent.nixl, self._request, time.perf_counter
        start = clock()
        try:
            state = nixl.transfer(request)
            posted = clock()
            look = posted + LOOK_EVERY
            while state == "PROC":
                state = nixl.check_xfer_state(request)
                if clock() > look:
                    self._look_around()
                    look = clock() + LOOK_EVERY
            done = clock()
        except Retry:
            raise
        except Exception as error:
            raise self._trouble(f"the transfer broke off: {error}") from error
        if state != "DONE":
            raise self._trouble("NIXL reported an error for the transfer")
        return posted - start, done - posted

    def _look_around(self) -> None:
        if time.monotonic() > self._deadline:
            raise self._trouble(f"the transfer took longer than {self._spec.timeout_seconds:g} s")
        if not self._channel.peer_is_there():
            raise self._trouble("the target ended in the middle of the transfer")

    def _trouble(self, problem: str) -> Retry:
        return Retry(self._agent.explain(problem), after=1.0)
