"""Runs lanes: pairs of ends that are measured at the same time; one pair is the smallest case."""

import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import msgspec

from rackloom.errors import Retry
from rackloom.prove.transfer.events import BeInitiator, BeTarget, Done, Failed, Listening, Warm
from rackloom.prove.transfer.memory import require
from rackloom.prove.transfer.pairing import without_core
from rackloom.prove.transfer.processes import End
from rackloom.prove.transfer.report import report
from rackloom.prove.transfer.values import Measured, Promise, Seat, TransferReport, TransferSpec

START_SECONDS = 30.0
"""For an end to start, import NIXL and report; beyond the transfer's own timeout."""


class Place(msgspec.Struct, frozen=True):
    """Where an end of ours runs: the command prefix that enters it, its address there, and its seat."""

    prefix: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    seat: Seat = Seat()


class Remote(msgspec.Struct, frozen=True):
    """A target that somebody else serves."""

    address: str
    port: int
    secret: str

    def __repr__(self) -> str:
        return f"Remote({self.address!r}, {self.port}, ...)"


HERE = Place()
NO_PROMISE = Promise()


class Lane(msgspec.Struct, frozen=True):
    """One initiator, its target, and what is promised of the way between them."""

    initiator: Place = HERE
    target: Place | Remote = HERE
    promise: Promise = NO_PROMISE


def run_together(spec: TransferSpec, lanes: Sequence[Lane]) -> list[TransferReport]:
    """Measure all lanes once: each warms up, and timing begins when all are warm. All ends are ended.

    Raises:
        Refused: NIXL is not installed, or an end cannot do what is asked.
        Retry: an end died or took longer than the timeout.
    """
    require()
    deadline = time.monotonic() + spec.timeout_seconds + START_SECONDS
    with ExitStack() as stack:
        running = [_Running(stack, spec, lane, deadline) for lane in lanes]
        for one in running:
            one.expect(Warm)
        for one in running:
            one.initiator.say_start()
        measured = [one.measured() for one in running]
    crowding = _crowding(measured)
    return [
        report(spec, result, lane.promise, crowding, _companions(lane, lanes))
        for result, lane in zip(measured, lanes, strict=True)
    ]


class _Running:
    """The processes of one lane."""

    def __init__(self, stack: ExitStack, spec: TransferSpec, lane: Lane, deadline: float) -> None:
        self._deadline = deadline
        self._target: End | None = None
        if isinstance(lane.target, Remote):
            address, port, secret = lane.target.address, lane.target.port, lane.target.secret
        else:
            address, secret = lane.target.address, secrets.token_hex(32)
            target = BeTarget(address, 0, lane.target.seat, True, spec.timeout_seconds)
            self._target = stack.enter_context(End(lane.target.prefix, secret, target))
            port = self._target.expect(Listening, deadline).port
        order = BeInitiator(address, port, lane.initiator.seat, spec, hold=True)
        self.initiator = stack.enter_context(End(lane.initiator.prefix, secret, order))

    def expect(self, kind: type[Warm] | type[Done]) -> Warm | Done:
        """The next event of `kind` from the initiator."""
        try:
            return self.initiator.expect(kind, self._deadline)
        except Retry:
            self._raise_cause()
            raise

    def measured(self) -> Measured:
        """What the initiator measured."""
        done = self.expect(Done)
        if not isinstance(done, Done) or done.measured is None:
            raise Retry("the initiator ended without a measurement", after=1.0)
        return done.measured

    def _raise_cause(self) -> None:
        """When the initiator lost its target, the target's own words say more."""
        if self._target is None:
            return
        with suppress(Retry):
            event = self._target.event(time.monotonic() + 1.0)
            if isinstance(event, Failed):
                raise event.error()


def _companions(lane: Lane, lanes: Sequence[Lane]) -> frozenset[str]:
    """Devices promised to the other lanes."""
    return frozenset(
        other.promise.device for other in lanes if other is not lane and other.promise.device
    ) - {lane.promise.device or ""}


def _crowding(measured: Sequence[Measured]) -> str | None:
    """One sentence if the ends on one host, ours or not, have fewer processors than they are."""
    hosts: dict[str, list[Sequence[int]]] = {}
    for one in measured:
        for host in (one.initiator.host, one.target.host):
            mine = host.cores or range(host.usable_processors)
            hosts.setdefault(host.hostname, []).append(mine)
    for name, cores in hosts.items():
        if lacking := without_core(cores):
            return f"{lacking} of {len(cores)} polling ends on {name} have no processor of their own"
    return None
