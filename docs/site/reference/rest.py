"""The operations of REST, from the OpenAPI document that the service gives at /openapi.json."""

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, cast

from docs.site.reference.markdown import cell, code, made_from, table

from rackloom.carve.api.app import create_app
from rackloom.carve.api.routing import ApiDeps

METHODS = ("get", "post", "put", "patch", "delete")


def document() -> dict[str, Any]:
    """The OpenAPI document. It depends on no part of a site, so the application is made without one."""
    parts = dict.fromkeys(ApiDeps.__annotations__)
    return create_app(cast(ApiDeps, SimpleNamespace(**parts))).openapi()


def page() -> str:
    """Every operation with its parameters, body, answers, roles and permission; then the shapes."""
    described = document()
    operations = [
        (method, path, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
        if method in METHODS
    ]
    shapes = described["components"]["schemas"]
    base = _common([path for _, path, _ in operations])
    shared = _shared_errors([operation for _, _, operation in operations])
    parts = [
        "# REST operations",
        made_from("the OpenAPI document, which a service gives at `/openapi.json`"),
        f"Every path begins with `{base}`. [api.md](../docs/api.md) says what all operations have in common; "
        "[Roles](roles.md) lists the roles of each path.",
        "## Errors",
        "Answers of every operation, with the body [Problem](#problem):",
        table(("status", "when"), [(code(status), cell(about)) for status, about in shared]),
        "## Operations",
        *(_operation(method, path, operation, base, shared) for method, path, operation in operations),
        "## Shapes",
        *(_shape(name, shape) for name, shape in sorted(shapes.items())),
    ]
    return "\n\n".join(parts) + "\n"


def _common(paths: Iterable[str]) -> str:
    split = [path.split("/") for path in paths]
    shared = []
    for words in zip(*split, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return "/".join(shared)


def _shared_errors(operations: list[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """The errors that every operation may answer."""
    each = [
        {(s, r.get("description", "")) for s, r in operation["responses"].items()} for operation in operations
    ]
    return tuple(
        sorted(answer for answer in set.intersection(*each) if int(answer[0]) >= HTTPStatus.BAD_REQUEST)
    )


def _operation(
    method: str, path: str, operation: Mapping[str, Any], base: str, shared: tuple[tuple[str, str], ...]
) -> str:
    text = [
        f"### {method.upper()} {path.removeprefix(base)}",
        cell(operation.get("description") or operation.get("summary", "")),
    ]
    facts = [("operation", code(operation["operationId"]))]
    if roles := operation.get("x-rackloom-roles"):
        facts.append(("roles", ", ".join(map(code, roles))))
    if permission := operation.get("x-rackloom-permission"):
        facts.append(("permission", code(permission)))
    bodies = operation.get("requestBody", {}).get("content", {}).values()
    facts += [("body", _type(media["schema"])) for media in bodies]
    for status, response in operation["responses"].items():
        if (status, response.get("description", "")) in shared:
            continue
        shapes = [_type(media.get("schema", {})) for media in response.get("content", {}).values()]
        facts.append((f"answer {status}", " ".join([cell(response.get("description", "")), *shapes])))
    text.append(table(("", ""), facts))
    parameters = [
        (
            code(parameter["name"]),
            parameter["in"],
            _type(parameter["schema"]),
            cell(parameter.get("description", "")),
        )
        for parameter in operation.get("parameters", ())
        if parameter["name"] != "org"
    ]
    if parameters:
        text.append(table(("parameter", "in", "type", "meaning"), parameters))
    return "\n\n".join(part for part in text if part)


def _shape(name: str, shape: Mapping[str, Any]) -> str:
    needed = shape.get("required", ())
    rows = [
        (code(field), _type(value), "required" if field in needed else "", cell(value.get("description", "")))
        for field, value in shape.get("properties", {}).items()
    ]
    described = [f"### {name}", cell(shape.get("description", ""))]
    described.append(table(("field", "type", "", "meaning"), rows) if rows else _type(shape))
    return "\n\n".join(part for part in described if part)


def _type(schema: Mapping[str, Any]) -> str:
    """A type in words, with links to shapes."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_type(part) for part in schema[key]))
    if "enum" in schema:
        return ", ".join(map(code, schema["enum"]))
    if "const" in schema:
        return code(schema["const"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"table of {_type(schema['additionalProperties'])}"
    return f"{kind} ({schema['format']})" if "format" in schema else str(kind)
