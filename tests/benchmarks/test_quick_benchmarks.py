"""No benchmark is forgotten in CI, and what it compares is what the documentation says."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quick_benchmarks", BENCHMARKS / "quick.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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


def test_the_page_documents_just_the_ratios_that_are_computed() -> None:
    documented = QUICK.documented(QUICK.PAGE.read_text())
    assert documented.keys() == QUICK.RATIOS.keys()
    assert all(figure > 0 for figure in documented.values())
    assert {benchmark for benchmark, _ in QUICK.RATIOS.values()} <= set(QUICK.BENCHMARKS)


def test_only_the_section_of_the_page_is_read() -> None:
    table = "| ratio | said |\n|---|---|\n| `b-c` | 1.25 | x |\n"
    page = f"| `a` | 1 |\n{QUICK.SECTION}\n{table}\n## More\n| `d` | 2 |\n"
    assert QUICK.documented(page) == {"b-c": 1.25}


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
    """A benchmark whose claims cost so many times as much on the smaller fleet."""
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
        QUICK.checked("claims", {"claims-growth": 1.0})


def test_a_ratio_below_nine_tenths_fails_when_it_is_so_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(QUICK, "HERE", tmp_path)
    with_growth(tmp_path, 0.91)
    QUICK.checked("claims", {"claims-growth": 1.0})
    assert "once more" not in capsys.readouterr().out
    with_growth(tmp_path, 0.89)
    with pytest.raises(QUICK.Failed, match=r"below 90% of docs/speed.md: claims-growth"):
        QUICK.checked("claims", {"claims-growth": 1.0})
    assert "once more, for claims-growth" in capsys.readouterr().out


def test_a_peer_that_is_missing_is_said_and_compared_with_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(QUICK, "HERE", tmp_path)
    program(tmp_path, 'print(\'{"measure": "skipped", "reason": "there is no Go"}\')')
    QUICK.checked("claims", {"claims-growth": 1.0})
    assert "SKIPPED: there is no Go" in capsys.readouterr().out
