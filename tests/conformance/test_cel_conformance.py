"""Every file of CEL conformance data, through the public call."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
DATA = HERE / "data" / "cel"


def load_runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_cel", HERE / "run_cel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run_cel = load_runner()


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_file_agrees_with_upstream(path: Path) -> None:
    results = list(run_cel.checks(json.loads(path.read_text())))
    failed = {name: differences for name, differences in results if differences}
    assert failed == {}
    assert results


def test_runner_counts_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"expression": "true", "compileError": None, "matchError": None, "match": False}
    right = {"expression": "1 + 1", "compileError": "not a bool", "matchError": None, "match": None}
    path = tmp_path / "probes.json"
    path.write_text(json.dumps({"schema": 1, "device": {"driver": "d"}, "probes": [wrong, right]}))
    assert run_cel.main([str(path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 1 failed"


def test_costs_of_the_table_count() -> None:
    table = json.loads((DATA / "upstream-table.json").read_text())
    case = next(entry for entry in table["cases"] if entry["name"] == "many")
    run = json.loads(json.dumps(case["runs"][0]))
    run["upstream"]["maxCost"] += 1
    assert run_cel.check_run(case, case["runs"][0]) == []
    assert run_cel.check_run(case, run) == ["maxCost: wanted 13, found 12"]
