"""The JSON schema of scenario files, for editors and for programs that write such files.

It is derived from the steps themselves, so that it cannot lag behind them. It describes one file as data:
keys, types and words. Checks that need the whole file (a name that no step made, times that go
backwards, an end without an expectation) are in `reading` alone.
"""

from typing import Any

import msgspec

from rackloom.lab.scenario.model import ACTIONS, EXPECTATIONS, StepKind
from rackloom.lab.scenario.reading import ScenarioHead

SCHEMA_ID = "urn:rackloom:scenario"
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def scenario_schema() -> dict[str, Any]:
    """The schema, as JSON Schema 2020-12."""
    kinds = [*_steps("do", ACTIONS), *_steps("expect", EXPECTATIONS)]
    (head,), defined = msgspec.json.schema_components([ScenarioHead])
    definition = defined[head["$ref"].rpartition("/")[2]]
    return {
        "$schema": _DRAFT,
        "$id": SCHEMA_ID,
        "title": "A scenario of Rackloom (TOML)",
        "type": "object",
        "properties": {
            **definition["properties"],
            "step": {"type": "array", "minItems": 1, "items": {"oneOf": kinds}},
        },
        "required": [*definition["required"], "step"],
        "additionalProperties": False,
    }


def _steps(key: str, kinds: dict[str, StepKind]) -> list[dict[str, Any]]:
    return [_step_schema(key, kinds[name]) for name in sorted(kinds)]


def _step_schema(key: str, kind: StepKind) -> dict[str, Any]:
    (reference,), defined = msgspec.json.schema_components([kind.struct])
    found = defined[reference["$ref"].rpartition("/")[2]]
    properties = {name: _plain(value) for name, value in found["properties"].items() if name != key}
    return {
        "title": kind.name,
        "description": kind.doc,
        "type": "object",
        "properties": {key: {"const": kind.name}, **properties},
        "required": [key, *(name for name in found["required"] if name != key)],
        "additionalProperties": False,
    }


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: a key that may be None is left out."""
    if "anyOf" in schema:
        kept = [choice for choice in schema["anyOf"] if choice != {"type": "null"}]
        rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
        return {**(kept[0] if len(kept) == 1 else {"anyOf": kept}), **rest}
    return {name: value for name, value in schema.items() if not (name == "default" and value is None)}
