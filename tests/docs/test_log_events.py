"""docs/log-events.md lists the log events of the source, each with its levels and fields."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.docs.log_calls import log_events

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/log-events.md"
SIMULATORS = "lab."


def listed() -> Iterator[tuple[str, str, str, str]]:
    """Name, levels, fields and meaning of each row."""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`"):
            yield cells[0].strip("`"), cells[1], ", ".join(re.findall(r"`(\w+)`", cells[2])), cells[3]


def found() -> dict[str, tuple[set[str], set[str]]]:
    """Levels and fields of each event of the source."""
    events: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for event in log_events(ROOT / "src/rackloom"):
        if not event.module.startswith(SIMULATORS):
            levels, fields = events[event.name]
            levels.add(event.level)
            fields.update(event.fields)
    return events


def test_the_page_lists_each_event_once_with_its_meaning() -> None:
    rows = list(listed())
    assert sorted(name for name, *_ in rows) == sorted(found())
    assert all(meaning.endswith(".") for *_, meaning in rows)


def test_levels_and_fields_are_those_of_the_source() -> None:
    assert {name: (levels, fields) for name, levels, fields, _ in listed()} == {
        name: (", ".join(sorted(levels)), ", ".join(sorted(fields)))
        for name, (levels, fields) in found().items()
    }


def test_events_are_found_in_every_part() -> None:
    parts = {event.module.partition(".")[0] for event in log_events(ROOT / "src/rackloom")}
    assert parts >= {"app", "carve", "claim", "web"}
