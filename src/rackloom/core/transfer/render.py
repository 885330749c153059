"""A transfer record for people: tables, the GPU x NIC matrix as SVG, an HTML page.

`record_tables` lists rates, proof, matrix, KV-cache hand-over, environment and links. The terminal and
the page share them. `render_page` is one self-contained HTML page without scripts, in which everything
that came out of a file is escaped. In the matrix a darker cell is faster, and a dashed edge marks a path
that was not proved.
"""

from collections.abc import Callable, Iterator, Sequence
from html import escape

import msgspec

from rackloom.core.transfer.comparison import arm_title, contention_of_arm
from rackloom.core.transfer.kv_cache import KvTerms
from rackloom.core.transfer.records import TransferRecord
from rackloom.core.transfer.statistics import mean
from rackloom.core.transfer.values import AlignmentReport, Arm, HostFacts, TransferReport

# The GPU x NIC matrix.


_LABEL_WIDTH, _CELL_WIDTH, _ROW_HEIGHT, _TOP_MARGIN = 170, 150, 54, 40
_SVG_FONT = "font-family='sans-serif' font-size='12'"


class MatrixCell(msgspec.Struct, frozen=True):
    """One GPU over one NIC, each pair alone."""

    gbps: float
    path_class: str | None
    proved: bool


class RateMatrix(msgspec.Struct, frozen=True):
    """GPUs (or host memory) by NICs. None if the pair was not measured."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    cells: tuple[tuple[MatrixCell | None, ...], ...]


def rate_matrix(report: AlignmentReport) -> RateMatrix | None:
    """The matrix of the arms that had a device promised and were measured alone, or None without them."""
    arms = [arm for arm in report.arms if arm.device is not None and not arm.together]
    if not arms:
        return None
    gpus = tuple(dict.fromkeys(_row_name(arm) for arm in arms))
    nics = tuple(dict.fromkeys(str(arm.device) for arm in arms))
    found = {(_row_name(arm), arm.device): _matrix_cell(arm) for arm in arms}
    cells = tuple(tuple(found.get((gpu, nic)) for nic in nics) for gpu in gpus)
    return RateMatrix(gpus, nics, cells)


def matrix_rows(matrix: RateMatrix) -> list[tuple[str, ...]]:
    """A row of text per GPU: its name, then GB/s and class for each NIC."""
    return [
        (gpu, *(_cell_text(cell) for cell in line))
        for gpu, line in zip(matrix.gpus, matrix.cells, strict=True)
    ]


def matrix_svg(matrix: RateMatrix, title: str) -> str:
    """The matrix as one SVG document. Darker cells are faster. A dashed edge marks a path without proof."""
    width = _LABEL_WIDTH + _CELL_WIDTH * len(matrix.nics) + 10
    height = _TOP_MARGIN + 20 + _ROW_HEIGHT * len(matrix.gpus) + 10
    most = max((cell.gbps for line in matrix.cells for cell in line if cell), default=0.0) or 1.0
    heads = [
        _svg_text(_LABEL_WIDTH + _CELL_WIDTH * k + _CELL_WIDTH // 2, _TOP_MARGIN + 10, nic, "middle")
        for k, nic in enumerate(matrix.nics)
    ]
    body = [part for k in range(len(matrix.gpus)) for part in _svg_row(matrix, k, most)]
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
        f"height='{height}' role='img'><title>{escape(title)}</title>"
        f"{_svg_text(4, 18, title, 'start')}{''.join([*heads, *body])}</svg>"
    )


def _row_name(arm: Arm) -> str:
    return arm.gpu if arm.gpu != "cpu" else "host memory"


def _matrix_cell(arm: Arm) -> MatrixCell:
    proved = all(run.verified and run.path.verdict == "holds" for run in arm.runs)
    return MatrixCell(arm.mean_GBps, arm.runs[0].path_class, proved)


def _cell_text(cell: MatrixCell | None) -> str:
    if cell is None:
        return "-"
    return " ".join(filter(None, (f"{cell.gbps:.2f}", cell.path_class, "" if cell.proved else "?")))


def _svg_row(matrix: RateMatrix, row: int, most: float) -> list[str]:
    top = _TOP_MARGIN + 20 + _ROW_HEIGHT * row
    parts = [_svg_text(4, top + 30, matrix.gpus[row], "start")]
    for column, cell in enumerate(matrix.cells[row]):
        left = _LABEL_WIDTH + _CELL_WIDTH * column
        shade = 0.0 if cell is None else cell.gbps / most
        edge = "" if cell is None or cell.proved else " stroke-dasharray='4'"
        parts.append(
            f"<rect x='{left}' y='{top}' width='{_CELL_WIDTH - 4}'"
            f" height='{_ROW_HEIGHT - 4}' rx='4' stroke='#345'{edge} "
            f"fill='#2a78d6' fill-opacity='{0.08 + 0.5 * shade:.2f}'/>"
        )
        parts.append(_svg_text(left + _CELL_WIDTH // 2 - 2, top + 30, _svg_cell_text(cell), "middle"))
    return parts


def _svg_cell_text(cell: MatrixCell | None) -> str:
    if cell is None:
        return "not measured"
    return f"{_cell_text(cell)} GB/s" if cell.path_class is None else _cell_text(cell)


def _svg_text(x: int, y: int, text: str, anchor: str) -> str:
    return f"<text x='{x}' y='{y}' {_SVG_FONT} text-anchor='{anchor}'>{escape(text)}</text>"


# Tables.


class RecordTable(msgspec.Struct, frozen=True):
    """A heading, column names, rows of text, and one sentence on how to read them."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def record_tables(record: TransferRecord, terms: Sequence[KvTerms]) -> Iterator[RecordTable]:
    """Everything in a record, the rates first."""
    emulated = " (emulated)" if record.report.emulated else ""
    yield RecordTable(
        f"Rates{emulated}", _RATE_COLUMNS, [_rate_row(arm) for arm in record.report.arms], _INTERVAL_NOTE
    )
    yield RecordTable("Proof", _PROOF_COLUMNS, [_proof_row(arm) for arm in record.report.arms])
    if matrix := rate_matrix(record.report):
        columns = ("GB/s", *matrix.nics)
        yield RecordTable(f"GPU x NIC, each pair alone{emulated}", columns, matrix_rows(matrix), _MATRIX_NOTE)
    if terms:
        yield RecordTable(
            f"Hand-over of a KV cache{emulated}", _KV_COLUMNS, [_kv_row(term) for term in terms], _KV_NOTE
        )
    runs = record.report.runs
    if runs:
        yield RecordTable(
            "Environment", ("", "initiator", "target"), _environment_rows(runs[0]), _ENVIRONMENT_NOTE
        )
        yield RecordTable("Links of the initiator", _LINK_COLUMNS, _link_rows(runs[0].environment.initiator))
        yield RecordTable("Links of the target", _LINK_COLUMNS, _link_rows(runs[0].environment.target))
    for evidence in record.evidence:
        outcome = {True: "passed", False: "FAILED", None: "not checked"}[evidence.correct]
        figures = [(figure.name, f"{figure.value:.2f} {figure.unit}") for figure in evidence.figures]
        yield RecordTable(f"{evidence.tool}, {evidence.file}: {outcome}", ("figure", "value"), figures)


