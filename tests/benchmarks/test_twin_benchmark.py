"""The benchmark of the twin runs and says what it promises; how fast is for its reader to judge."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TWIN = Path(__file__).parents[2] / "benchmarks" / "twin.py"
FIELDS = {
    "start": {"racks", "gpus", "slices", "answers_s", "nodes_s", "resident_mib", "busy_at_rest"},
    "REST": {"calls", "p50_ms", "p99_ms", "goal_p99_ms", "met"},
    "map": {"changes", "never_shown", "p50_ms", "max_ms", "goal_max_ms", "met"},
    "loop": {"late_p50_ms", "late_p99_ms", "late_max_ms"},
}


@pytest.mark.slow
@pytest.mark.skipif("CI" in os.environ, reason="`make bench-quick`, a stage of its own in CI, runs it")
def test_it_prints_whole_rows(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(TWIN), "--quick", "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["measure"] for row in rows] == list(FIELDS)
    for row in rows:
        assert row.keys() >= FIELDS[row["measure"]] | {"load", "cpus"}
    start, rest, map_, _ = rows
    assert (start["racks"], start["gpus"]) == (2, 144)
    assert rest["calls"] > 0
    assert map_["changes"] > map_["never_shown"] == 0
