"""The comparison with upstream's allocator and CEL runs and agrees with them. Its reader judges the speed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.build import CACHE

UPSTREAM = Path(__file__).parents[2] / "benchmarks" / "upstream.py"


def rows_of(*words: str, **environment: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(UPSTREAM), *words],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_it_says_that_there_is_no_go_and_compares_nothing(tmp_path: Path) -> None:
    (row,) = rows_of("--quick", **{"PATH": str(tmp_path), CACHE: str(tmp_path)})
    assert row["measure"] == "skipped"
    assert "there is no Go" in row["reason"]


@pytest.mark.slow
def test_the_go_program_gives_the_same_places_and_matches() -> None:
    words = (
        "--only",
        "sizes",
        "shapes",
        "--nodes",
        "20",
        "--pods",
        "40",
        "--rounds",
        "2",
        "--seconds",
        "0.001",
    )
    rows = rows_of(*words)
    if rows[0]["measure"] == "skipped":
        pytest.skip(rows[0]["reason"])
    placed = [row for row in rows if row["measure"] == "allocate"]
    assert [row["mode"] for row in placed] == ["first", "sched", "rotating"] * 2
    assert [row["differences"] for row in placed if row["mode"] == "first"] == [0, 0]
    for row in placed:
        assert row["pods"] == 40
        assert 0 < row["cpu_ratio_min"] <= row["cpu_ratio"] <= row["cpu_ratio_max"]
    selectors = [row for row in rows if row["measure"] == "cel"]
    assert len(selectors) == 20
    assert all(row["with_view_ratio"] > 0 and row["compile_ratio"] > 0 for row in selectors)
