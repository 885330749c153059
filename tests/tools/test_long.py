"""A long check stops and goes on, and names its failures."""

import os
import sys
from pathlib import Path

import pytest

from tools import long


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A check of three units, each of which writes its name into the file. The second one fails."""
    file = tmp_path / "ran"

    def unit(name: str, end: str) -> long.Unit:
        code = f"open({str(file)!r}, 'a').write({name!r}); {end}"
        return long.Unit(name, [sys.executable, "-c", code])

    units = [
        unit("a", "0"),
        unit("b", "print('FAILED tests/test_b.py::test_b - why'); exit(1)"),
        unit("c", "0"),
    ]
    monkeypatch.setattr(long, "RESULTS", tmp_path)
    monkeypatch.setattr(long, "OUTPUT", tmp_path)
    monkeypatch.setattr(long, "CHECKS", {"hunt": lambda: units})
    return file


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert long.main(["hunt", "--minutes", "0"]) == 3
    assert ran.read_text() == "a"
    assert long.main(["hunt"]) == 1
    assert ran.read_text() == "abc"
    assert "FAILED in b at load" in capsys.readouterr().out


@pytest.mark.slow
def test_the_load_ends_with_the_unit() -> None:
    with long.busy_machine():
        children = set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
        assert len(children) >= 3
    left = set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
    assert len(left) <= len(children) - 3


def test_every_test_in_real_time_is_hunted() -> None:
    names = {unit.name.rpartition("-")[0] for unit in long.hunt()}
    assert {"quick", "browser", "app", "install", "node", "cluster-0"} <= names
