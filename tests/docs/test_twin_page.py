"""The examples of docs/twin.md run."""

import subprocess
import sys

import pytest
from tests.docs.markdown import fenced
from tests.waiting import PATIENCE

from rackloom.lab.scenario.reading import parse_scenario
from rackloom.testing import start_site

PAGE = "docs/twin.md"


def test_the_scenario_is_one():
    (text,) = fenced(PAGE, "toml")
    assert len(parse_scenario(text, "mine", "mine.toml").steps) == 4


@pytest.mark.slow
def test_the_scenario_is_observed(tmp_path):
    (text,) = fenced(PAGE, "toml")
    (tmp_path / "mine.toml").write_text(text)
    with start_site(seed="7", in_process=True) as site:
        assert site.play(tmp_path / "mine.toml").observed == 2


@pytest.mark.slow
def test_the_example_in_python():
    _, text = fenced(PAGE, "python")
    exec(text, {})  # noqa: S102 - our own page


@pytest.mark.slow
def test_the_example_for_pytest(tmp_path):
    text, _ = fenced(PAGE, "python")
    (tmp_path / "test_hers.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert "1 passed" in done.stdout, done.stdout
