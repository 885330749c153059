"""The available measurements: plain, remote, emulated, and every GPU and NIC of a claim.

A `Lane` is one initiator, its target and the promise for the path between them. `run_lanes` measures
several at the same time: all ends start, all warm up, and timing begins when every initiator is warm. All
ends are ended on every way out. If ends on one host have fewer processors than they need for polling,
every report mentions it.

- `run_plain`: two processes on one host. It shows nothing about alignment.
- `run_remote`: against a target that another process serves.
- `run_alignment`: an aligned and an unaligned arm between two emulated pods, interleaved run by run.
- `run_pairs`, `run_emulated_pairs`: each pair alone, then all at once, interleaved, so that a change of
  the surroundings meets both. Pairs that share a GPU or a NIC are measured alone only.

`RunObserver` is called with each run as soon as it is complete, because a later one may fail.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress

import msgspec

from rackloom.core.transfer.pairing import (
    GpuNicPair,
    are_disjoint,
    lack_of_processors,
    pinned_config,
    spread_cores,
)
from rackloom.core.transfer.report import alignment_report, build_report, matrix_report, single_report
from rackloom.core.transfer.values import (
    AlignmentReport,
    EndConfig,
    Measurement,
    Promise,
    TransferReport,
    TransferSpec,
    UcxPins,
)
from rackloom.errors import Retry
from rackloom.prove.transfer import emulation
from rackloom.prove.transfer.installation import require_nixl
from rackloom.prove.transfer.processes import BeInitiator, BeTarget, Done, EndProcess, Failed, Listening, Warm

# Lanes: pairs of ends that are measured at the same time.


START_SECONDS = 30.0
"""For an end to start, import NIXL and report. Added to the transfer's own timeout."""


class EndLocation(msgspec.Struct, frozen=True):
    """The location of an end: the command prefix that enters it, its address, and its configuration."""

    prefix: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    config: EndConfig = EndConfig()


class RemoteTarget(msgspec.Struct, frozen=True):
    """A target that another process serves."""

    address: str
    port: int
    secret: str

    def __repr__(self) -> str:
        return f"Remote({self.address!r}, {self.port}, ...)"


LOCAL_END = EndLocation()
NO_PROMISE = Promise()


class Lane(msgspec.Struct, frozen=True):
    """One initiator, its target, and the promise for the path between them."""

    initiator: EndLocation = LOCAL_END
    target: EndLocation | RemoteTarget = LOCAL_END
    promise: Promise = NO_PROMISE


def run_lanes(spec: TransferSpec, lanes: Sequence[Lane]) -> list[TransferReport]:
    """Measure all lanes once: each warms up, and timing begins when all are warm. All ends are ended.

    Raises:
        Refused: NIXL is not installed, or an end cannot carry out `spec`.
        Retry: an end died or took longer than the timeout.
    """
    require_nixl()
    deadline = time.monotonic() + spec.timeout_seconds + START_SECONDS
    with ExitStack() as stack:
        running = [_RunningLane(stack, spec, lane, deadline) for lane in lanes]
        # Timing begins when all lanes are warm, so that they are timed side by side.
        for lane_run in running:
            lane_run.expect(Warm)
        for lane_run in running:
            lane_run.initiator.send_start()
        measured = [lane_run.measured() for lane_run in running]
    crowding = lack_of_processors(measured)
    return [
        build_report(spec, result, lane.promise, crowding, _promised_to_others(lane, lanes))
        for result, lane in zip(measured, lanes, strict=True)
    ]


class _RunningLane:
    """The processes of one lane."""

    def __init__(self, stack: ExitStack, spec: TransferSpec, lane: Lane, deadline: float) -> None:
        self._deadline = deadline
        self._target: EndProcess | None = None
        if isinstance(lane.target, RemoteTarget):
            address, port, secret = lane.target.address, lane.target.port, lane.target.secret
        else:
            address, secret = lane.target.address, secrets.token_hex(32)
            target = BeTarget(address, 0, lane.target.config, True, spec.timeout_seconds)
            self._target = stack.enter_context(EndProcess(lane.target.prefix, secret, target))
            port = self._target.expect(Listening, deadline).port
        order = BeInitiator(address, port, lane.initiator.config, spec, hold=True)
        self.initiator = stack.enter_context(EndProcess(lane.initiator.prefix, secret, order))

    def expect(self, kind: type[Warm] | type[Done]) -> Warm | Done:
        """The next event of `kind` from the initiator."""
        try:
            return self.initiator.expect(kind, self._deadline)
        except Retry:
            self._raise_cause()
            raise

    def measured(self) -> Measurement:
        """The initiator's measurement."""
        done = self.expect(Done)
        if not isinstance(done, Done) or done.measured is None:
            raise Retry("the initiator ended without a measurement", after=1.0)
        return done.measured

    def _raise_cause(self) -> None:
        """If the initiator lost its target, the target's own error names the cause."""
        if self._target is None:
            return
        with suppress(Retry):
            event = self._target.event(time.monotonic() + 1.0)
            if isinstance(event, Failed):
                raise event.error()


