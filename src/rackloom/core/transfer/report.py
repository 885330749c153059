"""Builds reports from the observations of both ends: one run, the arms of a comparison, a matrix of pairs.

`build_report` computes the figures of one run (mean and percentiles over the timed iterations, rate, the
part of the time spent posting) and adds the proof of the path, the expectation of the rate, the
circumstances of the measurement, and reasons to distrust the rate, such as contention. Data are verified
if both ends have the same digest.

`single_report` combines the runs of one placement. `alignment_report` compares aligned with unaligned runs,
measured ratio beside declared ratio. `matrix_report` has every pair alone and all at once, with the share of
time in which all pairs were timed side by side. A report is proved only if every run verified its data and
kept its promise, if it had one. Contention makes rates unreliable, but data and path are still proved.
"""

from collections.abc import Sequence

import msgspec

from rackloom.core.transfer.pairing import GpuNicPair
from rackloom.core.transfer.proof import contention_reason, expect_rate, prove_path
from rackloom.core.transfer.statistics import (
    gigabytes_per_second,
    mean,
    mean_interval,
    relative_spread,
    summarize,
)
from rackloom.core.transfer.values import (
    AlignmentReport,
    Arm,
    Measurement,
    Promise,
    RunEnvironment,
    TransferReport,
    TransferSpec,
)
from rackloom.errors import Refused


def alignment_report(
    aligned: list[TransferReport], unaligned: list[TransferReport], gigabits: tuple[float, float]
) -> AlignmentReport:
    """The two arms of an emulated run side by side, measured against declared."""
    first = _arm_of("aligned", Promise("rdma0", gigabits[0]), aligned)
    second = _arm_of("unaligned", Promise("rdma1", gigabits[1]), unaligned)
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
        proved=_is_proved(runs),
        verdict=(
            f"{_data_sentence(runs)}; {first.mean_GBps:.2f} against {second.mean_GBps:.2f} GB/s (emulated), "
            f"ratio {measured:.3f} where {declared:.3f} was declared{_reliability_note(runs)}"
        ),
    )


def build_report(
    spec: TransferSpec,
    measured: Measurement,
    promise: Promise,
    crowding: str | None = None,
    companions: frozenset[str] = frozenset(),
) -> TransferReport:
    """The figures of the RESULT line with their proof, from the observations of the ends.

    `crowding` is the reason why the ends lacked a processor each, if they did. `companions` are devices
    promised to transfers that ran at the same time.
    """
    here, there = measured.initiator, measured.target
    whole, post = summarize(measured.seconds), mean(measured.post_seconds)
    rate = gigabytes_per_second(spec.total_bytes, whole.avg)
    path = prove_path(
        spec.op,
        spec.timed_bytes,
        measured.protocols,
        here.traffic,
        there.traffic,
        promise.device,
        companions,
    )
    environment = _run_environment(measured, crowding)
    copying = measured.copy_seconds and gigabytes_per_second(spec.total_bytes, measured.copy_seconds)
    return TransferReport(
        backend=measured.backend,
        op=spec.op,
        device=here.host.device,
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
        avg_GBps=rate,
        verified=here.digest == there.digest,
        emulated=promise.emulated,
        declared_gigabits=promise.declared_gigabits,
        avg_post_seconds=post,
        avg_transfer_seconds=max(0.0, whole.avg - post),
        connect_seconds=measured.connect_seconds,
        first_seconds=measured.first_seconds,
        path=path,
        environment=environment,
        path_class=promise.path_class,
        expectation=expect_rate(rate, promise, path, environment, copying),
        copy_GBps=copying,
        began=measured.began,
        ended=measured.ended,
    )


def single_report(name: str, runs: list[TransferReport], label: str) -> AlignmentReport:
    """Runs of one placement, with nothing to compare them to."""
    arm = _arm_of(name, Promise(runs[0].path.promised) if runs else Promise(), runs)
    return AlignmentReport(
        emulated=False,
        label=label,
        plain=arm,
        proved=_is_proved(runs),
        verdict=f"{_data_sentence(runs)}; {arm.mean_GBps:.2f} GB/s{_reliability_note(runs)}",
    )


