"""The manual: a page for each command, with all its options, that a formatter takes without a warning."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.command_tree import LEAVES, arguments
from tests.waiting import PATIENCE

from rackloom.cli.main import app

RACKLOOM = [sys.executable, "-m", "rackloom.cli.main"]
SECTIONS = ["NAME", "SYNOPSIS", "DESCRIPTION", "EXIT STATUS", "ENVIRONMENT", "SEE ALSO"]


def rackloom(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RACKLOOM, *map(str, words)], capture_output=True, text=True, timeout=PATIENCE)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of each page by its name, as a user has them written."""
    directory = tmp_path_factory.mktemp("man") / "man1"
    written = rackloom("help", "--man", directory)
    assert written.returncode == 0, written.stderr
    found = {file.name: file.read_text() for file in directory.iterdir()}
    assert written.stdout == f"{len(found)} man pages in {directory}\n"
    return found


def test_there_is_a_page_of_the_program_and_of_each_command(pages: dict[str, str]) -> None:
    commands = {words[0] for words in LEAVES}
    assert pages.keys() == {"rackloom.1", *(f"rackloom-{name}.1" for name in commands)}
    for name, text in pages.items():
        title, _, _ = name.partition(".")
        assert text.startswith(f".TH {title.upper()} 1 ")
        sections = re.findall(r"^\.SH (.*)$", text, re.MULTILINE)
        assert [section for section in sections if section != "COMMANDS"] == SECTIONS
    for name in commands:
        assert f"rackloom\\-{name}" in pages["rackloom.1"]


def test_every_command_stands_there_with_its_options(pages: dict[str, str]) -> None:
    for words in LEAVES:
        text = pages[f"rackloom-{words[0]}.1"].replace("\\-", "-")
        assert f"rackloom {' '.join(words)}" in text
        entries = set(re.findall(r"^\.TP\n\\fB(.*)\\fR$", text, re.MULTILINE))
        flags = {flag for entry in entries for flag in re.findall(r"(?<![\w-])--?\w[\w.-]*", entry)}
        for argument in arguments(words):
            if argument.show and argument.parse:
                assert {name for name in argument.names if name.startswith("-")} <= flags, words


def test_no_markdown_is_left(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        assert not re.search(r"`|\*\*|\]\(#", text), name


def test_lists_stay_lists(pages: dict[str, str]) -> None:
    items = [line for line in app.help.splitlines() if line.strip().startswith("- ")]
    assert pages["rackloom.1"].count("\n.IP ") == len(items) == 5


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff here")
def test_a_formatter_takes_them_without_a_warning(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", "-Wbreak", "-z"],
            input=text,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert (done.returncode, done.stderr) == (0, ""), name


@pytest.mark.parametrize("words", [(), ("a", "b"), ("--help",)], ids=" ".join)
def test_pages_are_written_into_one_directory(words: tuple[str, ...]) -> None:
    refused = rackloom("help", "--man", *words)
    assert refused.returncode == 2
    assert refused.stderr.startswith("rackloom: man pages are written into one directory\n  fix: ")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = rackloom("help", "--man", tmp_path / "file")
    assert refused.returncode == 1
    assert "cannot be written: " in refused.stderr
