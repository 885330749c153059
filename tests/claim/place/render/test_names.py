"""Names of objects that are made for a gang: the API server takes them, and no two gangs share one."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from rackloom.claim.place.render.names import as_object, as_object_of

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
NAMES = st.text(alphabet="abzAZ019-._/é", max_size=90)


@given(NAMES)
@example("a" * 53 + ".b" + "c" * 20)
@example("run_.1")
@example("a.-b")
@example("")
@example("__")
def test_a_name_is_a_label_whatever_the_gang_is_called(name: str) -> None:
    assert LABEL.fullmatch(as_object(name))


@given(NAMES, NAMES)
def test_so_is_that_of_one_of_its_groups(name: str, group: str) -> None:
    assert LABEL.fullmatch(as_object_of(name, group))


def test_a_label_stays_as_it_is() -> None:
    assert as_object("lab/run-1") == "run-1"


def test_names_that_read_alike_when_joined_are_told_apart() -> None:
    assert as_object_of("run", "a-b") != as_object_of("run-a", "b")
