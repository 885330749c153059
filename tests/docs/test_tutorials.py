"""Each tutorial works as its page describes. The tests run the page's commands unchanged."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.tutorials import (
    OF_A_CHECKOUT,
    ROOT,
    Lesson,
    copy_checkout,
    missing,
    steps,
    taken_port,
)

PAGES = sorted((ROOT / "docs").glob("tutorial-*.md"))
PERSONAS = {"newcomer", "tenant", "operator", "platform-engineer", "performance-engineer", "contributor"}
NEEDS = {"platform-engineer": ("kubectl",), "operator": ("curl", "openssl")}


def test_there_is_a_lesson_for_each_reader() -> None:
    assert {page.stem.removeprefix("tutorial-") for page in PAGES} == PERSONAS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_lesson_has_commands_and_shows_what_they_print(page: Path) -> None:
    taken = steps(page)
    assert len(taken) >= 3
    assert any(step.printed for step in taken)


def test_what_a_page_shows_is_compared() -> None:
    assert missing(["a ... c", "d"], "x\na b c\ny\nd\n") is None
    assert missing(["a ... c"], "a b\n") == "a ... c"
    assert missing(["d", "a"], "a\nd\n") == "a"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_lesson_goes_as_its_page_says(page: Path, tmp_path: Path) -> None:
    persona = page.stem.removeprefix("tutorial-")
    lacking = [program for program in NEEDS.get(persona, ()) if shutil.which(program) is None]
    if lacking:
        pytest.skip(f"NO {', '.join(lacking).upper()}: the lesson {page.name} was not taken")
    if persona == "performance-engineer" and not _has_nixl():
        pytest.skip(f"NO NIXL (rackloom nixl status): the lesson {page.name} was not taken")
    if port := taken_port():
        pytest.skip(f"PORT {port} IS TAKEN: the lesson {page.name} was not taken")
    source = ROOT / "src"
    if page.stem == OF_A_CHECKOUT:
        copy_checkout(tmp_path)
        source = tmp_path / "src"
    lesson = Lesson(tmp_path, Path(sys.executable).parent, source)
    try:
        for step in steps(page):
            lesson.take(step)
    finally:
        lesson.close()


def _has_nixl() -> bool:
    return (
        subprocess.run(
            [Path(sys.executable).with_name("rackloom"), "nixl", "status"], check=False, capture_output=True
        ).returncode
        == 0
    )
