"""The scenarios that ship with Rackloom, in `lab/scenarios` beside this package."""

from pathlib import Path

from rackloom.errors import Refused

SCENARIO_DIRECTORY = Path(__file__).resolve().parents[1] / "scenarios"


def scenario_files() -> list[Path]:
    """Their files, by name."""
    return sorted(SCENARIO_DIRECTORY.glob("*.toml"))


def find_scenario(file: Path) -> Path:
    """The file of that path, or of a shipped scenario of that name."""
    if file.exists():
        return file
    named = SCENARIO_DIRECTORY / f"{file}.toml"
    if file.parent == Path() and named.exists():
        return named
    names = ", ".join(scenario_file.stem for scenario_file in scenario_files())
    raise Refused(f"there is no scenario {file}", nearest_fix=f"give a file, or one of {names}")
