"""The machine and rack profiles that ship with Rackloom, by name.

Profiles let users plan for hardware that they do not have. Tests, the twin and the documentation use the
same files. Each file names the public source of its facts, and leaves out unknown ones. A profile is
read and decoded once per process. An unknown name raises Refused with the closest names (difflib).
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
    return _file_stems(_MACHINES)


@cache
def rack_names() -> tuple[str, ...]:
    """Names of the rack profiles, sorted."""
    return _file_stems(_RACKS)


def profile_names() -> tuple[str, ...]:
    """Names of all profiles, machines first."""
    return machine_names() + rack_names()


@cache
def load_machine(name: str) -> Machine:
    """The machine profile `name`. Raises Refused with the closest names if there is none."""
    _require_known(name, machine_names(), "machine")
    return msgspec.json.decode((_MACHINES / f"{name}.json").read_bytes(), type=Machine)


@cache
def load_rack(name: str) -> RackProfile:
    """The rack profile `name`. Raises Refused with the closest names if there is none."""
    _require_known(name, rack_names(), "rack")
    return msgspec.json.decode((_RACKS / f"{name}.json").read_bytes(), type=RackProfile)


def load_profile(name: str) -> Machine | RackProfile:
    """The profile `name` of either kind. Raises Refused with the closest names if there is none."""
    _require_known(name, profile_names(), "machine or rack")
    return load_rack(name) if name in rack_names() else load_machine(name)


def _file_stems(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name.removesuffix(".json") for path in folder.glob("*.json")))


def _require_known(name: str, known: tuple[str, ...], kind: str) -> None:
    if name not in known:
        # Imported for the error alone: it costs more than loading a profile does.
        from difflib import get_close_matches

        closest = " or ".join(get_close_matches(name.lower(), known, n=3) or known)
        raise Refused(f"no {kind} profile is called {name!r}", nearest_fix=f"use {closest}")
