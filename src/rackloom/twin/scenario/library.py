"""The scenarios that ship with Rackloom."""

from pathlib import Path

from rackloom.errors import Refused
from rackloom.twin.scenario.read import read_scenario
from rackloom.twin.scenario.values import Scenario

DIRECTORY = Path(__file__).resolve().parents[1] / "scenarios"


def files() -> list[Path]:
    """Their files, by name."""
    return sorted(DIRECTORY.glob("*.toml"))


def shipped() -> list[Scenario]:
    """All of them, by name."""
    return [read_scenario(file) for file in files()]


def find(file: Path) -> Path:
    """The file of that path, or of a shipped scenario of that name."""
    if file.exists():
        return file
    named = DIRECTORY / f"{file}.toml"
    if file.parent == Path() and named.exists():
        return named
    names = ", ".join(one.stem for one in files())
    raise Refused(f"there is no scenario {file}", nearest_fix=f"give a file, or one of {names}")
