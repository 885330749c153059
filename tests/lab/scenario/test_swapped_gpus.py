"""Swapped GPUs are seen to be other ones for as long as a step requires."""

from pathlib import Path

import pytest

from rackloom.app.twin.scenarios import play_scenario
from rackloom.lab.scenario.files import find_scenario
from rackloom.lab.scenario.reading import parse_scenario

SWAPPED = 'expect = "gpus"\ntray = "rack-01/slot-1"\nswapped = true\n'


@pytest.mark.slow
def test_they_stay_the_others():
    text = (
        find_scenario(Path("tray-swapped-under-cluster"))
        .read_text()
        .replace(SWAPPED, f"{SWAPPED}stays = 5\n")
    )
    seen = play_scenario(
        parse_scenario(text, "x", "x.toml"), speed="virtual", home=None, report=lambda _: None
    )
    assert seen.ok, seen.lines[-1]
    assert any("swapped True" in line.what and line.seen.endswith("for 5 s") for line in seen.lines)
