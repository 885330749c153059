"""The measurements one can ask for: plain, against a remote target, emulated, and every pair of a claim."""

import os
from collections.abc import Callable, Iterator, Sequence

import msgspec

from rackloom.prove.transfer import emulate
from rackloom.prove.transfer.lanes import HERE, NO_PROMISE, Lane, Place, Remote, run_together
from rackloom.prove.transfer.memory import require
from rackloom.prove.transfer.pairing import Pair, disjoint, spread_cores
from rackloom.prove.transfer.report import compare, matrix, single
from rackloom.prove.transfer.values import (
    AlignmentReport,
    Promise,
    Seat,
    TransferReport,
    TransferSpec,
    Ucx,
)

RUNS = 3
ONE_HOST = "plain: two processes on one host; says nothing about alignment"

ANYWHERE = Seat()
Step = Callable[[str], None]
Finished = Callable[[TransferReport], None]


class Watch(msgspec.Struct, frozen=True):
    """Who hears what starts now, and each run as soon as it is complete: a later one may fail."""

    step: Step = lambda _: None
    finished: Finished = lambda _: None


UNWATCHED = Watch()


def run_pair(
    spec: TransferSpec, *, initiator: Place = HERE, target: Place = HERE, promise: Promise = NO_PROMISE
) -> TransferReport:
    """Start a target and an initiator, measure once, end both.

    Raises:
        Refused: NIXL is not installed, or an end cannot do what `spec` and the seats ask.
        Retry: an end died or took longer than the timeout.
    """
    return run_together(spec, [Lane(initiator, target, promise)])[0]


def run_plain(
    spec: TransferSpec,
    *,
    runs: int = RUNS,
    seat: Seat = ANYWHERE,
    why: str | None = None,
    watch: Watch = UNWATCHED,
) -> AlignmentReport:
    """`runs` measurements between two processes of this host.

    `why` says why it is not the emulated pair, when that was asked for.

    Raises:
        Refused, Retry: as run_pair.
    """
    place = Place(seat=seat)
    reports = _repeat(spec, Lane(place, place, _promise_of(seat)), "plain", runs, watch)
    return single("plain", reports, ONE_HOST if why is None else f"{ONE_HOST} (not emulated: {why})")


def run_remote(
    spec: TransferSpec,
    target: Remote,
    *,
    seat: Seat = ANYWHERE,
    runs: int = RUNS,
    watch: Watch = UNWATCHED,
) -> AlignmentReport:
    """`runs` measurements against a target that somebody else serves; `seat` is this end's.

    Raises:
        Refused: NIXL is not installed, the secret is not the target's, or an end cannot do what is asked.
        Retry: the target is not there, died, or took longer than the timeout.
    """
    name = f"against {target.address} port {target.port}"
    reports = _repeat(spec, Lane(Place(seat=seat), target, _promise_of(seat)), name, runs, watch)
    return single("remote", reports, f"measured against the target at {target.address} port {target.port}")


def run_alignment(
    spec: TransferSpec,
    *,
    runs: int = RUNS,
    aligned_gigabits: float = emulate.ALIGNED_GIGABITS,
    unaligned_gigabits: float = emulate.UNALIGNED_GIGABITS,
    watch: Watch = UNWATCHED,
) -> AlignmentReport:
    """An aligned (rdma0) and an unaligned (rdma1) arm between two emulated pods, interleaved.

    Where pods cannot be emulated: one plain run, and the report says why.

    Raises:
        Refused: NIXL is not installed, or a size is impossible here.
        Retry: an end died or took longer than the timeout.
    """
    require()
    if why := emulate.can_emulate():
        return run_plain(spec, runs=1, why=why, watch=watch)
    arms: dict[str, list[TransferReport]] = {"rdma0": [], "rdma1": []}
    with emulate.emulate(aligned_gigabits, unaligned_gigabits) as pods:
        for number in range(runs):
            for device, name in (("rdma0", "aligned"), ("rdma1", "unaligned")):
                watch.step(f"{name} over {device} (emulated), run {number + 1} of {runs}")
                arms[device].append(run_emulated(spec, pods, device))
                watch.finished(arms[device][-1])
    return compare(arms["rdma0"], arms["rdma1"], (aligned_gigabits, unaligned_gigabits))


def run_emulated(
    spec: TransferSpec, pods: emulate.Pods, device: str, *, promised: str | None = None
) -> TransferReport:
    """One measurement between two pods with UCX pinned to `device` at both; `promised` defaults to it."""
    return run_together(spec, [emulated_lane(pods, device, promised=promised)])[0]