def _promised_to_others(lane: Lane, lanes: Sequence[Lane]) -> frozenset[str]:
    """Devices promised to the other lanes."""
    devices = {known.promise.device for known in lanes if known is not lane}
    return frozenset(device for device in devices if device and device != lane.promise.device)


# Kinds of measurement.


RUNS = 3
PLAIN_LABEL = "plain: two processes on one host; says nothing about alignment"

DEFAULT_END = EndConfig()


class RunObserver(msgspec.Struct, frozen=True):
    """Callbacks for each step that starts, and each run as soon as it is complete: a later one may fail."""

    step: Callable[[str], None] = lambda _: None
    finished: Callable[[TransferReport], None] = lambda _: None


NO_OBSERVER = RunObserver()


def run_plain(
    spec: TransferSpec,
    *,
    runs: int = RUNS,
    config: EndConfig = DEFAULT_END,
    why: str | None = None,
    watch: RunObserver = NO_OBSERVER,
) -> AlignmentReport:
    """`runs` measurements between two processes of this host.

    `why` is the reason why it is not the emulated pair, if that was requested.

    Raises:
        Refused, Retry: as run_lanes.
    """
    end = EndLocation(config=config)
    reports = _repeat_lane(spec, Lane(end, end, _promise_of_pins(config)), "plain", runs, watch)
    label = PLAIN_LABEL if why is None else f"{PLAIN_LABEL} (not emulated: {why})"
    return single_report("plain", reports, label)


def run_remote(
    spec: TransferSpec,
    target: RemoteTarget,
    *,
    config: EndConfig = DEFAULT_END,
    runs: int = RUNS,
    watch: RunObserver = NO_OBSERVER,
) -> AlignmentReport:
    """`runs` measurements against a target that another process serves. `config` is this end's.

    Raises:
        Refused: NIXL is not installed, the secret is not the target's, or an end cannot carry out `spec`.
        Retry: the target is not there, died, or took longer than the timeout.
    """
    at = f"{target.address} port {target.port}"
    lane = Lane(EndLocation(config=config), target, _promise_of_pins(config))
    reports = _repeat_lane(spec, lane, f"against {at}", runs, watch)
    return single_report("remote", reports, f"measured against the target at {at}")


def run_alignment(
    spec: TransferSpec,
    *,
    runs: int = RUNS,
    aligned_gigabits: float = emulation.ALIGNED_GIGABITS,
    unaligned_gigabits: float = emulation.UNALIGNED_GIGABITS,
    watch: RunObserver = NO_OBSERVER,
) -> AlignmentReport:
    """An aligned (rdma0) and an unaligned (rdma1) arm between two emulated pods, interleaved.

    If pods cannot be emulated: one plain run, and the report gives the reason.

    Raises:
        Refused: NIXL is not installed, or a size is impossible here.
        Retry: an end died or took longer than the timeout.
    """
    require_nixl()
    if why := emulation.can_emulate():
        return run_plain(spec, runs=1, why=why, watch=watch)
    arms: dict[str, list[TransferReport]] = {"rdma0": [], "rdma1": []}
    with emulation.emulate(aligned_gigabits, unaligned_gigabits) as pods:
        for number in range(runs):
            for device, name in (("rdma0", "aligned"), ("rdma1", "unaligned")):
                watch.step(f"{name} over {device} (emulated), run {number + 1} of {runs}")
                arms[device].append(run_emulated(spec, pods, device))
                watch.finished(arms[device][-1])
    return alignment_report(arms["rdma0"], arms["rdma1"], (aligned_gigabits, unaligned_gigabits))


def run_emulated(
    spec: TransferSpec, pods: emulation.EmulatedPods, device: str, *, promised: str | None = None
) -> TransferReport:
    """One measurement between two pods with UCX pinned to `device` at both. `promised` defaults to it."""
    return run_lanes(spec, [emulated_lane(pods, device, promised=promised)])[0]


def emulated_lane(pods: emulation.EmulatedPods, device: str, *, promised: str | None = None) -> Lane:
    """A lane between two pods over `device`."""
    config = EndConfig(ucx=UcxPins(transports=("tcp",), net_devices=(device,)))
    declared = dict(zip(("rdma0", "rdma1"), pods.gigabits, strict=True))
    return Lane(
        EndLocation(pods.prefix_a, "", config),
        EndLocation(pods.prefix_b, pods.address_b, config),
        Promise(promised or device, declared[device], emulated=True),
    )


