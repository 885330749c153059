"""The log events that the source has: one for each call of a structlog logger."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LEVELS = ("debug", "info", "warning", "error", "exception")
LOGGERS = ("log", "_log", "logger", "_logger")


class LogEvent(NamedTuple):
    """`name` has `*` where the source fills something in. `fields` are those named at the call."""

    name: str
    level: str
    fields: tuple[str, ...]
    module: str


def log_events(source: Path) -> Iterator[LogEvent]:
    """Events of all modules below `source` that log with structlog."""
    for path in sorted(source.rglob("*.py")):
        text = path.read_text()
        if "structlog.get_logger" in text:
            yield from _events(ast.parse(text), ".".join(path.relative_to(source).with_suffix("").parts))


def _events(tree: ast.Module, module: str) -> Iterator[LogEvent]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            holder = node.func.value
            if isinstance(holder, ast.Name) and holder.id in LOGGERS and node.func.attr in LEVELS:
                fields = tuple(
                    sorted(word.arg for word in node.keywords if word.arg not in (None, "exc_info"))
                )  # type: ignore[type-var]
                level = "error" if node.func.attr == "exception" else node.func.attr
                yield LogEvent(_name(node.args[0]), level, fields, module)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    assert isinstance(node, ast.Constant)
    return str(node.value)
