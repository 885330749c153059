"""The start of every long-running process."""

from pathlib import Path

APP = Path(__file__).parents[2] / "src" / "rackloom" / "app"


def test_whoever_waits_for_signals_freezes_what_is_loaded() -> None:
    # A full collection looks at every object of the start again, and finds nothing.
    modules = [path for path in APP.rglob("*.py") if "= stop_on_signals()" in path.read_text()]
    unfrozen = [path.name for path in modules if "freeze_loaded_objects()" not in path.read_text()]
    assert len(modules) > 5
    assert unfrozen == []
