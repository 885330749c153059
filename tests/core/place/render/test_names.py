"""Names of objects that are made for a gang: the API server accepts them, and no two gangs share one."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from rackloom.core.place.pod_templates import gang_object_name, group_object_name

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
NAMES = st.text(alphabet="abzAZ019-._/é", max_size=90)


@given(NAMES)
@example("a" * 53 + ".b" + "c" * 20)
@example("run_.1")
@example("a.-b")
@example("")
@example("__")
def test_a_name_is_a_label_whatever_the_gang_is_called(name: str) -> None:
    assert LABEL.fullmatch(gang_object_name(name))


@given(NAMES, NAMES)
def test_so_is_that_of_one_of_its_groups(name: str, group: str) -> None:
    assert LABEL.fullmatch(group_object_name(name, group))


def test_a_label_stays_as_it_is() -> None:
    assert gang_object_name("lab/run-1") == "run-1"


def test_names_that_read_alike_when_joined_are_told_apart() -> None:
    assert group_object_name("run", "a-b") != group_object_name("run-a", "b")
