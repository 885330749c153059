"""The benchmark of placement runs for any number of plans. Its reader judges the speed."""

import json
import subprocess
import sys
from pathlib import Path

PLACEMENT = Path(__file__).parents[2] / "benchmarks" / "placement.py"


def test_a_short_run_has_every_row() -> None:
    done = subprocess.run(
        [sys.executable, str(PLACEMENT), "speed", "--nodes", "200", "--plans", "5"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["what"] for row in rows] == [
        "one gang",
        "explained refusal",
        "two device kinds",
        "two device kinds, explained refusal",
    ]
    assert all(row["plans"] > 0 and row["p99_ms"] > 0 for row in rows)
