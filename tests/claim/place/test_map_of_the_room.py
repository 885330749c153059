"""A package says of every module what belongs there."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from rackloom import twin
from rackloom.claim import place
from rackloom.claim.place import many, reading, refusal, search


@pytest.mark.parametrize("package", [place, reading, search, refusal, many])
def test_every_module_is_named_in_the_map_and_nothing_else(package: ModuleType) -> None:
    assert named(package) == there(package)


def test_every_room_of_the_twin_is_named_in_its_map() -> None:
    assert {one for one in there(twin) if one != "names"} <= named(twin)


def there(package: ModuleType) -> set[str]:
    folder = Path(str(package.__file__)).parent
    found = {one.stem for one in folder.iterdir() if one.suffix == ".py" or one.is_dir()}
    return found - {"__init__", "__pycache__"}


def named(package: ModuleType) -> set[str]:
    return set(re.findall(r"`(\w+)`", str(package.__doc__)))
