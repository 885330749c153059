import pytest

from rackloom.core.cluster.names import OLDEST_IMEX_DRIVER, is_driver_too_old, version_numbers


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("570.158.01", (570, 158, 1)),
        ("v2.0.0-rc.1", (2, 0, 0, 1)),
        ("1.7.20-k3s1", (1, 7, 20)),
        ("Unknown", ()),
    ],
)
def test_a_version_is_its_numbers_until_something_is_none(text, found):
    assert version_numbers(text) == found


@pytest.mark.parametrize(
    ("version", "old"),
    [
        ("570.158.00", True),
        ("99.1", True),
        (OLDEST_IMEX_DRIVER, False),
        ("580.95.05", False),
        ("1000.0", False),
    ],
)
def test_versions_are_compared_by_number(version, old):
    assert is_driver_too_old(version) is old
