"""The benchmark of starts runs and prints the promised figures. Its reader judges the speed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

START = Path(__file__).parents[2] / "benchmarks" / "start.py"


@pytest.mark.slow
def test_it_prints_whole_rows() -> None:
    done = subprocess.run(
        [sys.executable, str(START), "--rounds", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["command"] for row in rows][:1] == ["python -c pass"]
    assert rows[0]["ratio"] == 1.0
    for row in rows:
        assert row["cpu_ms"] > 0
        assert row.keys() >= {"wall_ms", "rounds", "load", "cpus"}
