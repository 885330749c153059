"""The demo's transfer: a real buffer between two processes, its data verified and its path proved."""

import asyncio

from rackloom.app.demo.story import Evidence, NotSeen
from rackloom.prove.transfer.memory import missing
from rackloom.prove.transfer.report import result_line
from rackloom.prove.transfer.run import run_alignment
from rackloom.prove.transfer.sockets import LABEL, run_sockets
from rackloom.prove.transfer.values import Arm, TransferSpec

SPEC = TransferSpec(block_size=64 << 20, iters=5, warmup_iters=1)
"""Small, so that the demo ends within a minute on two cores; the example moves 1 GiB, 20 + 100 times."""
SIZE = "64 MiB x 5 (the benchmark's own size is 1 GiB x 100)"


async def move_buffer() -> Evidence:
    """WRITE over NIXL; aligned against unaligned where two NICs can be emulated, else one plain run."""
    if (reason := missing()) is not None:
        return await _without_nixl(reason)
    report = await asyncio.to_thread(run_alignment, SPEC, runs=1)
    if not report.proved:
        raise NotSeen(report.verdict, label=report.label)
    arms = [arm for arm in (report.aligned, report.unaligned, report.plain) if arm is not None]
    return {
        "label": report.label,
        "verdict": report.verdict,
        "size": SIZE,
        "arms": {arm.name: _said(arm) for arm in arms},
        "declaredRatio": report.declared_ratio,
        "measuredRatio": report.measured_ratio,
        "results": [result_line(run) for arm in arms for run in arm.runs],
    }


async def _without_nixl(reason: str) -> Evidence:
    report = await asyncio.to_thread(run_sockets, SPEC.total_bytes, SPEC.iters)
    if not report.verified:
        raise NotSeen("the data did not arrive intact", label=LABEL)
    return {"label": f"degraded: {LABEL} ({reason})", "size": SIZE, "dataVerified": True}


def _said(arm: Arm) -> Evidence:
    run = arm.runs[0]
    return {
        "device": arm.device,
        "declaredGbps": arm.declared_gigabits,
        "GBps": round(arm.mean_GBps, 3),
        "p50Milliseconds": round(run.p50_seconds * 1000, 2),
        "dataVerified": run.verified,
        "path": run.path.evidence,
    }
