"""Runs both ends: once, against somebody else's target, or as an aligned and an unaligned arm."""

import secrets
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from rackloom.errors import Retry
from rackloom.prove.transfer import emulate
from rackloom.prove.transfer.events import BeInitiator, BeTarget, Done, Failed, Listening
from rackloom.prove.transfer.memory import require
from rackloom.prove.transfer.processes import End
from rackloom.prove.transfer.report import compare, report, single
from rackloom.prove.transfer.values import (
    AlignmentReport,
    Measured,
    Promise,
    TransferReport,
    TransferSpec,
    Ucx,
)

RUNS = 3
ONE_HOST = "plain: two processes on one host; says nothing about alignment"
_START_SECONDS = 30.0
"""For an end to start, import NIXL and report; beyond the transfer's own timeout."""

ANY_DEVICE = Ucx()
Step = Callable[[str], None]


class Place(msgspec.Struct, frozen=True):
    """Where an end runs: the command prefix that enters it, its address there, and how UCX is pinned."""

    prefix: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    ucx: Ucx = ANY_DEVICE


HERE = Place()
NO_PROMISE = Promise()


def run_pair(
    spec: TransferSpec, *, initiator: Place = HERE, target: Place = HERE, promise: Promise = NO_PROMISE
) -> TransferReport:
    """Start a target and an initiator, measure once, end both.

    Raises:
        Refused: NIXL is not installed, or an end cannot do what `spec` and the pins ask.
        Retry: an end died or took longer than the timeout.
    """
    require()
    secret = secrets.token_hex(32)
    deadline = time.monotonic() + spec.timeout_seconds + _START_SECONDS
    with End(
        target.prefix, secret, BeTarget(target.address, 0, target.ucx, True, spec.timeout_seconds)
    ) as there:
        port = there.expect(Listening, deadline).port
        order = BeInitiator(target.address, port, initiator.ucx, spec)
        with End(initiator.prefix, secret, order) as here:
            try:
                measured = _measured(here, deadline)
            except Retry:
                _raise_cause(there)
                raise
    return report(spec, measured, promise)


def run_plain(
    spec: TransferSpec,
    *,
    runs: int = RUNS,
    ucx: Ucx = ANY_DEVICE,
    why: str | None = None,
    on_step: Step = lambda _: None,
) -> AlignmentReport:
    """`runs` measurements between two processes of this host.

    `why` says why it is not the emulated pair, when that was asked for.

    Raises:
        Refused, Retry: as run_pair.
    """
    place, promise = Place(ucx=ucx), _promise_of(ucx)
    reports = []
    for number in range(runs):
        on_step(f"plain, run {number + 1} of {runs}")
        reports.append(run_pair(spec, initiator=place, target=place, promise=promise))
    return single("plain", reports, ONE_HOST if why is None else f"{ONE_HOST} (not emulated: {why})")


def run_remote(
    spec: TransferSpec,
    *,
    address: str,
    port: int,
    secret: str,
    ucx: Ucx = ANY_DEVICE,
    runs: int = RUNS,
    on_step: Step = lambda _: None,
) -> AlignmentReport:
    """`runs` measurements against a target that somebody else serves; `ucx` pins this end.

    Raises:
        Refused: NIXL is not installed, the secret is not the target's, or an end cannot do what is asked.
        Retry: the target is not there, died, or took longer than the timeout.
    """
    require()
    reports = []
    for number in range(runs):
        on_step(f"against {address} port {port}, run {number + 1} of {runs}")
        deadline = time.monotonic() + spec.timeout_seconds + _START_SECONDS
        with End((), secret, BeInitiator(address, port, ucx, spec)) as here:
            reports.append(report(spec, _measured(here, deadline), _promise_of(ucx)))
    return single("remote", reports, f"measured against the target at {address} port {port}")


def run_alignment(
    spec: TransferSpec,
    *,
    runs: int = RUNS,
    aligned_gigabits: float = emulate.ALIGNED_GIGABITS,
    unaligned_gigabits: float = emulate.UNALIGNED_GIGABITS,
    on_step: Step = lambda _: None,
) -> AlignmentReport:
    """An aligned (rdma0) and an unaligned (rdma1) arm between two emulated pods, interleaved.

    Where pods cannot be emulated: one plain run, and the report says why. `on_step` hears what starts now.

    Raises:
        Refused: NIXL is not installed, or a size is impossible here.
        Retry: an end died or took longer than the timeout.
    """
    require()
    if why := emulate.can_emulate():
        return run_plain(spec, runs=1, why=why, on_step=on_step)
    arms: dict[str, list[TransferReport]] = {"rdma0": [], "rdma1": []}
    with emulate.emulate(aligned_gigabits, unaligned_gigabits) as pods:
        for number in range(runs):
            for device, name in (("rdma0", "aligned"), ("rdma1", "unaligned")):
                on_step(f"{name} over {device} (emulated), run {number + 1} of {runs}")
                arms[device].append(run_emulated(spec, pods, device))
    return compare(arms["rdma0"], arms["rdma1"], (aligned_gigabits, unaligned_gigabits))


def run_emulated(
    spec: TransferSpec, pods: emulate.Pods, device: str, *, promised: str | None = None
) -> TransferReport:
    """One measurement between two pods with UCX pinned to `device` at both; `promised` defaults to it."""
    pins = Ucx(transports=("tcp",), net_devices=(device,))
    declared = dict(zip(("rdma0", "rdma1"), pods.gigabits, strict=True))
    return run_pair(
        spec,
        initiator=Place(pods.prefix_a, "", pins),
        target=Place(pods.prefix_b, pods.address_b, pins),
        promise=Promise(promised or device, declared[device], emulated=True),
    )


def _promise_of(ucx: Ucx) -> Promise:
    """One pinned device is a promise; several, or none, leave the choice to UCX."""
    return Promise(device=ucx.net_devices[0] if len(ucx.net_devices) == 1 else None)


def _measured(end: End, deadline: float) -> Measured:
    measured = end.expect(Done, deadline).measured
    if measured is None:
        raise Retry("the initiator ended without a measurement", after=1.0)
    return measured


def _raise_cause(target: End) -> None:
    """When the initiator lost its target, the target's own words say more."""
    with suppress(Retry):
        event = target.event(time.monotonic() + 1.0)
        if isinstance(event, Failed):
            raise event.error()