_RATE_COLUMNS = ("ARM", "RUNS", "GB/s", "95%", "SPREAD", "P50 ms", "P95 ms", "P99 ms", "OF LINE RATE")
_INTERVAL_NOTE = (
    "95% is Student's interval of the mean over the runs. Percentiles are the mean of the runs' own, with "
    "the lowest and highest run in brackets."
)
_PROOF_COLUMNS = ("ARM", "DATA", "PATH", "EVIDENCE", "CONTENTION")
_MATRIX_NOTE = "A question mark: the data or the path of that pair was not proved."
_KV_COLUMNS = ("MODEL", "TOKENS", "MiB", "ms", "PREFILL ms", "SHARE OF TTFT")
_KV_NOTE = "bf16 cache at the rate of the fastest arm; TTFT is prefill and hand-over."
_ENVIRONMENT_NOTE = "Of the first run; the record has it for every run."
_LINK_COLUMNS = ("LINK", "STATE", "Gb/s", "MTU", "NUMA", "PCI", "PCIE", "PCIE AT BEST")


def _rate_row(arm: Arm) -> tuple[str, ...]:
    interval = "one run" if arm.interval is None else f"{arm.interval.low:.2f} to {arm.interval.high:.2f}"
    return (
        arm_title(arm),
        str(len(arm.runs)),
        f"{arm.mean_GBps:.2f}",
        interval,
        f"{arm.spread:.1%}",
        *(_percentile_cell([getattr(run, field) for run in arm.runs]) for field in _PERCENTILES),
        _share_cell(arm),
    )


