"""Placements of random requests stay as they were recorded."""

import pytest
from tests.core.place.golden_placements import KINDS, differing


@pytest.mark.parametrize("kind", KINDS)
def test_placements_stay_as_recorded(kind: str) -> None:
    assert differing(kind) == []
