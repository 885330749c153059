"""The home of a site is removed at its end, or by the next site after a kill."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rackloom.testing.temporary_home import PREFIX, temporary_home

WAIT = "import sys; from rackloom.testing.temporary_home import temporary_home\n"
WAIT += "with temporary_home() as home: print(home, flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for the temporary files of this test alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def homes(place: Path) -> set[Path]:
    return set(place.glob(f"{PREFIX}*"))


def test_it_is_gone_at_the_end(place: Path) -> None:
    with temporary_home() as home:
        assert homes(place) == {home}
    assert homes(place) == set()


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_stays(place: Path) -> None:
    command = [sys.executable, "-c", WAIT]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as living,
    ):
        left, kept = (Path(child.stdout.readline().strip()) for child in (killed, living) if child.stdout)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert homes(place) == {left, kept}
        with temporary_home() as home:
            assert homes(place) == {kept, home}
    assert homes(place) == set()


def test_a_directory_that_nobody_held_yet_stays(place: Path) -> None:
    other = place / f"{PREFIX}made-this-moment"
    other.mkdir()
    with temporary_home():
        assert other in homes(place)
