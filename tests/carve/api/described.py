"""The operations of the served OpenAPI document, as values that tests enumerate."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rackloom.carve.api.access import MEMBER, PERMISSION_KEY, ROLES_KEY
from rackloom.carve.api.auth import Role

PREFIX = "/v2/org/{org}/nico/"
STREAM = "stream-event"
"""The operation that has an endless answer."""


class Operation(NamedTuple):
    """An operation: where it is, who may call it, and its query parameters."""

    name: str
    method: str
    path: str
    """Below the organisation."""
    declared: frozenset[str]
    parameters: Mapping[str, Any]
    """Name of a query parameter -> its schema."""
    required: frozenset[str]
    """Query parameters without a default."""
    answer: Any
    """The schema of its 200, if that is JSON."""
    permission: str | None
    """None: it needs none, because every member may call it."""

    @property
    def names(self) -> list[str]:
        """The names in its path."""
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]

    def admits(self, role: Role | None) -> bool:
        """Whether a member of the organisation may call it with this role, or without a role if None."""
        return MEMBER in self.declared or role in self.declared

    def admits_parameter(self, role: Role, parameter: str) -> bool:
        """Whether a caller with this role may use a parameter."""
        return role in self.parameters[parameter].get(ROLES_KEY, Role)


def operations(document: Any) -> list[Operation]:
    """All operations of a document."""
    return [
        Operation(
            name=described["operationId"],
            method=method.upper(),
            path=path.removeprefix(PREFIX),
            declared=frozenset(described[ROLES_KEY]),
            parameters={
                parameter["name"]: parameter["schema"]
                for parameter in described["parameters"]
                if parameter["in"] == "query"
            },
            required=frozenset(
                parameter["name"]
                for parameter in described["parameters"]
                if parameter["in"] == "query" and parameter["required"]
            ),
            answer=described["responses"]
            .get("200", {})
            .get("content", {})
            .get("application/json", {})
            .get("schema"),
            permission=described.get(PERMISSION_KEY),
        )
        for path, methods in document["paths"].items()
        for method, described in methods.items()
    ]


def plain_values(schema: Any) -> Iterator[str]:
    """Values of a parameter that its schema names: the members of an enumeration, or both of a flag."""
    for choice in schema.get("anyOf", [schema]):
        if choice.get("type") == "array":
            yield from plain_values(choice["items"])
        elif choice.get("type") == "boolean":
            yield from ("true", "false")
        elif "const" in choice:
            yield choice["const"]
        else:
            yield from choice.get("enum", ())


def restricted_fields(document: Any, schema: Any, value: Any) -> Iterator[tuple[str, frozenset[str]]]:
    """The fields of an answer that hold something and are declared for some roles only, with these roles."""
    for choice in schema.get("anyOf", [schema]):
        name = choice.get("$ref", "").rpartition("/")[2]
        found = document["components"]["schemas"][name] if name else choice
        if isinstance(value, list) and "items" in found:
            for inner in value:
                yield from restricted_fields(document, found["items"], inner)
        elif isinstance(value, dict):
            for field, inner_schema in found.get("properties", {}).items():
                if value.get(field) is not None:
                    if ROLES_KEY in inner_schema:
                        yield field, frozenset(inner_schema[ROLES_KEY])
                    yield from restricted_fields(document, inner_schema, value[field])
