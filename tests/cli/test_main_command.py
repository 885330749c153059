"""The program as a whole: what it lists, and that every command can be asked for help."""

import os
import subprocess
import sys

import pytest
from tests.waiting import PATIENCE

from rackloom.cli.main import COMMANDS

RACKLOOM = [sys.executable, "-m", "rackloom.cli.main"]


def rackloom(*arguments):
    """What the program says in plain text, on lines that are wide enough for its sentences."""
    wide = {**os.environ, "COLUMNS": "200"}
    wide.pop("FORCE_COLOR", None)
    return subprocess.run([*RACKLOOM, *arguments], capture_output=True, text=True, timeout=PATIENCE, env=wide)


def test_every_command_is_listed_with_what_it_does():
    listed = rackloom("--help").stdout
    for name, _, what in COMMANDS:
        assert name in listed
        assert what in listed


@pytest.mark.parametrize("name", [name for name, _, _ in COMMANDS])
def test_every_command_can_be_asked_for_help(name):
    asked = rackloom(name, "--help")
    assert asked.returncode == 0
    assert f"Usage: rackloom {name}" in asked.stdout


def test_an_unknown_command_is_a_usage_error():
    refused = rackloom("carve")
    assert refused.returncode == 2
    assert 'Unknown command "carve"' in refused.stdout + refused.stderr


def test_what_is_refused_says_why_and_what_to_change_on_stderr():
    refused = rackloom("topology", "show", "gb200")
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert refused.stderr.startswith("rackloom: no ")
    assert "\n  fix: use gb200-nvl" in refused.stderr


def test_listing_commands_imports_none_of_them():
    code = "import sys, rackloom.cli.main; print([m for m in sys.modules if m.startswith('rackloom.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert not any(
        room in done.stdout for room in ("rackloom.carve", "rackloom.claim", "rackloom.app", "rackloom.prove")
    )


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["in blocks", "at once"])
def test_a_reader_that_has_seen_enough_is_no_error(unbuffered):
    process = subprocess.Popen(
        [*RACKLOOM, "topology", "list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait(PATIENCE)
