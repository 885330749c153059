"""Records in files: whole or not at all."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.core.transfer.transfer_values import full, record, run

from rackloom.errors import Refused
from rackloom.prove.transfer.record_files import load_record, save_record

FULL = full()


def test_a_record_survives_being_written_and_read(tmp_path: Path) -> None:
    save_record(FULL, tmp_path / "one.json")
    assert load_record(tmp_path / "one.json") == FULL
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
        save_record(FULL, small_disk / "one.json")
    assert "RESULT lines" in str(refused.value.nearest_fix)
    assert load_record(small_disk / "one.json") == older
    assert [file.name for file in small_disk.iterdir()] == ["one.json"]


def test_a_place_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="could not be written"):
        save_record(FULL, tmp_path / "none" / "one.json")
