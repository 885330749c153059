"""A package that has many modules states the purpose of each in its docstring."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from rackloom import lab
from rackloom.core import diagnosis, gangs, place, transfer
from rackloom.core.place import search


@pytest.mark.parametrize("package", [diagnosis, gangs, place, search, transfer, lab])
def test_every_module_is_named_in_the_docstring_and_nothing_else(package: ModuleType) -> None:
    named = set(re.findall(r"`(\w+)`", str(package.__doc__)))
    folder = Path(str(package.__file__)).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert modules - {"__init__", "__pycache__", "scenarios"} <= named