def run_pairs(
    spec: TransferSpec,
    pairs: Sequence[GpuNicPair],
    targets: Sequence[RemoteTarget] | None,
    *,
    config: EndConfig = DEFAULT_END,
    runs: int = RUNS,
    watch: RunObserver = NO_OBSERVER,
) -> AlignmentReport:
    """Every pair alone, then all at once, `runs` times. Without `targets` both ends are on this host.

    Pairs that share a GPU or a NIC (a whole matrix of them) are measured alone only. Target k serves pair k.
    `config` holds the common settings of the initiators: transports and the allocation.

    Raises:
        Refused, Retry: as run_lanes.
    """
    lanes = [_pair_lane(pair, config, targets[k] if targets else None) for k, pair in enumerate(pairs)]
    return _measure_pairs(spec, pairs, lanes, runs, watch, emulated=False)


def run_emulated_pairs(
    spec: TransferSpec, gigabits: tuple[float, float], *, runs: int = RUNS, watch: RunObserver = NO_OBSERVER
) -> AlignmentReport:
    """As `run_pairs` with the two shaped links between two emulated pods.

    Raises:
        Refused: pods cannot be emulated here, and as run_lanes.
        Retry: as run_lanes.
    """
    require_nixl()
    pairs = [GpuNicPair("cpu", device) for device in ("rdma0", "rdma1")]
    with emulation.emulate(*gigabits) as pods:
        lanes = [emulated_lane(pods, pair.nic) for pair in pairs]
        return _measure_pairs(spec, pairs, lanes, runs, watch, emulated=True)


def _measure_pairs(
    spec: TransferSpec,
    pairs: Sequence[GpuNicPair],
    lanes: Sequence[Lane],
    runs: int,
    watch: RunObserver,
    *,
    emulated: bool,
) -> AlignmentReport:
    """Alone and together are interleaved, so that a change of load affects both."""
    alone: list[list[TransferReport]] = [[] for _ in lanes]
    together: list[list[TransferReport]] = []
    for number in range(runs):
        for lane, pair, reports in zip(lanes, pairs, alone, strict=True):
            watch.step(f"{pair.device} over {pair.nic} alone, run {number + 1} of {runs}")
            reports.extend(_measure_lanes(spec, _lanes_on_own_cores([lane]), watch))
        if are_disjoint(pairs):
            watch.step(f"all {len(lanes)} pairs at once, run {number + 1} of {runs}")
            together.append(_measure_lanes(spec, _lanes_on_own_cores(lanes), watch))
    return matrix_report(pairs, alone, together, emulated=emulated)


def _measure_lanes(spec: TransferSpec, lanes: Sequence[Lane], watch: RunObserver) -> list[TransferReport]:
    reports = run_lanes(spec, lanes)
    for report in reports:
        watch.finished(report)
    return reports


def _repeat_lane(
    spec: TransferSpec, lane: Lane, name: str, runs: int, watch: RunObserver
) -> list[TransferReport]:
    reports = []
    for number in range(runs):
        watch.step(f"{name}, run {number + 1} of {runs}")
        reports.extend(_measure_lanes(spec, [lane], watch))
    return reports


def _pair_lane(pair: GpuNicPair, config: EndConfig, target: RemoteTarget | None) -> Lane:
    end = EndLocation(config=pinned_config(config, pair))
    promise = Promise(pair.nic, path_class=pair.path_class, nearest_class=pair.nearest_class)
    return Lane(end, end if target is None else target, promise)


def _lanes_on_own_cores(lanes: Sequence[Lane]) -> list[Lane]:
    """The lanes with a part of the processors for each end on this host, if there are enough."""
    ends = [end for lane in lanes for end in (lane.initiator, lane.target) if isinstance(end, EndLocation)]
    cores = iter(spread_cores(len(ends), sorted(os.sched_getaffinity(0))))
    return [_lane_on_cores(lane, cores) for lane in lanes]


def _lane_on_cores(lane: Lane, cores: Iterator[tuple[int, ...]]) -> Lane:
    here, there = (
        msgspec.structs.replace(
            end, config=msgspec.structs.replace(end.config, cores=next(cores) or end.config.cores)
        )
        if isinstance(end, EndLocation)
        else end
        for end in (lane.initiator, lane.target)
    )
    return msgspec.structs.replace(lane, initiator=here, target=there)


def _promise_of_pins(config: EndConfig) -> Promise:
    """One pinned device is a promise. Several, or none, leave the choice to UCX."""
    devices = config.ucx.net_devices
    return Promise(device=devices[0] if len(devices) == 1 else None)
