"""`rackloom twin` as a person and as a program see it."""

import json

import pytest
from inline_snapshot import external_file, snapshot

from rackloom.cli.main import app
from rackloom.errors import Refused

WRONG = """
title = "Nothing is carved, and a partition is expected"
seen = "a test"

[[step]]
expect = "partitions"
count = 1
within = 5
"""


@pytest.fixture
def rackloom(capsys):
    def run(*arguments):
        code = app(["twin", *arguments])
        return code, capsys.readouterr().out

    return run


def test_list(rackloom):
    code, output = rackloom("list")
    assert code is None
    assert output.splitlines()[0].split() == ["SCENARIO", "LAYERS", "SPEEDS", "WHAT", "HAPPENS"]
    assert any(line.startswith("switch-unreachable ") for line in output.splitlines())


@pytest.mark.slow
def test_a_transcript_in_virtual_time(rackloom):
    code, output = rackloom("play", "switch-dark", "--speed", "virtual")
    assert code == 0
    assert output == external_file("transcripts/twin-play-switch-dark.txt")


def test_json(rackloom):
    code, output = rackloom("play", "reply-lost", "--speed", "virtual", "--json")
    played = json.loads(output)
    assert code == 0
    assert played["ok"] is True
    assert played["observed"] == played["expected"] == 7
    assert set(played["lines"][0]) == {"step", "began", "ended", "what", "ok", "seen"}


def test_what_is_not_observed_is_told_and_ends_with_1(rackloom, tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text(WRONG)
    code, output = rackloom("play", str(file), "--speed", "virtual")
    assert code == 1
    assert output == snapshot("""\
     0.0s FAILED expect partitions within 5.0 count 1
                 rack-01 holds none
wrong: 0 of 1 expectations observed in 5.0 s of virtual time: NOT as it must be
""")


def test_no_such_scenario():
    with pytest.raises(Refused, match="there is no scenario nowhere"):
        app(["twin", "play", "nowhere"])
