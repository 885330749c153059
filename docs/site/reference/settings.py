"""The settings of `rackloom serve`: names, types and defaults from `app/config.py`.

A meaning is written once, in the tables of docs/operating.md; a setting without one is refused here.
"""

import re
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from docs.site.reference.markdown import cell, code, made_from, table
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rackloom.app.config import Config, Section

OPERATING = "[operating.md](../docs/operating.md#settings)"
MEANINGS = Path(__file__).parents[2] / "operating.md"
_ROW = re.compile(r"^\| `([a-z_.]+)` \| (.*?) \| ?(.*?) ?\|$", re.MULTILINE)


def page() -> str:
    """Every setting, a table for each section of the file. Raises ValueError if one has no meaning."""
    meanings = {name: meaning for name, _, meaning in _ROW.findall(MEANINGS.read_text())}
    rows: dict[str, list[tuple[str, ...]]] = {}
    for name, field in fields(Config, ""):
        if name not in meanings:
            raise ValueError(f"{MEANINGS.name} says nothing of {name}")
        section, _, _ = name.rpartition(".")
        variable = f"RACKLOOM_{name.upper().replace('.', '__')}"
        if section.startswith("auth.issuers"):
            variable = ""  # an array of tables has no variable of its own
        rows.setdefault(section, []).append(
            (
                code(name),
                cell(kind(field.annotation)),
                code(default(field)),
                _linked(meanings[name]),
                code(variable),
            )
        )
    head = ("setting", "type", "default", "meaning", "variable")
    sections = "\n".join(f"## `[{section}]`\n\n{table(head, found)}" for section, found in rows.items())
    return (
        f"# Settings of `rackloom serve`\n\n{made_from(f'`app/config.py` and the tables of {OPERATING}')}\n"
        "A setting comes from the file that `--config` names or from its variable; the variable wins. An "
        "unknown key is an error. Durations are `500ms`, `60s`, `10m`, `1h`, `7d`.\n\n"
        f"{sections}"
    )


def fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Every setting below a section, by its path."""
    for name, field in model.model_fields.items():
        section = next((part for part in _parts(field.annotation) if _is_section(part)), None)
        if section is None:
            yield f"{prefix}{name}", field
        else:
            yield from fields(section, f"{prefix}{name}.")


def default(field: FieldInfo) -> str:
    """How the default is written in the file; `required` and `unset` in their own words."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "unset"
    return _written(value)


def _written(value: Any) -> str:
    if isinstance(value, timedelta):
        return f'"{_duration(value)}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, tuple | list | frozenset | set):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        return "{}" if not value else str(value)
    return f'"{value}"'


def _duration(value: timedelta) -> str:
    seconds = value.total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g}{unit}"
    return f"{seconds * 1000:g}ms"


def kind(annotation: Any) -> str:
    """The kind of value that may be written, in words."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return kind(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return " or ".join(
            dict.fromkeys(kind(part) for part in get_args(annotation) if part is not type(None))
        )
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (tuple, list, frozenset, set):
        return f"list of {kind(get_args(annotation)[0])}"
    if origin is dict:
        return "table"
    names = {
        timedelta: "duration",
        bool: "boolean",
        int: "number",
        float: "number",
        str: "text",
        Path: "path",
    }
    if annotation in names:
        return names[annotation]
    if hasattr(annotation, "__members__"):
        return ", ".join(f"`{member.value}`" for member in annotation)
    return "text"


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def _is_section(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, Section)


def _linked(meaning: str) -> str:
    """A cell of docs/operating.md on a page of another folder."""
    return re.sub(
        r"\]\((#|[\w-]+\.md)",
        lambda match: "](../docs/" + ("operating.md#" if match[1] == "#" else match[1]),
        meaning,
    )
