"""The benchmark of a node plugin runs and says what it promises; how fast is for its reader to judge."""

import json
import subprocess
import sys
from pathlib import Path

NODE = Path(__file__).parents[2] / "benchmarks" / "node.py"
FIELDS = {
    "publish": {"change", "ms", "api_writes"},
    "prepare": {"claims", "p50_ms", "p99_ms"},
    "unprepare": {"claims", "p50_ms", "p99_ms"},
    "memory": {"before_mib", "resident_mib"},
}


def test_it_prints_whole_rows():
    done = subprocess.run(
        [sys.executable, str(NODE), "--quick"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["measure"] for row in rows] == ["publish", "publish", "prepare", "unprepare", "memory"]
    for row in rows:
        assert row.keys() >= FIELDS[row["measure"]] | {"measure", "devices", "simulated", "load", "cpus"}
    assert [row["api_writes"] for row in rows[:2]] == [1, 2]
