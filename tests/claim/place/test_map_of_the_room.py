"""The package says of every module what belongs there."""

import re
from pathlib import Path

from rackloom.claim import place


def test_every_module_is_named_in_the_map_and_nothing_else() -> None:
    folder = Path(str(place.__file__)).parent
    there = {one.stem for one in folder.iterdir() if one.suffix == ".py" or one.is_dir()}
    named = set(re.findall(r"`(\w+)`", str(place.__doc__)))
    assert named == there - {"__init__", "__pycache__"}
