"""Each reader's tutorial, from an empty home with the wheel alone: what a new user has.

`make test-install PYTEST_ADDOPTS=--durations=0` prints how long each takes.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.docs.test_tutorials import NEEDS, PAGES
from tests.docs.tutorials import OF_A_CHECKOUT, Lesson, steps, taken_port
from tests.install.commands import ASKED_BY, output_of

pytestmark = pytest.mark.skipif(
    ASKED_BY not in os.environ, reason=f"NO LESSONS FROM THE WHEEL: see `make test-install` ({ASKED_BY})"
)
OF_THE_PROGRAM = [page for page in PAGES if page.stem != OF_A_CHECKOUT]


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of `rackloom`, installed as in docs/install.md."""
    folder = tmp_path_factory.mktemp("program")
    output_of(sys.executable, "-m", "venv", folder)
    output_of(folder / "bin/pip", "install", "--quiet", wheel)
    output_of(folder / "bin/rackloom", "nixl", "install")
    return folder / "bin"


@pytest.mark.parametrize("page", OF_THE_PROGRAM, ids=lambda page: page.stem)
def test_a_lesson_needs_the_wheel_alone(page: Path, program: Path, tmp_path: Path) -> None:
    persona = page.stem.removeprefix("tutorial-")
    lacking = [name for name in NEEDS.get(persona, ()) if shutil.which(name) is None]
    if lacking:
        pytest.skip(f"NO {', '.join(lacking).upper()}: the lesson {page.name} was not taken")
    if port := taken_port():
        pytest.skip(f"PORT {port} IS TAKEN: the lesson {page.name} was not taken")
    lesson = Lesson(tmp_path, program, None)
    try:
        for step in steps(page):
            lesson.take(step)
    finally:
        lesson.close()
