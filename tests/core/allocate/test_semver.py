import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.allocate.cel.values import SemanticVersion

identifier = st.from_regex(r"\A(0|[1-9][0-9]{0,4}|[a-z-][0-9a-z-]{0,5})\Z")
versions = st.builds(
    lambda numbers, before, build: (
        ".".join(map(str, numbers))
        + ("-" + ".".join(before) if before else "")
        + ("+" + ".".join(build) if build else "")
    ),
    st.tuples(*[st.integers(0, 50)] * 3),
    st.lists(identifier, max_size=3),
    st.lists(identifier, max_size=2),
)


def test_precedence_is_that_of_the_specification() -> None:
    ordered = [
        "1.0.0-alpha",
        "1.0.0-alpha.1",
        "1.0.0-alpha.beta",
        "1.0.0-beta",
        "1.0.0-beta.2",
        "1.0.0-beta.11",
        "1.0.0-rc.1",
        "1.0.0",
        "1.0.1",
        "1.10.0",
    ]
    assert sorted(ordered, key=SemanticVersion.parse) == ordered


def test_build_metadata_does_not_count() -> None:
    assert SemanticVersion.parse("1.2.3+a") == SemanticVersion.parse("1.2.3+b")
    assert hash(SemanticVersion.parse("1.2.3+a")) == hash(SemanticVersion.parse("1.2.3+b"))


@pytest.mark.parametrize(
    "text", ["", "1", "1.2", "v1.2.3", "01.2.3", "1.2.3-", "1.2.3+", "1.2.3-01", "1.2.3-é", "1..2", "1.2.x"]
)
def test_refuses_what_is_no_version(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        SemanticVersion.parse(text)


@pytest.mark.parametrize(
    ("text", "meaning"), [("v1", "1.0.0"), ("1.02", "1.2.0"), ("v01.2.3-rc", "1.2.3-rc"), ("00", "0.0.0")]
)
def test_normalises_common_spellings(text: str, meaning: str) -> None:
    assert str(SemanticVersion.normalise(text)) == meaning


def test_a_short_version_has_no_prerelease() -> None:
    with pytest.raises(ValueError, match="short version"):
        SemanticVersion.normalise("1.2-rc")


@given(versions)
def test_prints_what_was_read(text: str) -> None:
    assert str(SemanticVersion.parse(text)) == text
    assert SemanticVersion.normalise("v" + text) == SemanticVersion.parse(text)


@given(versions, versions)
def test_order_is_total(first: str, two: str) -> None:
    left, right = SemanticVersion.parse(first), SemanticVersion.parse(two)
    assert left.compare(right) == -right.compare(left)
    assert (left == right) == (left.compare(right) == 0)