def emulated_lane(pods: emulate.Pods, device: str, *, promised: str | None = None) -> Lane:
    """A lane between two pods over `device`."""
    seat = Seat(ucx=Ucx(transports=("tcp",), net_devices=(device,)))
    declared = dict(zip(("rdma0", "rdma1"), pods.gigabits, strict=True))
    return Lane(
        Place(pods.prefix_a, "", seat),
        Place(pods.prefix_b, pods.address_b, seat),
        Promise(promised or device, declared[device], emulated=True),
    )


def run_pairs(
    spec: TransferSpec,
    pairs: Sequence[Pair],
    targets: Sequence[Remote] | None,
    *,
    seat: Seat = ANYWHERE,
    runs: int = RUNS,
    watch: Watch = UNWATCHED,
) -> AlignmentReport:
    """Every pair alone, then all at once, `runs` times; without `targets` both ends are on this host.

    Pairs that share a GPU or a NIC (a whole matrix of them) are measured alone only. Target k serves pair k.
    `seat` has what the initiators share: transports and the allocation.

    Raises:
        Refused, Retry: as run_pair.
    """
    lanes = [_lane(pair, seat, targets[k] if targets else None) for k, pair in enumerate(pairs)]
    return _matrix(spec, pairs, lanes, runs, watch, emulated=False)


def run_emulated_pairs(
    spec: TransferSpec, gigabits: tuple[float, float], *, runs: int = RUNS, watch: Watch = UNWATCHED
) -> AlignmentReport:
    """As `run_pairs` with the two shaped links between two emulated pods.

    Raises:
        Refused: pods cannot be emulated here; and as run_pair.
        Retry: as run_pair.
    """
    require()
    pairs = [Pair("cpu", device) for device in ("rdma0", "rdma1")]
    with emulate.emulate(*gigabits) as pods:
        lanes = [emulated_lane(pods, pair.nic) for pair in pairs]
        return _matrix(spec, pairs, lanes, runs, watch, emulated=True)


def _matrix(
    spec: TransferSpec,
    pairs: Sequence[Pair],
    lanes: Sequence[Lane],
    runs: int,
    watch: Watch,
    *,
    emulated: bool,
) -> AlignmentReport:
    """Alone and together are interleaved, so that a change of the weather meets both."""
    alone: list[list[TransferReport]] = [[] for _ in lanes]
    together: list[list[TransferReport]] = []
    for number in range(runs):
        for lane, pair, reports in zip(lanes, pairs, alone, strict=True):
            watch.step(f"{pair.device} over {pair.nic} alone, run {number + 1} of {runs}")
            reports.extend(_measure(spec, _on_own_cores([lane]), watch))
        if disjoint(pairs):
            watch.step(f"all {len(lanes)} pairs at once, run {number + 1} of {runs}")
            together.append(_measure(spec, _on_own_cores(lanes), watch))
    return matrix(pairs, alone, together, emulated=emulated)


def _measure(spec: TransferSpec, lanes: Sequence[Lane], watch: Watch) -> list[TransferReport]:
    reports = run_together(spec, lanes)
    for one in reports:
        watch.finished(one)
    return reports


def _repeat(spec: TransferSpec, lane: Lane, name: str, runs: int, watch: Watch) -> list[TransferReport]:
    reports = []
    for number in range(runs):
        watch.step(f"{name}, run {number + 1} of {runs}")
        reports.extend(_measure(spec, [lane], watch))
    return reports


def _lane(pair: Pair, seat: Seat, target: Remote | None) -> Lane:
    pins = Ucx(seat.ucx.transports, (pair.nic,))
    place = Place(seat=msgspec.structs.replace(seat, ucx=pins, device=pair.device))
    promise = Promise(pair.nic, path_class=pair.path_class, nearest_class=pair.nearest_class)
    return Lane(place, place if target is None else target, promise)


def _on_own_cores(lanes: Sequence[Lane]) -> list[Lane]:
    """The lanes with a processor for each end on this host, if there are enough."""
    places = [place for lane in lanes for place in (lane.initiator, lane.target) if isinstance(place, Place)]
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < len(places):
        return list(lanes)
    cores = iter(spread_cores(len(places), usable))
    return [_seated(lane, cores) for lane in lanes]


def _seated(lane: Lane, cores: Iterator[tuple[int, ...]]) -> Lane:
    here = _at(lane.initiator, next(cores))
    there = _at(lane.target, next(cores)) if isinstance(lane.target, Place) else lane.target
    return Lane(here, there, lane.promise)


def _at(place: Place, cores: tuple[int, ...]) -> Place:
    return msgspec.structs.replace(place, seat=msgspec.structs.replace(place.seat, cores=cores))


def _promise_of(seat: Seat) -> Promise:
    """One pinned device is a promise; several, or none, leave the choice to UCX."""
    devices = seat.ucx.net_devices
    return Promise(device=devices[0] if len(devices) == 1 else None)
