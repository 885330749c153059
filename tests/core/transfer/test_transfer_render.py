"""Tables, page and plot of a record."""

from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import msgspec
from tests.core.transfer.transfer_values import EVIL, MATRIX, full, nic, paired, record, run

from rackloom.core.transfer.kv_cache import kv_terms_of_all_models
from rackloom.core.transfer.pairing import GpuNicPair
from rackloom.core.transfer.records import partial_report
from rackloom.core.transfer.render import (
    matrix_rows,
    matrix_svg,
    rate_matrix,
    record_tables,
    render_page,
)
from rackloom.core.transfer.values import Promise


def test_runs_that_were_complete_are_kept_and_prove_nothing_as_a_whole() -> None:
    kept = partial_report([run(39.0), run(38.0)], "the target ended")
    assert len(kept.runs) == 2
    assert not kept.proved
    assert kept.label == "incomplete: the target ended"


def test_the_matrix_has_a_row_per_gpu_and_says_what_was_not_measured() -> None:
    matrix = rate_matrix(MATRIX.report)
    assert matrix is not None
    assert (matrix.gpus, matrix.nics) == (("cuda:0", "cuda:1"), ("mlx5_0:1", "mlx5_5:1"))
    assert matrix_rows(matrix) == [("cuda:0", "39.10 PIX", "-"), ("cuda:1", "-", "27.23 SYS")]
    assert rate_matrix(record([run(39.0, carried="mlx5_1")]).report) is not None
    assert matrix_rows(rate_matrix(record([run(39.0, carried="mlx5_1")]).report))[0][1].endswith("?")  # type: ignore[arg-type]


def test_the_plot_is_well_formed_and_escapes_names() -> None:
    matrix = rate_matrix(paired([(39.0,)], [GpuNicPair(EVIL, "mlx5_0:1")]).report)
    assert matrix is not None
    drawn = ET.fromstring(matrix_svg(matrix, "GPU & NIC"))  # noqa: S314 (made here)
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert EVIL in texts
    assert "39.00 GB/s" in texts


class Page(HTMLParser):
    """Tags, and the addresses that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href")]


def test_the_page_is_one_file_without_scripts() -> None:
    text = render_page(full(), kv_terms_of_all_models(8192, 39.1, 300.0))
    parsed = Page()
    parsed.feed(text)
    assert parsed.fetched == []
    assert "script" not in parsed.tags
    assert {"svg", "table", "h1"} <= set(parsed.tags)
    for message in ("39.10", "Llama-3.1-70B", "rc_mlx5/mlx5_5:1", "1.5.1", "98.90 GB/s", "95%"):
        assert message in text


def test_emulated_and_incomplete_records_say_so_on_their_page() -> None:
    emulated = Promise("rdma0", 16.0, emulated=True)
    shaped = {
        table.heading: table for table in record_tables(record([run(1.9, "rdma0", promise=emulated)]), ())
    }
    assert shaped["Rates"].rows[0][0] == "plain, emulated"
    report = msgspec.structs.replace(full().report, emulated=True, label="emulated: declared by us")
    text = render_page(msgspec.structs.replace(full(), report=report, incomplete="the target ended"), ())
    assert "class='emulated'" in text
    assert "Incomplete: the target ended" in text
    assert "GB/s (emulated)" in text
    assert "Rates (emulated)" in text


def test_the_tables_tell_percentiles_with_their_spread_and_every_link() -> None:
    links = [nic("mlx5_0", pcie="32.0 GT/s x16", pcie_best="32.0 GT/s x16", numa_node=1)]
    found = {table.heading: table for table in record_tables(record([run(39.0, links=links), run(38.0)]), ())}
    rate = found["Rates"].rows[0]
    assert rate[:3] == ("plain", "2", "38.50")
    assert rate[5] == "0.05 (0.05-0.06)"
    assert rate[8] == "78% of 400 Gb/s"
    assert found["Links of the initiator"].rows == [
        ("mlx5_0:1", "ACTIVE", "400", "-", "1", "-", "32.0 GT/s x16", "32.0 GT/s x16")
    ]
    assert record_tables(record([run(39.0)]), ())
