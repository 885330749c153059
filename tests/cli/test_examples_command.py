"""`rackloom examples`: a reader without a checkout gets the files that the pages work with."""

from pathlib import Path

import pytest

from rackloom.cli.main import app
from rackloom.errors import Refused

ROOT = Path(__file__).parents[2]


def run(*words: str) -> None:
    app(["examples", *words], result_action="return_value")


def files_of(directory: Path) -> dict[Path, tuple[bytes, int]]:
    return {
        path.relative_to(directory): (path.read_bytes(), path.stat().st_mode & 0o111)
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_all_examples_are_written_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run()
    assert files_of(tmp_path / "examples") == files_of(ROOT / "examples")
    assert "examples/two-trays  A tenant's first partition" in capsys.readouterr().out.splitlines()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    own = tmp_path / "mine"
    own.mkdir()
    (own / "job.yaml").write_text("mine")
    with pytest.raises(Refused, match="exists, and nothing is overwritten"):
        run(str(own))
    assert [path.name for path in own.iterdir()] == ["job.yaml"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match=r"cannot be written to .*file/examples: Not a directory"):
        run(str(tmp_path / "file" / "examples"))
