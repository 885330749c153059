"""The calls of a story that count. A count above its ceiling fails."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks import files_read
from rackloom.core.allocate.quantity import Quantity

HERE = "tests/benchmarks/test_files_read.py"
PARSE = ("core/allocate/quantity.py", "parse")


def first():
    Quantity.parse("1Gi")


def background():
    first()


@pytest.mark.parametrize(
    ("begins", "outside", "files"),
    [
        ("first", frozenset(), {Path("core/allocate/quantity.py")}),
        ("first", frozenset({PARSE}), set()),
        ("background", frozenset(), {Path("core/allocate/quantity.py")}),
        ("never", frozenset(), set()),
    ],
)
def test_calls_below_a_background_function_do_not_count(begins, outside, files):
    called = files_read.FilesCalled(files_read.Story("a", f"{HERE}::test", begins, 1, outside))
    sys.setprofile(called._note)
    try:
        background()
    finally:
        sys.setprofile(None)
    assert called.files == files


def test_background_functions_and_starts_exist():
    for story in files_read.STORIES:
        test = (files_read.ROOT / story.test.partition("::")[0]).read_text()
        assert re.search(rf"\bdef {story.begins}\(", test)
        for file, name in story.background:
            assert re.search(rf"\bdef {name}\(", (files_read.SOURCES / file).read_text()), (file, name)


@pytest.mark.parametrize(
    ("enough", "files", "runs"), [(2, {"a", "b"}, 2), (3, {"a", "b", "c"}, 1), (1, {"a"}, 3), (0, {"a"}, 5)]
)
def test_a_story_runs_again_until_there_are_few_enough_files(monkeypatch, enough, files, runs):
    seen = iter([{"a", "b", "c"}, {"a", "b", "d"}, {"a"}, {"a", "b"}, {"a"}])
    monkeypatch.setattr(files_read, "files_of_run", lambda _story: next(seen))
    assert files_read.files_of(files_read.STORIES[0], enough) == files
    assert len(list(seen)) == files_read.RUNS - runs


@pytest.mark.parametrize(("ceiling", "status"), [(29, 1), (30, 0), (31, 0)])
def test_a_count_above_its_ceiling_fails(monkeypatch, capsys, ceiling, status):
    monkeypatch.setattr(files_read, "ceilings", lambda: {it.title: ceiling for it in files_read.STORIES})
    monkeypatch.setattr(files_read, "files_of", lambda _story, enough: set(map(Path, map(str, range(30)))))
    monkeypatch.setattr(sys, "argv", ["files_read.py", "--quick"])
    with pytest.raises(SystemExit) as ended:
        files_read.main()
    assert ended.value.code == status
    printed = capsys.readouterr().out
    assert "one gang: 30 files (goal 25: MISSED" in printed
    assert ("above the ceiling of 29" in printed) == bool(status)
