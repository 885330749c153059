"""docs/upstream-tests.md: its answers are explained, its counts are right, and our tests are there."""

import re
from collections import Counter

import pytest
from tests.docs.markdown import PAGES, ROOT

PAGE = PAGES["docs/upstream-tests.md"]
HEAD, *SECTIONS = re.split(r"^## (.+)\n", PAGE, flags=re.MULTILINE)
PROJECTS = dict(zip(SECTIONS[::2], SECTIONS[1::2], strict=True))
OURS = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
COUNTED = re.compile(r"^\| `([a-z ]+)` \| ([\d |]+\d) \|", re.MULTILINE)


def rows(project):
    """Name, clause, answer, and our test or the reason, of each test of a project."""
    return [
        line.strip("| ").split(" | ")
        for line in PROJECTS[project].splitlines()
        if line.startswith("| ") and not line.startswith("| test |")
    ]


ROWS = [(project, *row) for project in PROJECTS for row in rows(project)]
COUNTS = {
    answer: [int(number) for number in numbers.split(" | ")] for answer, numbers in COUNTED.findall(HEAD)
}


def test_each_row_has_four_cells_and_an_answer_that_is_explained():
    assert len(COUNTS) == 6
    assert [row for row in ROWS if len(row) != 5] == []
    assert {row[3].strip("`") for row in ROWS} == COUNTS.keys()


def test_no_test_of_theirs_is_listed_twice_in_a_file():
    for text in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        names = re.findall(r"^\| (`[^`]+`) \|", text, re.MULTILINE)
        assert names
        assert len(names) == len(set(names))


def test_the_counts_are_those_of_the_rows():
    found = Counter((project, row[2].strip("`")) for project in PROJECTS for row in rows(project))
    for answer, numbers in COUNTS.items():
        of_projects = [found[project, answer] for project in PROJECTS]
        assert numbers == [*of_projects, sum(of_projects)], answer
    together = re.search(r"^\| together \| ([\d |]+\d) \|", HEAD, re.MULTILINE)
    assert together
    of_projects = [len(rows(project)) for project in PROJECTS]
    assert together[1] == " | ".join(map(str, [*of_projects, sum(of_projects)]))


@pytest.mark.parametrize(("file", "name"), sorted(set(OURS.findall(PAGE))))
def test_a_test_of_ours_that_is_named_is_there(file, name):
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_every_answer_has_what_it_rests_on():
    """What is the same names a test of ours, and what differs names a page."""
    for _, name, _, answer, why in ROWS:
        if answer in ("`same objects`", "`same behaviour`"):
            assert OURS.search(why), name
        elif answer == "`differs`":
            assert re.search(r"\]\([\w-]+\.md#[\w-]+\)", why), name
        else:
            assert why.strip(), name
