"""The tables of docs/scenarios.md that follow from the steps' signatures.

`python -m tests.lab.scenario.step_tables` writes them into the page.
"""

import re
from pathlib import Path

import msgspec

from rackloom.lab.scenario.model import ONLY_VIRTUAL
from rackloom.lab.scenario.reading import ACTIONS, EXPECTATIONS, shipped_scenarios

PAGE = Path(__file__).parents[3] / "docs" / "scenarios.md"
COMMON = {"at", "within", "stays"}
"""Keys that every step has."""
MODULES = (
    "tenants",
    "site_faults",
    "switch_leaders",
    "every_layer",
    "cluster_actions",
    "control_plane",
    "site_expectations",
    "cluster_expectations",
)
"""In their order on the page."""


def in_order(kinds):
    """Kinds by module, whichever was imported first."""
    return sorted(kinds.values(), key=lambda kind: MODULES.index(kind.struct.__module__.rpartition(".")[2]))


def step_row(kind):
    """One row: word, keys (`?`: can be left out), documentation."""
    fields = [field for field in msgspec.structs.fields(kind.struct) if field.name not in COMMON]
    keys = ", ".join(f"`{field.encode_name}`{'' if field.required else '?'}" for field in fields)
    doc = " ".join(kind.doc.split())
    return f"| `{kind.name}` | {keys} | {doc}{' (virtual time)' * (kind.speeds == ONLY_VIRTUAL)} |"


def scenario_row(scenario):
    """One row of a shipped scenario."""
    speeds = ", ".join(speed for speed in ("real", "virtual") if speed in scenario.speeds)
    return f"| `{scenario.name}` ({speeds}) | {scenario.title} | {scenario.seen} |"


TABLES = {
    "| `do =` | keys besides `at` | what |": [step_row(kind) for kind in in_order(ACTIONS)],
    "| `expect =` | keys besides `at`, `within`, `stays` | what |": [
        step_row(kind) for kind in in_order(EXPECTATIONS)
    ],
    "| scenario | what happens | where it was reported, or what kind of fault it is |": [
        scenario_row(scenario) for scenario in shipped_scenarios()
    ],
}
"""Rows, by the heading of their table."""


def written(page):
    """The page with these tables."""
    for heading, rows in TABLES.items():
        table = "\n".join([heading, "|---|---|---|", *rows]) + "\n"
        page = re.sub(rf"{re.escape(heading)}\n(\|.*\n)*", lambda _, table=table: table, page)
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
