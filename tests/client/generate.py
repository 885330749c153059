"""`make client`: writes the generated part of `rackloom.client` from the document that the service serves.

`models.py` comes from datamodel-code-generator, with a template for msgspec. `operations.py` has a function
for each operation, which makes the request as a value. Parts that a client does not need are taken out of the
document first: old names of fields and parameters, and limits that the service checks.

A field that need not be given becomes `T | None = None`: null and a missing field mean the same to the
service, which then uses its own default.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from datamodel_code_generator.reference import FieldNameResolver

from rackloom.carve.api.app import create_app
from rackloom.client.call import wire_name

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/rackloom/client"
PREFIX = "/v2/org/{org}/nico/"
STREAM = "text/event-stream"
LIMITS = (
    "title", "pattern", "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems",
    "maxProperties", "propertyNames",
)  # fmt: skip
UNUSED = ("HTTPValidationError", "ValidationError")
"""The framework's own, which no operation answers with."""
ROLES = {"MEMBER", "TENANT_ADMIN"}
"""The client has the operations that one of these may call. Operators use `rackloom admin`."""
LEFT_OUT = (
    *("service-account", "role", "subnet", "vpc-prefix", "interface"),
    *("instance/{instanceId}/infiniband-interface", "instance/{instanceId}/interface"),
)
"""Paths of operations for accounts, and of networks that the service does not have."""
PAGING = ("pageNumber", "pageSize")
NAMES = FieldNameResolver(snake_case_field=True)


def document() -> Any:
    """The document as served, without left-out operations and the parts that only they need."""
    served = create_app(Mock()).openapi()
    paths = {
        path: {method: operation for method, operation in item.items() if not is_left_out(path, operation)}
        for path, item in served["paths"].items()
    }
    served["paths"] = {path: item for path, item in paths.items() if item}
    needed, found = set[str](), set(_references(served["paths"]))
    while found - needed:
        needed |= found
        found = {each for name in found for each in _references(served["components"]["schemas"][name])}
    schemas = served["components"]["schemas"]
    served["components"]["schemas"] = {name: schemas[name] for name in schemas if name in needed}
    return served


def is_left_out(path: str, operation: Any) -> bool:
    """Whether the client has no function for an operation of a path."""
    return path.removeprefix(PREFIX).startswith(LEFT_OUT) or not ROLES & {*operation["x-rackloom-roles"]}


def _references(part: Any) -> Iterator[str]:
    """Names of the schemas to which a part of the document refers."""
    if isinstance(part, dict):
        if isinstance(reference := part.get("$ref"), str):
            yield reference.rpartition("/")[2]
        for value in part.values():
            yield from _references(value)
    elif isinstance(part, list):
        for value in part:
            yield from _references(value)


# Models.


SCHEMAS = "#/components/schemas/"
STRING, TIME = {"type": "string"}, {"type": "string", "format": "date-time"}
OPTIONAL = {"anyOf": [STRING, {"type": "null"}]}
BASES = (
    (
        "Stored",
        None,
        "An object that the service keeps.",
        {"created": TIME, "updated": TIME, "id": STRING},
        True,
    ),
    ("Named", "Stored", "A kept object with a name.", {"name": STRING, "description": OPTIONAL}, True),
    ("Reference", None, "An object by id and name.", {"id": STRING, "name": STRING}, True),
    ("Renaming", None, "Another name or description.", {"name": OPTIONAL, "description": OPTIONAL}, False),
)
"""Bases of schemas that begin alike: name, base, description, fields, and whether the fields are required."""


def schemas(served: Any) -> dict[str, Any]:
    """The schemas without the parts that a client does not need."""
    return {
        name: _plain(schema) for name, schema in served["components"]["schemas"].items() if name not in UNUSED
    }


def with_bases(found: dict[str, Any]) -> dict[str, Any]:
    """The schemas, and a common base for those that begin alike."""
    bases: dict[str, str | None] = {}
    for base, parent, description, fields, is_required in BASES:
        for name, schema in found.items():
            if bases.get(name) == parent and _begins_with(schema, fields, is_required):
                rest = {key: field for key, field in schema["properties"].items() if key not in fields}
                found[name] = schema | {"properties": rest, "required": [*rest.keys() & schema["required"]]}
                bases[name] = base
        required = [*fields] if is_required else []
        found[base] = {
            "description": description,
            "type": "object",
            "properties": fields,
            "required": required,
        }
        bases[base] = parent
    return {
        name: schema
        if (base := bases.get(name)) is None
        else schema | {"allOf": [{"$ref": f"{SCHEMAS}{base}"}]}
        for name, schema in found.items()
    }


