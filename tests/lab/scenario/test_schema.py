"""The published JSON schema of scenario files is that of the steps, and agrees with their reader."""

import json
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from rackloom.lab.scenario.files import scenario_files
from rackloom.lab.scenario.model import ACTIONS, EXPECTATIONS
from rackloom.lab.scenario.schema import scenario_schema

PUBLISHED = Path(__file__).parents[3] / "docs" / "scenario.schema.json"
STEP = {"do": "gpu-xid", "gpu": "rack-01/slot-0/gpu-0", "xid": 79}
FILE = {"title": "A GPU is lost", "seen": "a test", "step": [STEP]}


@pytest.fixture(scope="module")
def schema():
    return Draft202012Validator(scenario_schema())


def test_the_published_file_is_what_the_command_prints(schema):
    assert json.loads(PUBLISHED.read_text()) == schema.schema, (
        "rackloom twin schema > docs/scenario.schema.json"
    )
    Draft202012Validator.check_schema(schema.schema)
    kinds = schema.schema["properties"]["step"]["items"]["oneOf"]
    assert {kind["title"] for kind in kinds} == {*ACTIONS, *EXPECTATIONS}


@pytest.mark.parametrize("file", scenario_files(), ids=lambda file: file.stem)
def test_every_shipped_scenario_is_valid(schema, file):
    schema.validate(tomllib.loads(file.read_text()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": []},
        {"colour": 1},
        {"racks": "two"},
        {"faults": "some"},
        {"step": [{**STEP, "do": "gpu-lots"}]},
        {"step": [{**STEP, "gpu": 1}]},
        {"step": [{**STEP, "colour": 1}]},
        {"step": [{"do": "gpu-xid", "xid": 79}]},
        {"step": [{**STEP, "expect": "gpus"}]},
        {"step": [{"gpu": "rack-01/slot-0/gpu-0"}]},
    ],
)
def test_what_the_reader_refuses_is_invalid(schema, wrong):
    assert schema.is_valid(FILE)
    assert not schema.is_valid(FILE | wrong)
