"""Reports and records made of plain numbers, for the tests of their users."""

from collections.abc import Sequence

import msgspec

from rackloom.core.transfer.pairing import GpuNicPair
from rackloom.core.transfer.records import ToolFigure, ToolOutput, TransferRecord
from rackloom.core.transfer.report import build_report, matrix_report, single_report
from rackloom.core.transfer.values import (
    DeviceTraffic,
    EndRecord,
    EndUsage,
    HostFacts,
    Link,
    Measurement,
    Promise,
    TransferReport,
    TransferSpec,
    UcxPins,
)
from rackloom.topology.machine import Machine
from rackloom.topology.profiles import load_machine

SPEC = TransferSpec(block_size=1 << 20, batch_size=2, iters=4, warmup_iters=1)
RESULT_FIELDS = [
    "event",
    "backend",
    "requested_backend",
    "op",
    "device",
    "block_size",
    "batch_size",
    "total_bytes",
    "iters",
    "warmup_iters",
    "avg_seconds",
    "min_seconds",
    "p50_seconds",
    "p95_seconds",
    "p99_seconds",
    "avg_GBps",
]
"""The beginning of a run's line, in this order, which readers of the example's output know."""


def nic(name: str, gigabits: float = 400.0, **facts: object) -> Link:
    return msgspec.structs.replace(
        Link(name=f"{name}:1", kind="rdma", state="ACTIVE", gigabits=gigabits), **facts
    )


def run(
    gbps: float,
    device: str = "mlx5_0",
    *,
    carried: str | None = None,
    intact: bool = True,
    cpu: float = 10.0,
    links: Sequence[Link] = (),
    promise: Promise | None = None,
    memory: str = "cpu",
    window: tuple[float, float] = (0.0, 1.0),
) -> TransferReport:
    """A run of `gbps` GB/s that promised `device` and used `carried`."""
    seconds = SPEC.total_bytes / (gbps * 1e9)
    by = f"{carried or device}:1"

    def end(name: str, sent: int, received: int) -> EndRecord:
        host = HostFacts(
            name,
            "Linux",
            4,
            4,
            0.1,
            "3.11",
            "1.5.1",
            UcxPins(),
            device=memory,
            links=tuple(links) or (nic(device),),
        )
        digest = "aa" if intact or name == "alpha" else "ab"
        return EndRecord(
            digest, (DeviceTraffic(by, "rdma", sent, received),), EndUsage(10.0, cpu, 1, 2), host
        )

    measured = Measurement(
        backend="UCX",
        connect_seconds=0.01,
        first_seconds=0.02,
        seconds=(seconds,) * SPEC.iters,
        post_seconds=(seconds / 4,) * SPEC.iters,
        protocols=(f"rc_mlx5/{by}",),
        initiator=end("alpha", SPEC.timed_bytes, 0),
        target=end("beta", 0, SPEC.timed_bytes),
        began=window[0],
        ended=window[1],
    )
    return build_report(SPEC, measured, promise or Promise(device))


def record(
    runs: Sequence[TransferReport], machine: Machine | None = None, **changes: object
) -> TransferRecord:
    """A record of one arm."""
    transfer_record = TransferRecord(
        recorded_at="2026-01-01T00:00:00+00:00",
        spec=SPEC,
        report=single_report("plain", list(runs), "here"),
        machine=machine,
    )
    return msgspec.structs.replace(transfer_record, **changes)


def paired(rates: Sequence[Sequence[float]], pairs: Sequence[GpuNicPair]) -> TransferRecord:
    """A record of `pairs`, `rates[pair]` per run, the same alone and together."""
    runs = [
        [run(rate, pair.nic.split(":")[0], memory=pair.device, promise=_promised(pair)) for rate in of_pair]
        for pair, of_pair in zip(pairs, rates, strict=True)
    ]
    together = [list(at_once) for at_once in zip(*runs, strict=True)]
    return msgspec.structs.replace(
        record(runs[0]), report=matrix_report(pairs, runs, together, emulated=False)
    )


def _promised(pair: GpuNicPair) -> Promise:
    return Promise(pair.nic, path_class=pair.path_class, nearest_class=pair.nearest_class)


PAIRS = [GpuNicPair("cuda:0", "mlx5_0:1", "PIX", "PIX"), GpuNicPair("cuda:1", "mlx5_5:1", "SYS", "PIX")]
MATRIX = paired([(39.0, 39.2, 39.1), (27.0, 27.5, 27.2)], PAIRS)
EVIL = "<script>alert('&')</script>"


def full() -> TransferRecord:
    """A record with every part: pairs, a machine, and the output of another tool."""
    evidence = ToolOutput("nccl-tests", EVIL, True, (ToolFigure("average bus bandwidth", 98.9),))
    return msgspec.structs.replace(
        MATRIX, machine=load_machine("azure-nd96isr-h100-v5"), evidence=(evidence,), incomplete=None
    )
