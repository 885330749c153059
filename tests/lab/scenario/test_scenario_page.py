"""docs/scenarios.md tells of every step and every shipped scenario."""

import re
from pathlib import Path

import msgspec
import pytest

from rackloom.lab.scenario import model
from rackloom.lab.scenario.reading import parse_scenario, shipped_scenarios, step_types

PAGE = (Path(__file__).parents[3] / "docs" / "scenarios.md").read_text()
INCIDENTS = (
    "NMX-C unreachable (NICo #2614)",
    "NMX-C slow",
    "NMX-C restarts",
    "leader moves to another switch tray",
    "change accepted, but lost",
    "change applied late",
    "change applied twice",
    "list that omits a partition for a while",
    "partition created outside (NICo #304)",
    "full-list PUT race of NMX-M (NICo #395)",
    "GPU resets",
    "GPU health NO_NVLINK",
    "GPU health DEGRADED_BW",
    "switch tray out (9 to 8)",
    "tray swapped: new GPU UIDs, same slot (NICo #4761)",
    "fabric state transitional (driver #1264)",
    "clique label stale for up to 60 s",
    "clique label absent",
    "clusterUUID changes after a restart",
    "API server: conflict",
    "API server: stale watches",
    "API server: dropped watch",
    "API server: 410 Gone",
    "API server: duplicate events",
    "API server: reordered events",
    "IMEX daemon dead",
    "IMEX index churn (driver #1418)",
    "pod IP reused (driver #1447)",
    "node lost in a rack-wide job (driver #348)",
    "controller killed between any two writes",
    "clock jump",
    "two controllers at once",
)
"""What was reported of others, or is known to happen; the page says which scenario plays it."""
KINDS = {**step_types(model.Action), **step_types(model.Expectation)}


@pytest.mark.parametrize("name", KINDS)
def test_every_step_and_its_keys_are_told(name):
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    own = {field.encode_name for field in msgspec.structs.fields(KINDS[name])} - {"at", "within", "stays"}
    assert {key for key in own if f"`{key}`" not in row} == set()


def told_speeds(scenario):
    return ", ".join(speed for speed in ("real", "virtual") if speed in scenario.speeds)


def test_every_shipped_scenario_is_told_with_its_clocks_and_its_words():
    rows = [
        f"| `{scenario.name}` ({told_speeds(scenario)}) | {scenario.title} | {scenario.seen} |"
        for scenario in shipped_scenarios()
    ]
    assert [row for row in rows if row not in PAGE] == []


def test_every_incident_is_played_by_files_that_ship():
    section = PAGE.split("## Which incident is played where")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| (?!incident)(.+?) \| (`.+`) \|$", section, re.MULTILINE))
    assert rows.keys() == set(INCIDENTS)
    names = {scenario.name for scenario in shipped_scenarios()}
    missing = {what: set(re.findall("`(.+?)`", told)) - names for what, told in rows.items()}
    assert {what: left for what, left in missing.items() if left} == {}


def test_the_example_of_the_page_can_be_read():
    example = PAGE.split("```toml\n")[1].split("```")[0]
    assert parse_scenario(example, "example", "page").layers == {"carve"}
