"""One self-contained HTML page of a record: no scripts, nothing fetched. Pure."""

from collections.abc import Iterator, Sequence
from html import escape

from rackloom.prove.transfer.kv import KvTerms
from rackloom.prove.transfer.plot import grid, svg
from rackloom.prove.transfer.records import Record
from rackloom.prove.transfer.tables import Table, tables

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#123}"
    "table{border-collapse:collapse;display:block;overflow-x:auto;margin:.5rem 0}"
    "th,td{border:1px solid #bcd;padding:.25rem .6rem;text-align:left;vertical-align:top}"
    "th{background:#eef4fb}.note{color:#567}.bad{color:#a11;font-weight:bold}.emulated{background:#ffefc2;padding:.5rem}"
)


def page(record: Record, terms: Sequence[KvTerms]) -> str:
    """The page as text. Everything that came out of a file is escaped."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>KV-cache transfer, {escape(record.recorded_at)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(_parts(record, terms))}</body></html>\n"
    )


def _parts(record: Record, terms: Sequence[KvTerms]) -> Iterator[str]:
    report, spec = record.report, record.spec
    yield f"<h1>KV-cache transfer</h1><p>{escape(record.recorded_at)}. {spec.op}, {spec.batch_size} x "
    yield f"{spec.block_size} bytes, {spec.warmup_iters} + {spec.iters} iterations.</p>"
    yield f"<p class='{'emulated' if report.emulated else 'note'}'>{escape(report.label)}</p>"
    yield f"<p class='{'good' if report.proved else 'bad'}'>{escape(report.verdict)}</p>"
    if record.incomplete is not None:
        yield f"<p class='bad'>Incomplete: {escape(record.incomplete)}</p>"
    if matrix := grid(report):
        yield f"<figure>{svg(matrix, f'GPU x NIC, GB/s{_emulated(record)}')}</figure>"
    for table in tables(record, terms):
        yield _table(table)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    note = f"<p class='note'>{escape(table.note)}</p>" if table.note else ""
    return f"<h2>{escape(table.heading)}</h2><table><tr>{head}</tr>{rows}</table>{note}"


def _emulated(record: Record) -> str:
    return " (emulated)" if record.report.emulated else ""
