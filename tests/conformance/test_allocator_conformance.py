"""The exported table of the upstream allocator, case by case, and the runner that reads it."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DATA = Path(__file__).parent / "data" / "dra-allocator"
CASES = sorted(DATA.glob("*.json"))


def _runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conformance_run", Path(__file__).parent / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run: Any = _runner()


def test_all_cases_are_here() -> None:
    assert len(CASES) == 223


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    assert run.difference(json.loads(path.read_text())) is None


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case_in_a_fleet(path: Path) -> None:
    assert run.difference(json.loads(path.read_text()), run.outcome_of_fleet) is None


def test_the_runner_counts_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = json.loads((DATA / "simple.json").read_text())
    (tmp_path / "right.json").write_text(json.dumps(case))
    case["expect"]["results"][0]["devices"]["results"][0]["device"] = "another"
    (tmp_path / "wrong.json").write_text(json.dumps(case))
    assert run.main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 1 failed"


def test_other_right_results_are_accepted() -> None:
    case = json.loads((DATA / "simple.json").read_text())
    right = case["expect"]["results"]
    case["expect"] = {**case["expect"], "outcome": "unsatisfiable", "results": []}
    assert run.difference(case) is not None
    for others in ([{"outcome": "allocated", "results": right}], [{"results": right}], [right]):
        assert run.difference({**case, "alsoAcceptable": others}) is None
    assert run.difference({**case, "alsoAcceptable": ["error"]}) is not None
