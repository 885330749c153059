from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.allocate.quantity import Quantity

numbers = st.builds(Quantity, st.integers(-(10**15), 10**15), st.integers(-9, 6))
suffixes = st.sampled_from(["", "m", "k", "M", "G", "Ki", "Mi", "Gi", "e3", "E-2", "u", "n"])


def value(quantity: Quantity) -> Fraction:
    return Fraction(quantity.unscaled) * Fraction(10) ** quantity.scale


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("80Gi", "80Gi"),
        ("1024Mi", "1Gi"),
        ("1025Mi", "1025Mi"),
        ("1.5Gi", "1536Mi"),
        ("0.5Gi", "512Mi"),
        ("100Ki", "100Ki"),
        ("512", "512"),
        ("1000", "1k"),
        ("1500m", "1500m"),
        ("1000m", "1"),
        ("0.1", "100m"),
        ("1e3", "1e3"),
        ("10e3", "10e3"),
        ("1.1e5", "110e3"),
        ("0.5Ki", "512"),
        ("-2Ki", "-2Ki"),
        ("0", "0"),
        ("0Gi", "0"),
        ("0.1n", "1n"),
        ("400G", "400G"),
    ],
)
def test_prints_canonically(text: str, printed: str) -> None:
    assert str(Quantity.parse(text)) == printed


@pytest.mark.parametrize("text", ["", "abc", "1 ", "1K", "1KiB", "1_0", "--1", "1e", "1.2.3", "0x10", "1,5"])
def test_refuses_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        Quantity.parse(text)


def test_plain_numbers_are_quantities() -> None:
    assert Quantity.parse(4) == Quantity.parse("4")
    assert Quantity.parse(1.5) == Quantity.parse("1500m")


def test_compares_by_value_across_suffixes() -> None:
    assert Quantity.parse("1Gi") == Quantity.parse("1073741824") == Quantity.parse("1024Mi")
    assert hash(Quantity.parse("1Gi")) == hash(Quantity.parse("1024Mi"))
    assert Quantity.parse("1G") < Quantity.parse("1Gi")
    assert Quantity.parse("1") != 1


def test_only_whole_and_bounded_numbers_are_integers() -> None:
    assert Quantity.parse("2k").as_integer() == 2000
    for text in ("1000m", "0.5Gi", "9999999999999999999"):
        with pytest.raises(ValueError, match="cannot convert"):
            Quantity.parse(text).as_integer()


def test_binary_quantities_are_capped_at_64_bits() -> None:
    assert Quantity.parse("16Ei") == Quantity(2**63 - 1)


@given(numbers, numbers)
def test_arithmetic_is_exact(quantity: Quantity, two: Quantity) -> None:
    assert value(quantity + two) == value(quantity) + value(two)
    assert value(quantity - two) == value(quantity) - value(two)
    assert (quantity < two) == (value(quantity) < value(two))
    assert (quantity == two) == (value(quantity) == value(two))


@given(st.integers(-(10**12), 10**12), st.integers(0, 999), suffixes)
def test_printing_keeps_the_value(whole: int, fraction: int, suffix: str) -> None:
    parsed = Quantity.parse(f"{whole}.{fraction:03d}{suffix}")
    again = Quantity.parse(str(parsed))
    assert again == parsed
    assert str(again) == str(parsed)