def _begins_with(schema: Any, fields: dict[str, Any], is_required: bool) -> bool:
    """Whether these are the first fields of a schema. An id is a text in Python."""
    own = schema.get("properties", {})
    first = [(key, STRING if own[key].get("format") == "uuid" else own[key]) for key in own][: len(fields)]
    return first == [*fields.items()] and all((key in schema["required"]) == is_required for key in fields)


def _plain(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key not in LIMITS or isinstance(value, dict)}
    kept.pop("propertyNames", None)
    if (patterns := kept.pop("patternProperties", None)) is not None:
        (kept["additionalProperties"],) = patterns.values()
    if isinstance(fields := kept.get("properties"), dict):
        fields = {name: field for name, field in fields.items() if not field.get("deprecated")}
        required = [name for name in kept.get("required", ()) if name in fields]
        kept["properties"] = {
            name: field if name in required else _optional(field) for name, field in fields.items()
        }
        kept["required"] = required
        return {key: _fields(value) if key == "properties" else _plain(value) for key, value in kept.items()}
    return {key: _plain(value) for key, value in kept.items()}


def _fields(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain(field) for name, field in fields.items()}


def _optional(field: Any) -> Any:
    """The field, which may be null too: a field that need not be given has no other default."""
    field = {key: value for key, value in field.items() if key != "default"}
    choices = field.get("anyOf", [field])
    return {"anyOf": [*choices, *([] if {"type": "null"} in choices else [{"type": "null"}])]}


def write_models(served: Any, file: Path) -> None:
    """Generate the models."""
    with tempfile.TemporaryDirectory() as room:
        source = Path(room) / "document.json"
        described = {"openapi": "3.1.0", "info": served["info"], "paths": {}}
        source.write_text(json.dumps(described | {"components": {"schemas": with_bases(schemas(served))}}))
        subprocess.run(
            (
                *(sys.executable, "-m", "datamodel_code_generator", "--input", source, "--output", file),
                *("--input-file-type", "openapi", "--openapi-scopes", "schemas"),
                *("--output-model-type", "msgspec.Struct", "--custom-template-dir", _templates(Path(room))),
                *("--target-python-version", "3.11", "--snake-case-field", "--use-schema-description"),
                *("--use-single-line-docstring", "--enum-field-as-literal", "all"),
                *("--type-mappings", "uuid=string", "--output-datetime-class", "datetime"),
                *("--no-formatters", "--disable-timestamp"),
                *("--additional-imports", "rackloom.client.call.Model"),
                *("--custom-file-header", '"""The objects of the service. Written by `make client`."""'),
            ),
            check=True,
        )
    format_file(file)


def _templates(room: Path) -> Path:
    (room / "msgspec.jinja2").write_text((Path(__file__).parent / "templates/msgspec.jinja2").read_text())
    return room


def format_file(file: Path) -> None:
    """Sort its imports, drop those that it does not need, and format it as the rest of the code is."""
    ruff = (sys.executable, "-m", "ruff")
    settings = ("--config", ROOT / "pyproject.toml", "--quiet", file)
    subprocess.run((*ruff, "check", "--select", "I,F401,UP", "--fix", *settings), check=True)
    subprocess.run((*ruff, "format", *settings), check=True)


# Operations.


HEADER = '''"""Operations of the service, each a function that makes its request. Written by `make client`."""

from datetime import datetime
from typing import Any, Literal

from rackloom.client import models
from rackloom.client.call import Call, Many, PagedCall, make_call, make_paged_call
'''


def write_operations(served: Any, file: Path) -> None:
    """Generate the functions."""
    functions = [
        function
        for path, methods in served["paths"].items()
        for method, operation in methods.items()
        for function in functions_of(path.removeprefix(PREFIX), method.upper(), operation)
    ]
    file.write_text("\n\n".join((HEADER, *functions)))
    format_file(file)


