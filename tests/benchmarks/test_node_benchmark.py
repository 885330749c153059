"""The benchmark of the node plugins runs and prints the promised figures. Its reader judges the speed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.claim.node.nic.nic_kit import may_make_namespaces

NODE = Path(__file__).parents[2] / "benchmarks" / "node.py"
LATENCY = {"claims", "p50_ms", "p99_ms"}
FIELDS = {
    "publish": {"change", "ms", "api_writes", "devices"},
    "memory": {"before_mib", "resident_mib", "devices"},
    "skipped": {"reason"},
    **dict.fromkeys(("prepare", "attach", "detach", "unprepare"), LATENCY),
}
NICS = ["prepare", "attach", "detach", "unprepare", "memory"] if may_make_namespaces() else ["skipped"]
ROWS = {
    "gpu": ["publish", "publish", "prepare", "unprepare", "memory"],
    "nic": NICS,
    "imex": ["prepare", "unprepare", "memory"],
}


def rows_of(*words):
    done = subprocess.run(
        [sys.executable, str(NODE), "--quick", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("plugin", ROWS)
def test_a_plugins_rows_are_whole(plugin):
    rows = rows_of("--only", plugin)
    assert [row["measure"] for row in rows] == ROWS[plugin]
    for row in rows:
        assert row["plugin"] == plugin
        assert row.keys() >= FIELDS[row["measure"]] | {"plugin", "simulated", "load", "cpus"}
    assert [row["api_writes"] for row in rows if row["measure"] == "publish"] in ([], [1, 2])


@pytest.mark.slow
def test_all_plugins_come_one_after_the_other():
    found = dict.fromkeys(row["plugin"] for row in rows_of())
    assert list(found) == list(ROWS)
