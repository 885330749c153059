"""The log events: levels and fields from the calls in the source, meanings from log_events.toml.

An event is a call of a structlog logger. Events of the simulators are left out, because no user runs them.
"""

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from docs.site.reference.markdown import cell, code, made_from, table
from docs.site.reference.source_trees import calls, modules

MEANINGS = Path(__file__).with_name("log_events.toml")
LEVELS = ("debug", "info", "warning", "error", "exception")
LOGGERS = ("log", "_log", "logger", "_logger")
SIMULATORS = "lab/"
INTRODUCTION = """\
A program logs events: a name, a level and fields. A site service writes one JSON object per line to the
file of `log.file`, with `event`, `level`, `logger`, `timestamp` and the fields below. All other programs,
and a site service without `log.file`, write text to standard output. Equal warnings and errors appear
once a minute, and `repeated` counts those that it left out. An `error` with a traceback is a defect: the
program went on without that step. No event contains a token, a password, a key or a body. A minor version
may rename an event.
"""
NOTES = {
    "Node plugins: `rackloom node imex`, `gpu`, `nic`": (
        "An event about a claim also has `claim` (namespace and name) and `uid`, and some have `operation` "
        "(prepare or unprepare). An event about a pod has `driver` and `pod`."
    ),
}
"""A sentence below the heading of a section."""


class LogEvent(NamedTuple):
    """One call that logs. `name` has `*` for a part that the program fills in."""

    name: str
    level: str
    fields: tuple[str, ...]
    module: str
    """Its path below the package."""


def page() -> str:
    """Every event by program. Raises ValueError if an event has no meaning, or a meaning no event."""
    levels: dict[str, set[str]] = defaultdict(set)
    fields: dict[str, set[str]] = defaultdict(set)
    for event in events(modules()):
        levels[event.name].add(event.level)
        fields[event.name].update(event.fields)
    sections = tomllib.loads(MEANINGS.read_text())
    listed = [name for section in sections.values() for name in section]
    wrong = sorted(levels.keys() ^ set(listed)) + sorted({name for name in listed if listed.count(name) > 1})
    if wrong:
        raise ValueError(f"{MEANINGS.name} does not have just the events of the source: {', '.join(wrong)}")
    parts = ["# Log events", made_from(f"the source and `{MEANINGS.name}`"), INTRODUCTION]
    for program, meanings in sections.items():
        rows = [
            (
                code(name),
                ", ".join(sorted(levels[name])),
                ", ".join(map(code, sorted(fields[name]))),
                cell(meaning),
            )
            for name, meaning in meanings.items()
        ]
        parts += [f"## {program}", *([NOTES[program]] if program in NOTES else [])]
        parts.append(table(("event", "level", "fields", "meaning"), rows))
    return "\n\n".join(parts) + "\n"


def events(trees: Iterable[tuple[str, ast.Module]]) -> Iterator[LogEvent]:
    """The events of parsed modules, which come with their paths."""
    for path, tree in trees:
        if path.startswith(SIMULATORS) or all(name != "get_logger" for name, _ in calls(tree)):
            continue
        for level, call in calls(tree):
            if level in LEVELS and isinstance(call.func, ast.Attribute) and _is_logger(call.func.value):
                names = sorted(word.arg for word in call.keywords if word.arg not in (None, "exc_info"))
                yield LogEvent(
                    _name(call.args[0]), "error" if level == "exception" else level, tuple(names), path
                )


def _is_logger(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in LOGGERS


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    if not isinstance(node, ast.Constant):
        raise ValueError(f"line {node.lineno}: the name of an event is no text")
    return str(node.value)
