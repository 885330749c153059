"""No benchmark is forgotten in CI, and its comparisons are those in the documentation."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from benchmarks import goals

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quick_benchmarks", BENCHMARKS / "quick.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A benchmark finds its neighbours in its own folder.
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


QUICK = loaded()


def test_every_program_of_the_folder_is_run_or_said_to_run_elsewhere() -> None:
    programs = {file.stem for file in BENCHMARKS.glob("*.py") if "__main__" in file.read_text()}
    assert not set(QUICK.BENCHMARKS) & set(QUICK.ELSEWHERE)
    assert {*QUICK.BENCHMARKS, *QUICK.ELSEWHERE} == programs


@pytest.mark.parametrize("name", QUICK.BENCHMARKS)
def test_every_benchmark_has_a_quick_form(name: str) -> None:
    assert '"--quick"' in (BENCHMARKS / f"{name}.py").read_text()


def test_ci_runs_them_and_what_it_runs_elsewhere() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "make bench-quick" in script
    assert "tests/node/run.py --benchmark" in script
    assert (ROOT / "tests/benchmarks/test_node_benchmark.py").exists()


def test_just_the_ratios_that_are_computed_are_documented() -> None:
    documented = QUICK.read().ratios
    assert documented.keys() == QUICK.RATIOS.keys()
    assert all(ratio.figure > 0 for ratio in documented.values())
    assert {benchmark for benchmark, _ in QUICK.RATIOS.values()} <= set(QUICK.BENCHMARKS)


def test_each_goal_is_of_a_benchmark_and_a_program_that_there_are() -> None:
    goals = QUICK.read().goal
    assert {goal.benchmark for goal in goals} <= {*QUICK.BENCHMARKS, *QUICK.ELSEWHERE}
    assert all((ROOT / goal.command.split()[0]).is_file() for goal in goals)
    assert len({goal.name for goal in goals}) == len(goals)


def test_the_site_promises_the_fields_of_its_goals() -> None:
    """Rows of PostgreSQL have different fields, so nothing promises them."""
    for goal in QUICK.read().goal:
        if goal.benchmark == "site" and goal.rows["measure"] != "writes on PostgreSQL":
            assert goal.field in QUICK.PROMISED["site"][goal.rows["measure"]][1].split(), goal.name


GOAL = goals.Goal(
    name="a wait",
    benchmark="site",
    rows={"domains": 1000},
    field="p99_ms",
    at="most",
    limit=10,
    command="x.py",
)


@pytest.mark.parametrize(
    ("row", "at", "limit", "met"),
    [
        ({"domains": 1000, "p99_ms": 10}, "most", 10, True),
        ({"domains": 1000, "p99_ms": 11}, "most", 10, False),
        ({"domains": 1000, "p99_ms": 11}, "least", 10, True),
        ({"domains": 1000, "p99_ms": 9}, "least", 10, False),
        ({"domains": 1000, "p99_ms": 9, "goal": 8}, "most", "goal", False),
        ({"domains": 1000, "p99_ms": 9}, "most", "goal", None),
        ({"domains": 100, "p99_ms": 9}, "most", 10, None),
        ({"domains": 1000}, "most", 10, None),
    ],
)
def test_a_row_is_judged_by_the_goal_that_is_about_it(
    row: dict[str, float], at: str, limit: float | str, met: bool | None
) -> None:
    assert msgspec.structs.replace(GOAL, at=at, limit=limit).met(row) is met


def test_a_row_gets_its_goals_and_its_verdict() -> None:
    row = {"measure": "two tenants", "write_p99_factor": 1.8, "read_p99_factor": 2.5}
    found = goals.judged("site", row)
    assert found == {**row, "goal_write_p99_factor": 2, "goal_read_p99_factor": 2, "met": False}
    assert goals.judged("site", {"measure": "sizing"}) == {"measure": "sizing"}


def test_the_table_has_every_ratio_and_goal_with_its_verdict() -> None:
    kept = msgspec.structs.replace(GOAL, name="another", missed="12 at load 3")
    unseen = msgspec.structs.replace(GOAL, name="a third", benchmark="twin")
    rows = [{"domains": 1000, "p99_ms": 9}, {"domains": 1000, "p99_ms": 11}, {"domains": 1, "p99_ms": 99}]
    seen = {"site": (rows, {"a": 0.5, "b": 2.0})}
    ratios = {name: goals.Ratio(figure=1.0, of="x through y") for name in "abc"}
    table = QUICK.table(ratios, [kept, unseen], seen).splitlines()
    assert "| `a`: x through y | 0.5 | 1 | **too low** |" in table
    assert "| `b`: x through y | 2 | 1 | enough |" in table
    assert "| `c`: x through y | - | 1 | not measured |" in table
    assert "| another: at most 10 | 11 of 10 | **missed** | `x.py` | **12 at load 3** |" in table
    assert "| a third: at most 10 | - | not run | `x.py` |  |" in table
    seen = {"site": ([], {}), "twin": ([], {})}
    table = QUICK.table({}, [unseen], seen).splitlines()
    assert table[-1] == "| a third: at most 10 | - | only in the full form | `x.py` |  |"


def test_rows_are_whole() -> None:
    wanted = QUICK.PROMISED["twin"]
    whole = [
        {"measure": measure, **dict.fromkeys([*fields.split(), "load", "cpus"], 1)}
        for measure, (count, fields) in wanted.items()
        for _ in range(count)
    ]
    whole = [row | {"never_shown": 0} if "never_shown" in row else row for row in whole]
    assert QUICK.broken_promises("twin", whole) == []
    assert QUICK.broken_promises("twin", whole[1:]) == ["start: 0 rows, not 1"]
    without = [{name: value for name, value in row.items() if name != "p99_ms"} for row in whole]
    assert QUICK.broken_promises("twin", without) == ["REST: no p99_ms"]
    negative = [{**row, "calls": -1} if "calls" in row else row for row in whole]
    assert QUICK.broken_promises("twin", negative) == ["REST: calls is -1"]
    unseen = [{**row, "never_shown": 2} if "changes" in row else row for row in whole]
    assert QUICK.broken_promises("twin", unseen) == ["map: 2 changes were never shown"]


def program(folder: Path, *lines: str) -> None:
    (folder / "claims.py").write_text("\n".join(("import sys", *lines)))


def with_growth(folder: Path, growth: float) -> None:
    """A benchmark in which claims cost `growth` times as much on the smaller fleet."""
    rows = [{"nodes": 40, "claims": 10, "cpu_s": growth}, {"nodes": 160, "claims": 10, "cpu_s": 1.0}]
    program(folder, *(f"print({json.dumps(row)!r})" for row in rows))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("sys.exit(2)",), "ended with 2"),
        (("raise ImportError('gone')",), "gone"),
        (("",), "printed nothing"),
    ],
)
def test_a_benchmark_that_does_not_run_fails(
    lines: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, *lines)
    monkeypatch.setattr(QUICK, "HERE", tmp_path)
    with pytest.raises(QUICK.Failed, match=message):
        QUICK.checked("claims", {"claims-growth": 1.0}, {})


def test_a_ratio_below_nine_tenths_fails_when_it_is_so_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(QUICK, "HERE", tmp_path)
    with_growth(tmp_path, 0.91)
    QUICK.checked("claims", {"claims-growth": 1.0}, {})
    assert "once more" not in capsys.readouterr().out
    with_growth(tmp_path, 0.89)
    with pytest.raises(QUICK.Failed, match=r"below 90% of goals.toml: claims-growth"):
        QUICK.checked("claims", {"claims-growth": 1.0}, {})
    assert "once more, for claims-growth" in capsys.readouterr().out


def test_a_peer_that_is_missing_is_said_and_compared_with_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(QUICK, "HERE", tmp_path)
    program(tmp_path, 'print(\'{"measure": "skipped", "reason": "there is no Go"}\')')
    QUICK.checked("claims", {"claims-growth": 1.0}, {})
    assert "SKIPPED: there is no Go" in capsys.readouterr().out