def functions_of(path: str, method: str, operation: Any) -> Iterator[str]:
    """The functions of an operation: none of a stream, and two where a dry run has another answer."""
    answers = {
        int(status): content
        for status, answer in operation["responses"].items()
        for content in [answer.get("content", {})]
        if int(status) < 300
    }
    if any(STREAM in content for content in answers.values()):
        return
    name = operation["operationId"].replace("-", "_")
    queries = [q for q in operation["parameters"] if q["in"] == "query" and not q["schema"].get("deprecated")]
    queries = [q for q in queries if not q.get("deprecated")]
    shapes = {status: content["application/json"]["schema"] for status, content in answers.items()}
    if len(shapes) > 1:
        queries = [query for query in queries if query["name"] != "dryRun"]
        yield function(name, path, method, operation, queries, shapes.pop(201), {})
        yield function(f"{name}_dry_run", path, method, operation, queries, shapes.pop(200), {"dryRun": True})
    else:
        (shape,) = shapes.values()
        yield function(name, path, method, operation, queries, shape, {})


def function(
    name: str, path: str, method: str, operation: Any, queries: list[Any], shape: Any, fixed: dict[str, Any]
) -> str:
    """The text of one function. Its arguments are those of the request: it passes `locals()` on."""
    is_paged = any(query["name"] == "pageNumber" for query in queries)
    queries = [query for query in queries if query["name"] not in PAGING]
    ids = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    body = _schema_of(operation.get("requestBody", {}))
    parameters = [f"{snake(each)}: str" for each in ids] + ([f"body: {body}"] if body else [])
    named = sorted(queries, key=lambda query: not query["required"])
    if named:
        parameters.append("*")
    parameters += [
        f"{snake(q['name'])}: {parameter_type(q['schema'])}" + ("" if q["required"] else " | None = None")
        for q in named
    ]
    for query in queries:
        assert wire_name(snake(query["name"])) == query["name"], f"{query['name']} is missing in WIRE_NAMES"
        assert query["name"] not in (*ids, "body")
    parts = [f"{{{snake(part[1:-1])}}}" if part.startswith("{") else part for part in path.split("/")]
    kind, result = ("PagedCall", type_of(shape["items"])) if is_paged else ("Call", type_of(shape))
    given = [repr(f"{operation['operationId']} {method} {'/'.join(parts)}"), result]
    arguments = ["locals()"] if parameters else []
    arguments += [repr({snake(key): value for key, value in fixed.items()})] if fixed else []
    given += [" | ".join(arguments)] if arguments else []
    make = "make_paged_call" if is_paged else "make_call"
    lines = [
        f"def {name}({', '.join(parameters)}) -> {kind}[{result}]:",
        f'    """{documentation(method, path, operation, fixed)}"""',
        f"    return {make}({', '.join(given)})",
    ]
    return "\n".join(lines)


def documentation(method: str, path: str, operation: Any, fixed: dict[str, Any]) -> str:
    """The document's description of the operation, and its path."""
    words = operation.get("description") or operation.get("summary", "")
    text = words.partition("\n\n")[0].replace("\n", " ").strip().rstrip(".")
    query = "".join(f"?{key}={str(value).lower()}" for key, value in fixed.items())
    return f"{text}.\n\n    {method} /{path}{query}\n    "


def snake(name: str) -> str:
    """The name in Python, as the models have it."""
    return NAMES.get_valid_name(name)


def _schema_of(request: Any) -> str | None:
    schema = request.get("content", {}).get("application/json", {}).get("schema")
    return None if schema is None else type_of(schema)


SIMPLE = {"string": "str", "integer": "int", "boolean": "bool", "number": "float", "null": "None"}


def type_of(schema: Any) -> str:
    """The type of an answer or a body."""
    if "$ref" in schema:
        return f"models.{schema['$ref'].rpartition('/')[2]}"
    if schema["type"] == "array":
        return f"list[{type_of(schema['items'])}]"
    return "dict[str, Any]" if schema["type"] == "object" else SIMPLE[schema["type"]]


def parameter_type(schema: Any) -> str:
    """The type of a parameter in the query, without None."""
    if "$ref" in schema:
        return type_of(schema)
    if schema.get("type") == "array":
        return f"Many[{parameter_type(schema['items'])}]"
    if choices := [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]:
        enumerated = [value for each in choices for value in each.get("enum", ())]
        return _literal(enumerated) if enumerated else " | ".join(map(parameter_type, choices))
    if "enum" in schema or "const" in schema:
        return _literal(schema.get("enum") or [schema["const"]])
    return "datetime" if schema.get("format") == "date-time" else SIMPLE[schema["type"]]


def _literal(values: list[str]) -> str:
    return f"Literal[{', '.join(map(repr, values))}]"


def write(room: Path) -> None:
    """Write both files."""
    served = document()
    write_models(served, room / "models.py")
    write_operations(served, room / "operations.py")


if __name__ == "__main__":
    write(PACKAGE)
