"""The log events: what the processes write to their logs, read from the calls that write them."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from docs.site.reference.markdown import code, made_from, table
from docs.site.reference.source_trees import modules

LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
LOGGERS = ("log", "_log", "logger", "_logger")
_ALSO = {"exc_info"}


@dataclass(frozen=True)
class LogEvent:
    """A line that a module may write: its name, level and fields."""

    name: str
    level: str
    fields: tuple[str, ...]
    module: str


def page() -> str:
    """Every event by its name, with the level, the fields and the module."""
    grouped: defaultdict[tuple[str, str], list[LogEvent]] = defaultdict(list)
    for event in events():
        grouped[event.name, event.level].append(event)
    rows = [
        (
            code(name),
            "error, with the traceback" if level == "exception" else level,
            ", ".join(code(field) for field in sorted({field for event in found for field in event.fields})),
            ", ".join(code(module) for module in sorted({event.module for event in found})),
        )
        for (name, level), found in sorted(grouped.items())
    ]
    return (
        f"# Log events\n\n{made_from('the calls that write the log')}\n"
        "Each line is JSON where `log.file` is set, else text; `event` is the name below. Of equal warnings "
        "and errors one a minute is written, with the number of those left out as `repeated`. `<...>` stands "
        "for what is known when the line is written. Fields that a call takes from elsewhere (`...`) name "
        "the claim or the device. Simulators are left out.\n\n"
        + table(("event", "level", "fields", "written in"), rows)
    )


def events() -> Iterator[LogEvent]:
    """Every call of a logger, except in simulators. Raises ValueError for an event that cannot be read."""
    for module, tree in modules():
        for node in ast.walk(tree) if not module.startswith("lab/") else ():
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            logger = node.func.value
            if node.func.attr in LEVELS and isinstance(logger, ast.Name) and logger.id in LOGGERS:
                for name in _names(module, node.args[0]):
                    fields = tuple(
                        "..." if word.arg is None else word.arg
                        for word in node.keywords
                        if word.arg not in _ALSO
                    )
                    yield LogEvent(name, node.func.attr, fields, module)


def _names(module: str, node: ast.expr) -> tuple[str, ...]:
    match node:
        case ast.Constant(value=str(text)):
            return (text,)
        case ast.JoinedStr(values=parts):
            return (
                "".join(
                    str(p.value) if isinstance(p, ast.Constant) else f"<{ast.unparse(p.value)}>"
                    for p in parts
                ),
            )
        case ast.IfExp(body=yes, orelse=no):
            return (*_names(module, yes), *_names(module, no))
    raise ValueError(f"{module}:{node.lineno}: the name of a log event cannot be read: {ast.unparse(node)}")