def _share_cell(arm: Arm) -> str:
    expectation = arm.runs[0].expectation
    if expectation.share is None:
        return "-"
    whole = "the GPU's copies" if expectation.gigabits is None else f"{expectation.gigabits:g} Gb/s"
    return f"{expectation.share:.0%} of {whole}"


_PERCENTILES = ("p50_seconds", "p95_seconds", "p99_seconds")


def _percentile_cell(seconds: Sequence[float]) -> str:
    average, low, high = (1e3 * value for value in (mean(seconds), min(seconds), max(seconds)))
    return f"{average:.2f} ({low:.2f}-{high:.2f})"


def _proof_row(arm: Arm) -> tuple[str, ...]:
    paths = ", ".join(sorted({run.path.verdict for run in arm.runs}))
    verified = "verified" if all(run.verified for run in arm.runs) else "NOT INTACT"
    evidence = f"{arm.runs[0].path.evidence}. {arm.runs[0].expectation.sentence}"
    return arm_title(arm), verified, paths, evidence, contention_of_arm(arm) or "none"


def _kv_row(term: KvTerms) -> tuple[str, ...]:
    return (
        term.model,
        str(term.tokens),
        f"{term.cache_bytes / (1 << 20):.0f}",
        f"{term.milliseconds:.2f}",
        "-" if term.prefill_ms is None else f"{term.prefill_ms:g}",
        "-" if term.ttft_share is None else f"{term.ttft_share:.1%}",
    )


def _environment_rows(run: TransferReport) -> list[tuple[str, str, str]]:
    initiator, target = run.environment.initiator, run.environment.target
    return [(name, render(initiator), render(target)) for name, render in _HOST_FACTS.items()]


_HOST_FACTS: dict[str, Callable[[HostFacts], str]] = {
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


_LINK_FIELDS = ("name", "state", "gigabits", "mtu", "numa_node", "pci_address", "pcie", "pcie_best")


def _link_rows(host: HostFacts) -> list[tuple[str, ...]]:
    return [tuple(_cell_of(getattr(link, field)) for field in _LINK_FIELDS) for link in host.links]


def _cell_of(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


# The HTML page.


_PAGE_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#123}"
    "table{border-collapse:collapse;display:block;overflow-x:auto;margin:.5rem 0}"
    "th,td{border:1px solid #bcd;padding:.25rem .6rem;text-align:left;vertical-align:top}"
    "th{background:#eef4fb}.note{color:#567}.bad{color:#a11;font-weight:bold}.emulated{background:#ffefc2;padding:.5rem}"
)


def render_page(record: TransferRecord, terms: Sequence[KvTerms]) -> str:
    """The page as text. Everything that came out of a file is escaped."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>KV-cache transfer, {escape(record.recorded_at)}</title><style>{_PAGE_STYLE}</style></head>"
        f"<body>{''.join(_page_parts(record, terms))}</body></html>\n"
    )


def _page_parts(record: TransferRecord, terms: Sequence[KvTerms]) -> Iterator[str]:
    report, spec = record.report, record.spec
    emulated = " (emulated)" if report.emulated else ""
    yield f"<h1>KV-cache transfer</h1><p>{escape(record.recorded_at)}. {spec.op}, {spec.batch_size} x "
    yield f"{spec.block_size} bytes, {spec.warmup_iters} + {spec.iters} iterations.</p>"
    yield f"<p class='{'emulated' if report.emulated else 'note'}'>{escape(report.label)}</p>"
    yield f"<p class='{'good' if report.proved else 'bad'}'>{escape(report.verdict)}</p>"
    if record.incomplete is not None:
        yield f"<p class='bad'>Incomplete: {escape(record.incomplete)}</p>"
    if matrix := rate_matrix(report):
        yield f"<figure>{matrix_svg(matrix, f'GPU x NIC, GB/s{emulated}')}</figure>"
    for table in record_tables(record, terms):
        yield _html_table(table)


def _html_table(table: RecordTable) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    note = f"<p class='note'>{escape(table.note)}</p>" if table.note else ""
    return f"<h2>{escape(table.heading)}</h2><table><tr>{head}</tr>{rows}</table>{note}"
