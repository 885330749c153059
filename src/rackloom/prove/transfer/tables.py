"""What a record says, as tables of text that the terminal and the page share. Pure."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from rackloom.prove.transfer.comparison import title
from rackloom.prove.transfer.kv import KvTerms
from rackloom.prove.transfer.plot import columns_of, grid, rows
from rackloom.prove.transfer.records import Record
from rackloom.prove.transfer.values import Arm, Host, TransferReport


class Table(msgspec.Struct, frozen=True):
    """A heading, column names, rows of text, and one sentence on how to read them."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def tables(record: Record, terms: Sequence[KvTerms]) -> Iterator[Table]:
    """Everything that a record has, most asked for first."""
    emulated = " (emulated)" if record.report.emulated else ""
    yield Table(f"Rates{emulated}", _RATES, [_rate(arm) for arm in record.report.arms], _INTERVAL)
    yield Table("Proof", _PROOF, [_proof(arm) for arm in record.report.arms])
    if matrix := grid(record.report):
        yield Table(f"GPU x NIC, each pair alone{emulated}", columns_of(matrix), rows(matrix), _MATRIX)
    if terms:
        yield Table(f"Hand-over of a KV cache{emulated}", _KV, [_kv(one) for one in terms], _KV_NOTE)
    runs = record.report.runs
    if runs:
        yield Table("Environment", ("", "initiator", "target"), _environment(runs[0]), _ENVIRONMENT)
        yield Table("Links of the initiator", _LINKS, _links(runs[0].environment.initiator))
        yield Table("Links of the target", _LINKS, _links(runs[0].environment.target))
    for evidence in record.evidence:
        said = {True: "passed", False: "FAILED", None: "not checked"}[evidence.correct]
        figures = [(one.name, f"{one.value:.2f} {one.unit}") for one in evidence.figures]
        yield Table(f"{evidence.tool}, {evidence.file}: {said}", ("figure", "value"), figures)


_RATES = ("ARM", "RUNS", "GB/s", "95%", "SPREAD", "P50 ms", "P95 ms", "P99 ms", "OF LINE RATE")
_INTERVAL = (
    "95% is Student's interval of the mean over the runs. Percentiles are the mean of the runs' own, with "
    "the lowest and highest run in brackets."
)
_PROOF = ("ARM", "DATA", "PATH", "EVIDENCE", "CONTENTION")
_MATRIX = "A question mark: the data or the path of that pair was not proved."
_KV = ("MODEL", "TOKENS", "MiB", "ms", "PREFILL ms", "SHARE OF TTFT")
_KV_NOTE = "bf16 cache at the rate of the fastest arm; TTFT is prefill and hand-over."
_ENVIRONMENT = "Of the first run; the record has it for every run."
_LINKS = ("LINK", "STATE", "Gb/s", "MTU", "NUMA", "PCI", "PCIE", "PCIE AT BEST")


def _rate(arm: Arm) -> tuple[str, ...]:
    interval = "one run" if arm.interval is None else f"{arm.interval.low:.2f} to {arm.interval.high:.2f}"
    return (
        title(arm),
        str(len(arm.runs)),
        f"{arm.mean_GBps:.2f}",
        interval,
        f"{arm.spread:.1%}",
        *(_percentile([getattr(run, field) for run in arm.runs]) for field in _PERCENTILES),
        _share(arm),
    )


def _share(arm: Arm) -> str:
    expectation = arm.runs[0].expectation
    if expectation.share is None:
        return "-"
    whole = "the GPU's copies" if expectation.gigabits is None else f"{expectation.gigabits:g} Gb/s"
    return f"{expectation.share:.0%} of {whole}"


_PERCENTILES = ("p50_seconds", "p95_seconds", "p99_seconds")


def _percentile(seconds: Sequence[float]) -> str:
    mean, low, high = (1e3 * value for value in (sum(seconds) / len(seconds), min(seconds), max(seconds)))
    return f"{mean:.2f} ({low:.2f}-{high:.2f})"


def _proof(arm: Arm) -> tuple[str, ...]:
    paths = ", ".join(sorted({run.path.verdict for run in arm.runs}))
    verified = "verified" if all(run.verified for run in arm.runs) else "NOT INTACT"
    contention = next((run.environment.contention for run in arm.runs if run.environment.contention), "none")
    said = f"{arm.runs[0].path.evidence}. {arm.runs[0].expectation.sentence}"
    return title(arm), verified, paths, said, contention


def _kv(one: KvTerms) -> tuple[str, ...]:
    return (
        one.model,
        str(one.tokens),
        f"{one.cache_bytes / (1 << 20):.0f}",
        f"{one.milliseconds:.2f}",
        "-" if one.prefill_ms is None else f"{one.prefill_ms:g}",
        "-" if one.ttft_share is None else f"{one.ttft_share:.1%}",
    )


def _environment(run: TransferReport) -> list[tuple[str, str, str]]:
    ends = (run.environment.initiator, run.environment.target)
    return [(name, say(ends[0]), say(ends[1])) for name, say in _FACTS.items()]


_FACTS: dict[str, Callable[[Host], str]] = {
    "host": lambda host: host.hostname,
    "kernel": lambda host: host.kernel,
    "processors": lambda host: f"{host.usable_processors} of {host.processors}",
    "pinned to processors": lambda host: ", ".join(map(str, host.cores)) or "none in particular",
    "load before": lambda host: f"{host.load_average:.2f}",
    "python": lambda host: host.python,
    "NIXL": lambda host: host.nixl,
    "UCX": lambda host: host.ucx_version or "not known",
    "UCX transports": lambda host: ", ".join(host.ucx.transports) or "its own choice",
    "UCX devices": lambda host: ", ".join(host.ucx.net_devices) or "its own choice",
    "memory": lambda host: host.device,
    "GPU driver": lambda host: host.gpu_driver or "none",
    "/dev/infiniband": lambda host: ", ".join(host.visible.rdma_files) or "empty",
    "netdevs": lambda host: ", ".join(host.visible.netdevs),
}


def _links(host: Host) -> list[tuple[str, ...]]:
    return [
        tuple(
            "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
            for value in (
                link.name,
                link.state,
                link.gigabits,
                link.mtu,
                link.numa_node,
                link.pci_address,
                link.pcie,
                link.pcie_best,
            )
        )
        for link in host.links
    ]
