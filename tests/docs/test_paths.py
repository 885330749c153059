"""Paths of the code that pages name exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "rackloom"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
LAYERS = sorted(path.name for path in SOURCES.iterdir() if path.is_dir() and path.name != "__pycache__")
PATH = re.compile(
    rf"`((?:src/rackloom/)?(?:{'|'.join(LAYERS)})/[\w./-]+|(?:tests|benchmarks|deploy|examples)/[\w./-]+)`"
)


FOLDERS = ("src", "tests", "benchmarks", "deploy", "examples")

OTHERS = {"topology/block"}
"""A plugin of Slurm, which only looks like one of our paths."""


def paths(text: str) -> Iterator[str]:
    for match in PATH.finditer(text):
        yield match.group(1).rstrip("/")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_of_the_code_that_a_page_names_exist(page: Path) -> None:
    missing = {
        path
        for path in set(paths(page.read_text())) - OTHERS
        if not any((base / path).exists() for base in (ROOT, ROOT / "src/rackloom", ROOT / "src"))
    }
    assert missing == set()


BARE_NAME = re.compile(r"`(\w+\.py)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_source_files_that_a_page_names_without_a_folder_exist(page: Path) -> None:
    tracked = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert set(BARE_NAME.findall(page.read_text())) - tracked == set()
