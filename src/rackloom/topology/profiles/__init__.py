"""The machines and racks that ship with Rackloom, by name.

They let people plan for hardware that they do not have, and they are what the tests, the twin and the
documentation mean by "a GB200 tray". Each file says where its facts were found; what was not found is absent.
"""

from functools import cache
from pathlib import Path

import msgspec

from rackloom.errors import Refused
from rackloom.topology.machine import Machine
from rackloom.topology.rack import RackProfile

_MACHINES = Path(__file__).parent / "machines"
_RACKS = Path(__file__).parent / "racks"


@cache
def machine_names() -> tuple[str, ...]:
    """Names of the machine profiles, sorted."""
    return _names(_MACHINES)


@cache
def rack_names() -> tuple[str, ...]:
    """Names of the rack profiles, sorted."""
    return _names(_RACKS)


def names() -> tuple[str, ...]:
    """Names of all profiles, machines first."""
    return machine_names() + rack_names()


@cache
def load_machine(name: str) -> Machine:
    """The machine profile `name`; Refused with the closest names where there is none."""
    _require(name, machine_names(), "machine")
    return msgspec.json.decode(_file(_MACHINES, name).read_bytes(), type=Machine)


@cache
def load_rack(name: str) -> RackProfile:
    """The rack profile `name`; Refused with the closest names where there is none."""
    _require(name, rack_names(), "rack")
    return msgspec.json.decode(_file(_RACKS, name).read_bytes(), type=RackProfile)


def load(name: str) -> Machine | RackProfile:
    """The profile `name` of either kind; Refused with the closest names where there is none."""
    _require(name, names(), "machine or rack")
    return load_rack(name) if name in rack_names() else load_machine(name)


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name.removesuffix(".json") for path in folder.glob("*.json")))


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _require(name: str, known: tuple[str, ...], kind: str) -> None:
    if name not in known:
        raise Refused(f"no {kind} profile is called {name!r}", nearest_fix=f"use {_closest(name, known)}")


def _closest(name: str, known: tuple[str, ...]) -> str:
    # Imported for the error alone: it costs more than loading a profile does.
    from difflib import get_close_matches

    return " or ".join(get_close_matches(name.lower(), known, n=3) or known)
