"""Turns what the ends observed into reports; pure."""

import msgspec

from rackloom.errors import Refused
from rackloom.prove.transfer.host import contention
from rackloom.prove.transfer.measure import gigabytes_per_second, mean, spread, summarize
from rackloom.prove.transfer.path import prove
from rackloom.prove.transfer.values import (
    AlignmentReport,
    Arm,
    Environment,
    Measured,
    Promise,
    TransferReport,
    TransferSpec,
)


def compare(
    aligned: list[TransferReport], unaligned: list[TransferReport], gigabits: tuple[float, float]
) -> AlignmentReport:
    """The two arms of an emulated run side by side, measured against declared."""
    first = _arm("aligned", Promise("rdma0", gigabits[0]), aligned)
    second = _arm("unaligned", Promise("rdma1", gigabits[1]), unaligned)
    declared, measured = gigabits[0] / gigabits[1], first.mean_GBps / second.mean_GBps
    runs = [*aligned, *unaligned]
    return AlignmentReport(
        emulated=True,
        label=(
            f"emulated: veth pairs shaped to {gigabits[0]:g} and {gigabits[1]:g} Gb/s, declared by us; "
            "proves pinning, path and reporting, not hardware"
        ),
        aligned=first,
        unaligned=second,
        declared_ratio=declared,
        measured_ratio=measured,
        proved=_proved(runs),
        verdict=(
            f"{_data_sentence(runs)}; {first.mean_GBps:.2f} against {second.mean_GBps:.2f} GB/s (emulated), "
            f"ratio {measured:.3f} where {declared:.3f} was declared{_caution(runs)}"
        ),
    )


def report(spec: TransferSpec, measured: Measured, promise: Promise) -> TransferReport:
    """What the ends observed, as the figures of the RESULT line with their proof."""
    here, there = measured.initiator, measured.target
    whole, post = summarize(measured.seconds), mean(measured.post_seconds)
    return TransferReport(
        backend=measured.backend,
        op=spec.op,
        block_size=spec.block_size,
        batch_size=spec.batch_size,
        total_bytes=spec.total_bytes,
        iters=spec.iters,
        warmup_iters=spec.warmup_iters,
        avg_seconds=whole.avg,
        min_seconds=whole.min,
        p50_seconds=whole.p50,
        p95_seconds=whole.p95,
        p99_seconds=whole.p99,
        avg_GBps=gigabytes_per_second(spec.total_bytes, whole.avg),
        verified=here.digest == there.digest,
        emulated=promise.emulated,
        declared_gigabits=promise.declared_gigabits,
        avg_post_seconds=post,
        avg_transfer_seconds=max(0.0, whole.avg - post),
        connect_seconds=measured.connect_seconds,
        first_seconds=measured.first_seconds,
        path=prove(
            spec.op, spec.timed_bytes, measured.protocols, here.traffic, there.traffic, promise.device
        ),
        environment=_environment(measured),
    )


def single(name: str, runs: list[TransferReport], label: str) -> AlignmentReport:
    """Runs of one placement, with nothing to compare them to."""
    arm = _arm(name, Promise(runs[0].path.promised) if runs else Promise(), runs)
    return AlignmentReport(
        emulated=False,
        label=label,
        plain=arm,
        proved=_proved(runs),
        verdict=f"{_data_sentence(runs)}; {arm.mean_GBps:.2f} GB/s{_caution(runs)}",
    )


def result_line(report: TransferReport) -> str:
    """The line that logs are searched for."""
    return f"RESULT {msgspec.json.encode(report).decode()}"


def _environment(measured: Measured) -> Environment:
    here, there = measured.initiator, measured.target
    return Environment(
        initiator=here.host,
        target=there.host,
        initiator_usage=here.usage,
        target_usage=there.usage,
        contention=contention(here.usage, there.usage),
    )


def _arm(name: str, promise: Promise, runs: list[TransferReport]) -> Arm:
    if not runs:
        raise Refused("no run was asked for", nearest_fix="ask for at least one run")
    rates = [run.avg_GBps for run in runs]
    return Arm(name, promise.device, promise.declared_gigabits, tuple(runs), mean(rates), spread(rates))


def _proved(runs: list[TransferReport]) -> bool:
    return all(run.verified and run.path.verdict in ("holds", "no promise") for run in runs)


def _data_sentence(runs: list[TransferReport]) -> str:
    if not all(run.verified for run in runs):
        return "the data did NOT arrive intact"
    wrong = {run.path.verdict for run in runs} - {"holds", "no promise"}
    if wrong:
        return f"data verified, but the promised path {' / '.join(sorted(wrong))}"
    return "data verified, path proved" if runs[0].path.promised else "data verified"


def _caution(runs: list[TransferReport]) -> str:
    """The first reason to distrust the rates. The data and the path are proved all the same."""
    reasons = [run.environment.contention for run in runs if run.environment.contention]
    return f"; rates are NOT reliable, {reasons[0]}" if reasons else ""
