"""The generated page of log events has each event of the source with its levels, fields and meaning."""

import ast
import re
from pathlib import Path

import pytest
from docs.site.reference import log_events
from docs.site.reference.source_trees import modules

ROW = re.compile(
    r"^\| `(?P<name>[^`]+)` \| (?P<levels>[a-z, ]+) \| (?P<fields>.*?) ?\| (?P<meaning>.+) \|$", re.MULTILINE
)
MODULE = ast.parse(
    """
log = structlog.get_logger()
log.info("a.begun", pod=pod, exc_info=True)
log.exception(f"a.{kind}", **rest)
other.warning("not.of-a-logger")
"""
)


def test_the_page_has_each_event_once_with_a_meaning() -> None:
    rows = [match.groupdict() for match in ROW.finditer(log_events.page())]
    names = [row["name"] for row in rows]
    assert sorted(names) == sorted({event.name for event in log_events.events(modules())})
    assert all(row["meaning"].endswith(".") for row in rows)


def test_levels_and_fields_are_those_of_the_calls() -> None:
    found = list(log_events.events([("app/x.py", MODULE)]))
    assert found == [
        log_events.LogEvent("a.begun", "info", ("pod",), "app/x.py"),
        log_events.LogEvent("a.*", "error", (), "app/x.py"),
    ]
    rows = {match["name"]: match.groupdict() for match in ROW.finditer(log_events.page())}
    for event in log_events.events(modules()):
        row = rows[event.name]
        assert event.level in row["levels"].split(", ")
        assert set(event.fields) <= set(re.findall(r"`(\w+)`", row["fields"]))


def test_simulators_have_no_row() -> None:
    assert list(log_events.events([("lab/x.py", MODULE)])) == []


def test_events_are_found_in_every_part() -> None:
    parts = {event.module.partition("/")[0] for event in log_events.events(modules())}
    assert parts >= {"app", "carve", "claim", "web"}


@pytest.mark.parametrize("added", ['"an.old-event" = "It is gone."', '"operation" = "Twice."'])
def test_a_meaning_without_an_event_and_one_given_twice_are_refused(
    added: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = tmp_path / "log_events.toml"
    changed.write_text(f"{log_events.MEANINGS.read_text()}\n[Another]\n{added}\n")
    monkeypatch.setattr(log_events, "MEANINGS", changed)
    with pytest.raises(ValueError, match="just the events of the source"):
        log_events.page()


def test_an_event_without_a_meaning_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "log_events.toml"
    changed.write_text(re.sub(r'^"operation".*\n', "", log_events.MEANINGS.read_text(), flags=re.MULTILINE))
    monkeypatch.setattr(log_events, "MEANINGS", changed)
    with pytest.raises(ValueError, match="operation"):
        log_events.page()
