"""upstream_tests.toml answers for each end-to-end test of upstream, and our tests and pages in it exist."""

import re
import tomllib
from pathlib import Path

import pytest
from tests.docs.markdown import PAGES, ROOT

PROJECTS = tomllib.loads(Path(__file__).with_name("upstream_tests.toml").read_text())
ROWS = [
    (project, name, *row)
    for project, files in PROJECTS.items()
    for rows in files.values()
    for name, row in rows.items()
]
ANSWERS = {
    "same objects",
    "same behaviour",
    "differs",
    "not shown",
    "needs hardware",
    "does not apply",
}
OURS = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PAGE = re.compile(r"\bdocs/[\w-]+\.md\b")


def test_each_test_of_theirs_has_a_check_an_answer_and_a_reason() -> None:
    """The parser refuses a name that stands twice in a file."""
    assert [len(ROWS), *(sum(map(len, files.values())) for files in PROJECTS.values())] == [109, 72, 23, 14]
    assert [row for row in ROWS if len(row) != 5 or not all(cell.strip() for cell in row)] == []
    assert {row[3] for row in ROWS} == ANSWERS


@pytest.mark.parametrize(("file", "name"), sorted({found for row in ROWS for found in OURS.findall(row[4])}))
def test_a_test_of_ours_that_is_named_is_there(file: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_every_answer_has_its_evidence() -> None:
    """A row with the same objects or behaviour names our test. A difference names the page about it."""
    for _, name, _, answer, why in ROWS:
        if answer in ("same objects", "same behaviour"):
            assert OURS.search(why), name
        elif answer == "differs":
            assert PAGE.search(why), name


def test_every_page_that_is_named_is_there() -> None:
    assert {page for row in ROWS for page in PAGE.findall(row[4])} <= PAGES.keys()
