"""`rackloom transfer report|compare|baseline|gate|evidence`: commands for saved records.

`report` prints a record as tables, JSON, HTML or SVG, with the time to hand over the KV caches of known
models. `compare` tests two records arm by arm. A baseline is a record that is complete, proved and
uncontended. `gate` exits with 1 if an arm is slower than its baseline beyond noise, misplaced or unknown.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from rackloom.cli.common import Output, columns, data_text, emit, read_text, with_common_flags
from rackloom.cli.transfer_options import Words
from rackloom.core.transfer.comparison import (
    TEST_DESCRIPTION,
    ArmComparison,
    BaselineFinding,
    check_baseline,
    compare_records,
    judge_record,
)
from rackloom.core.transfer.kv_cache import KvTerms, kv_terms, kv_terms_of_all_models
from rackloom.core.transfer.records import TransferRecord, read_nccl, read_nvbandwidth
from rackloom.core.transfer.render import matrix_svg, rate_matrix, record_tables, render_page
from rackloom.errors import Misuse, Refused
from rackloom.prove.transfer.record_files import load_record, save_record, write_atomically

ReportOutput = Annotated[
    Literal["table", "json", "yaml", "html", "svg"],
    Parameter(
        name=["--output", "-o"],
        help="The form of the output: html is one self-contained page, svg the matrix of GPUs and NICs.",
    ),
]


@with_common_flags
def report(
    record: Path,
    *,
    model: Words = (),
    tokens: int = 8192,
    prefill_ms: float | None = None,
    output: ReportOutput = "table",
    to: Path | None = None,
) -> None:
    """Show a saved record.

    Parameters
    ----------
    record
        File that `transfer run --save` wrote.
    model
        Model whose KV cache is handed over. May be repeated. Default: all known models.
    tokens
        Length of the prompt.
    prefill_ms
        Time to prefill it, for the share of the hand-over in the time to the first token.
    to
        File to write to instead of standard output.
    """
    kept = load_record(record)
    terms = _kv_terms(kept, model, tokens, prefill_ms)
    if output in ("json", "yaml"):
        text = data_text({"record": kept, "kv": terms}, output)
    elif output == "html":
        text = render_page(kept, terms)
    else:
        text = _matrix_svg(kept) if output == "svg" else "\n".join(_record_lines(kept, terms))
    if to is None:
        print(text.rstrip("\n"))
    else:
        write_atomically(text.encode(), to)


@with_common_flags
def compare(before: Path, after: Path, *, output: Output = "table") -> None:
    """Compare two records arm by arm.

    Parameters
    ----------
    before
        Record A.
    after
        Record B.
    """
    compared = compare_records(load_record(before), load_record(after))
    headers = ("ARM", "A GB/s", "B GB/s", "p (ranks)", "B AGAINST A")

    def text() -> str:
        return f"{columns(headers, map(_compared_row, compared))}\n\n{TEST_DESCRIPTION}"

    emit({"test": TEST_DESCRIPTION, "arms": compared}, output, text)


@with_common_flags
def baseline(record: Path, to: Path) -> None:
    """Keep a record as a baseline, with the topology it was measured on.

    Parameters
    ----------
    record
        Record that is complete, proved, uncontended, and of at least three runs.
    to
        File for the baseline.
    """
    save_record(check_baseline(load_record(record)), to)


@with_common_flags
def gate(record: Path, *, baseline: Path, output: Output = "table") -> int:
    """Exit 0 if every arm holds its baseline, 1 if one is slower beyond noise, misplaced or unknown.

    Parameters
    ----------
    record
        Record to judge.
    baseline
        Record to judge it by, measured on the same kind of machine.
    """
    findings = judge_record(load_record(record), check_baseline(load_record(baseline)))
    headers = ("ARM", "OUTCOME", "NODE", "DEVICE", "REASON")
    emit(findings, output, lambda: columns(headers, map(_finding_row, findings)))
    return 0 if all(finding.outcome == "holds" for finding in findings) else 1


@with_common_flags
def evidence(record: Path, *, nvbandwidth: Path | None = None, nccl: Path | None = None) -> None:
    """Add the results of other tools on the same machine to a record.

    Parameters
    ----------
    record
        File that `transfer run --save` wrote. It is replaced.
    nvbandwidth
        Output of `nvbandwidth -j`.
    nccl
        Output of a program of nccl-tests.
    """
    if nvbandwidth is None and nccl is None:
        raise Misuse("nothing to add", nearest_fix="give --nvbandwidth or --nccl with a file")
    kept = load_record(record)
    readers = ((nvbandwidth, read_nvbandwidth), (nccl, read_nccl))
    added = tuple(
        read(read_text(file, "name a text file that can be read"), file.name)
        for file, read in readers
        if file is not None
    )
    save_record(msgspec.structs.replace(kept, evidence=(*kept.evidence, *added)), record)
    for evidence in added:
        print(f"{evidence.tool}: {len(evidence.figures)} figures")


def _kv_terms(
    record: TransferRecord, models: Words, tokens: int, prefill_ms: float | None
) -> tuple[KvTerms, ...]:
    rate = max(arm.mean_GBps for arm in record.report.arms)
    if not models:
        return kv_terms_of_all_models(tokens, rate, prefill_ms)
    return tuple(kv_terms(model, tokens, rate, prefill_ms) for model in models)


def _record_lines(record: TransferRecord, terms: tuple[KvTerms, ...]) -> Iterator[str]:
    yield from (record.report.label, record.report.verdict, "")
    if record.incomplete is not None:
        yield f"INCOMPLETE: {record.incomplete}\n"
    for table in record_tables(record, terms):
        yield f"{table.heading}\n{columns(table.columns, table.rows)}"
        yield f"{table.note}\n" if table.note else ""


def _matrix_svg(record: TransferRecord) -> str:
    matrix = rate_matrix(record.report)
    if matrix is None:
        raise Refused("no run of this record had a device promised", nearest_fix="measure with --pair")
    return matrix_svg(matrix, "GPU x NIC, GB/s (emulated)" if record.report.emulated else "GPU x NIC, GB/s")


def _compared_row(arm_comparison: ArmComparison) -> tuple[str, ...]:
    p = "-" if arm_comparison.ratio.p_rank is None else f"{arm_comparison.ratio.p_rank:.3f}"
    return (
        arm_comparison.name,
        f"{arm_comparison.before_GBps:.2f}",
        f"{arm_comparison.after_GBps:.2f}",
        p,
        arm_comparison.sentence,
    )


def _finding_row(baseline_finding: BaselineFinding) -> tuple[str, ...]:
    return (
        baseline_finding.arm,
        baseline_finding.outcome.upper(),
        baseline_finding.node,
        baseline_finding.device,
        baseline_finding.reason,
    )
