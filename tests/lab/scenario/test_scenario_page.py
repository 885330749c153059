"""docs/scenarios.md tells of every step and every shipped scenario."""

import re

from tests.lab.scenario import step_tables
from tests.lab.scenario.step_tables import written

from rackloom.lab.scenario.reading import parse_scenario, shipped_scenarios

PAGE = step_tables.PAGE.read_text()
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


def test_the_tables_of_steps_and_scenarios_follow_from_the_code():
    """Else run `python -m tests.lab.scenario.step_tables`."""
    assert written(PAGE) == PAGE


def test_every_incident_is_played_by_files_that_ship():
    section = PAGE.split("## Which incident is played where")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| (?!incident)(.+?) \| (`.+`) \|$", section, re.MULTILINE))
    assert rows.keys() == set(INCIDENTS)
    names = {scenario.name for scenario in shipped_scenarios()}
    missing = {what: set(re.findall("`(.+?)`", text)) - names for what, text in rows.items()}
    assert {what: left for what, left in missing.items() if left} == {}


def test_the_example_of_the_page_can_be_read():
    example = PAGE.split("```toml\n")[1].split("```")[0]
    assert parse_scenario(example, "example", "page").layers == {"carve"}
