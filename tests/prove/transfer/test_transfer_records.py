"""Records in files, their tables, their page and their plot."""

import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from tests.prove.transfer.transfer_values import nic, paired, record, run

from rackloom.errors import Refused
from rackloom.prove.transfer.pairing import GpuNicPair
from rackloom.prove.transfer.records import (
    ToolFigure,
    ToolOutput,
    TransferRecord,
    discover_or_none,
    load_record,
    partial_report,
    save_record,
)
from rackloom.prove.transfer.render import (
    kv_terms_of_all_models,
    matrix_rows,
    matrix_svg,
    rate_matrix,
    record_tables,
    render_page,
)
from rackloom.prove.transfer.values import Promise
from rackloom.topology.machine import Machine
from rackloom.topology.profiles import load_machine

PAIRS = [GpuNicPair("cuda:0", "mlx5_0:1", "PIX", "PIX"), GpuNicPair("cuda:1", "mlx5_5:1", "SYS", "PIX")]
MATRIX = paired([(39.0, 39.2, 39.1), (27.0, 27.5, 27.2)], PAIRS)
EVIL = "<script>alert('&')</script>"


def full() -> TransferRecord:
    evidence = ToolOutput("nccl-tests", EVIL, True, (ToolFigure("average bus bandwidth", 98.9),))
    return msgspec.structs.replace(
        MATRIX, machine=load_machine("azure-nd96isr-h100-v5"), evidence=(evidence,), incomplete=None
    )


def test_a_record_survives_being_written_and_read(tmp_path: Path) -> None:
    save_record(full(), tmp_path / "one.json")
    assert load_record(tmp_path / "one.json") == full()
    assert [file.name for file in tmp_path.iterdir()] == ["one.json"]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"format": "other"}'])
def test_what_is_no_record_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_bytes(content)
    with pytest.raises(Refused, match="no transfer record"):
        load_record(tmp_path / "one.json")
    with pytest.raises(Refused, match="No such file"):
        load_record(tmp_path / "none.json")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=30)


@pytest.mark.root
def test_a_full_disk_is_told_and_leaves_the_older_record(small_disk: Path) -> None:
    older = record([run(39.0)])
    save_record(older, small_disk / "one.json")
    with pytest.raises(Refused, match="No space left on device") as refused:
        save_record(full(), small_disk / "one.json")
    assert "RESULT lines" in str(refused.value.nearest_fix)
    assert load_record(small_disk / "one.json") == older
    assert [file.name for file in small_disk.iterdir()] == ["one.json"]


def test_a_place_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="could not be written"):
        save_record(full(), tmp_path / "none" / "one.json")


def test_runs_that_were_complete_are_kept_and_prove_nothing_as_a_whole() -> None:
    kept = partial_report([run(39.0), run(38.0)], "the target ended")
    assert len(kept.runs) == 2
    assert not kept.proved
    assert kept.label == "incomplete: the target ended"


def test_a_machine_that_does_not_tell_is_none() -> None:
    def refuse() -> Machine:
        raise Refused("no /sys here")

    assert discover_or_none(refuse) is None
    assert discover_or_none(lambda: load_machine("oci-bm.gpu.h100.8")) is not None


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
    """Tags, and whatever would be fetched."""

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