def matrix_report(
    pairs: Sequence[GpuNicPair],
    alone: Sequence[Sequence[TransferReport]],
    together: Sequence[Sequence[TransferReport]],
    *,
    emulated: bool,
) -> AlignmentReport:
    """Each pair's runs alone (`alone[pair]`), then its part in those of all at once (`together[run]`)."""
    arms = [_pair_arm(pair, list(runs)) for pair, runs in zip(pairs, alone, strict=True)]
    if together:
        overlap = min(_time_overlap(runs) for runs in together)
        at_once = [_pair_arm(pair, [runs[k] for runs in together]) for k, pair in enumerate(pairs)]
        arms += [msgspec.structs.replace(arm, together=True, overlap=overlap) for arm in at_once]
    every = [run for arm in arms for run in arm.runs]
    kind = "emulated: shaped veth pairs at rates declared by us" if emulated else "pairs of GPU and NIC"
    return AlignmentReport(
        emulated=emulated,
        label=f"{kind}; each alone{f', then all {len(pairs)} at once' if together else ''}",
        pairs=tuple(arms),
        proved=_is_proved(every),
        verdict=f"{_data_sentence(every)}{_together_sentence(arms)}{_reliability_note(every)}",
    )


def result_line(report: TransferReport) -> str:
    """The line that logs are searched for."""
    return f"RESULT {msgspec.json.encode(report).decode()}"


def _run_environment(measured: Measurement, crowding: str | None) -> RunEnvironment:
    here, there = measured.initiator, measured.target
    reasons = [reason for reason in (crowding, contention_reason(here.usage, there.usage)) if reason]
    return RunEnvironment(
        initiator=here.host,
        target=there.host,
        initiator_usage=here.usage,
        target_usage=there.usage,
        contention="; ".join(reasons) or None,
    )


def _arm_of(name: str, promise: Promise, runs: list[TransferReport]) -> Arm:
    if not runs:
        raise Refused("no run was asked for", nearest_fix="ask for at least one run")
    rates = [run.avg_GBps for run in runs]
    return Arm(
        name,
        promise.device,
        promise.declared_gigabits,
        tuple(runs),
        mean(rates),
        relative_spread(rates),
        interval=mean_interval(rates),
        gpu=runs[0].device,
    )


def _pair_arm(pair: GpuNicPair, runs: list[TransferReport]) -> Arm:
    declared = runs[0].declared_gigabits if runs else None
    return _arm_of(f"{pair.device} over {pair.nic}", Promise(pair.nic, declared), runs)


def _together_sentence(arms: Sequence[Arm]) -> str:
    together = [arm for arm in arms if arm.together]
    if not together:
        return ""
    total, overlap = sum(arm.mean_GBps for arm in together), together[0].overlap
    return f"; {total:.2f} GB/s in all with {len(together)} at once, {overlap:.0%} of the time side by side"


def _time_overlap(runs: Sequence[TransferReport]) -> float:
    """The share of the longest run's time in which all runs were being timed."""
    side_by_side = min(run.ended for run in runs) - max(run.began for run in runs)
    longest = max(run.ended - run.began for run in runs)
    return max(0.0, side_by_side / longest) if longest > 0 else 0.0


def _is_proved(runs: list[TransferReport]) -> bool:
    return all(run.verified and run.path.verdict in ("holds", "no promise") for run in runs)


def _data_sentence(runs: list[TransferReport]) -> str:
    if not all(run.verified for run in runs):
        return "the data did NOT arrive intact"
    wrong = {run.path.verdict for run in runs} - {"holds", "no promise"}
    if wrong:
        return f"data verified, but the promised path {' / '.join(sorted(wrong))}"
    return "data verified, path proved" if runs[0].path.promised else "data verified"


def _reliability_note(runs: list[TransferReport]) -> str:
    """The first reason to distrust the rates. The data and the path are proved all the same."""
    reason = next((run.environment.contention for run in runs if run.environment.contention), None)
    return f"; rates are NOT reliable, {reason}" if reason else ""
