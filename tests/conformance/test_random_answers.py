"""Compatibility groups and derived attributes: a fleet gives the places and errors that upstream gives.

data/random-answers.json was recorded with k8s.io/dynamic-resource-allocation 0.37.2 (`random_scenarios.py
--record`).
"""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.cluster.build import NotBuilt


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "random_scenarios", Path(__file__).with_name("random_scenarios.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


random: Any = _module()
RECORDED = json.loads(random.RECORDED.read_text())
SCENARIOS = random.scenarios(random.SEED, random.COUNT)


def test_the_scenarios_are_those_that_were_recorded() -> None:
    assert random.digest(SCENARIOS) == RECORDED["digest"]
    answers = [answer for of in RECORDED["answers"] for answer in of]
    kinds = {kind: sum(kind in answer for answer in answers) for kind in ("place", "error")}
    assert kinds["place"] > 400
    assert kinds["error"] > 80


@pytest.mark.parametrize("part", range(8))
def test_the_recorded_answers_are_given(part: int) -> None:
    for number in range(part, random.COUNT, 8):
        assert random.differs(random.ours(SCENARIOS[number]), RECORDED["answers"][number]) is None, number


@pytest.mark.slow
def test_upstream_itself_gives_the_same_answers() -> None:
    asked = random.scenarios(38, 500)
    try:
        answers = random.upstream(asked)
    except NotBuilt as error:
        pytest.skip(str(error))
    for number, (scenario, theirs) in enumerate(zip(asked, answers, strict=True)):
        assert random.differs(random.ours(scenario), theirs) is None, number
