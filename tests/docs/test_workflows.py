"""Hosted workflows and hooks call existing targets and files."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))


def commands(job: dict) -> list[str]:
    """The commands in the steps of a job, for each value of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {}).get("target", [""])
    runs = [step["run"] for step in job["steps"] if "run" in step]
    return [run.replace("${{ matrix.target }}", value) for run in runs for value in matrix]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_that_exist(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    called = [
        words for job in jobs.values() for run in commands(job) for words in re.findall(r"make (\S+)", run)
    ]
    assert called
    assert set(called) <= TARGETS


def test_a_change_builds_the_documentation_site() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text())["jobs"]
    assert "make docs-site" in {run for job in jobs.values() for run in commands(job)}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_a_limit_and_read_only_rights(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 90 for job in workflow["jobs"].values())


def test_help_names_every_target() -> None:
    named = set(re.findall(r"^([a-z][a-z-]*):.*## ", MAKEFILE, re.MULTILINE))
    assert named == TARGETS - {"help"}


def test_the_newest_entry_of_the_changelog_is_of_this_version_or_unreleased() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert headings[0] in ("Unreleased", version.group(1))
