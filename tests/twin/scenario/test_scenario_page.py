"""docs/scenarios.md tells of every step and every shipped scenario."""

from pathlib import Path

import msgspec
import pytest

from rackloom.twin.scenario import values
from rackloom.twin.scenario.library import shipped
from rackloom.twin.scenario.read import kinds_of, parse

PAGE = (Path(__file__).parents[3] / "docs" / "scenarios.md").read_text()
KINDS = {**kinds_of(values.Action), **kinds_of(values.Expectation)}


@pytest.mark.parametrize("name", KINDS)
def test_every_step_and_its_keys_are_told(name):
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    own = {field.encode_name for field in msgspec.structs.fields(KINDS[name])} - {"at", "within", "stays"}
    assert {key for key in own if f"`{key}`" not in row} == set()


def test_every_shipped_scenario_is_told():
    assert [one.name for one in shipped() if f"| `{one.name}` (" not in PAGE] == []


def test_the_example_of_the_page_can_be_read():
    example = PAGE.split("```toml\n")[1].split("```")[0]
    assert parse(example, "example", "page").layers == {"carve"}
