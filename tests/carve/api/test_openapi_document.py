"""The served OpenAPI document: valid, complete, and consistent with the checks of the routes."""

from typing import Any

import pytest
from docs.site.reference import roles
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.testclient import TestClient
from tests.carve.api import described

from rackloom.carve.api import app
from rackloom.carve.api.access import MEMBER, ROLES_KEY
from rackloom.carve.api.auth import Role


@pytest.fixture
def document(api: Any) -> Any:
    answer = api.client.get("/openapi.json")
    assert answer.status_code == 200
    return answer.json()


def operations(document: Any) -> list[tuple[str, str, Any]]:
    return [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


@pytest.mark.slow
def test_the_document_is_valid(document: Any) -> None:
    problems = [error.message for error in OpenAPIV31SpecValidator(document).iter_errors()]
    assert problems == []


def test_the_document_is_encoded_once(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is large, and any caller may request it."""
    encoded: list[object] = []
    encode = app.msgspec.json.encode
    monkeypatch.setattr(app.msgspec.json, "encode", lambda value: encoded.append(value) or encode(value))
    served = app.create_app(api.client.app.state.deps)
    with TestClient(served) as client:
        answers = [client.get("/openapi.json") for _ in range(3)]
    assert len({answer.content for answer in answers}) == 1
    assert answers[0].json() == served.openapi()
    assert encoded == [served.openapi()]


def test_every_name_in_a_path_is_a_described_parameter(document: Any) -> None:
    for method, path, operation in operations(document):
        named = {part[1:-1] for part in path.split("/") if part.startswith("{")}
        described = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"}
        assert described == named, (method, path)


def test_every_operation_declares_who_may_call_it(document: Any) -> None:
    known = {MEMBER, *Role}
    for method, path, operation in operations(document):
        declared = operation[ROLES_KEY]
        assert declared, (method, path)
        assert known.issuperset(declared), (method, path)


def test_the_page_of_roles_has_the_roles_that_the_service_declares(document: Any) -> None:
    _, _, section = roles.page().partition("## Operations of REST")
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [*operation_lines(document), *parameter_lines(document)]


def operation_lines(document: Any) -> list[str]:
    """A row for each path: who may call its operations. Methods with the same roles stand together."""
    found: dict[str, dict[str, list[str]]] = {}
    for operation in described.operations(document):
        admitted = " or ".join(f"`{role}`" for role in (MEMBER, *Role) if role in operation.declared)
        found.setdefault(operation.path, {}).setdefault(admitted, []).append(operation.method)
    return [
        f"| `/{path}` | "
        + "; ".join(f"{', '.join(names)}: {admitted}" for admitted, names in methods.items())
        + " |"
        for path, methods in found.items()
    ]


def parameter_lines(document: Any) -> list[str]:
    """A line for each parameter that is for other roles than its operation."""
    return [
        f"| `{name}` of GET `/{operation.path}` | {' or '.join(f'`{role}`' for role in schema[ROLES_KEY])} |"
        for operation in described.operations(document)
        for name, schema in operation.parameters.items()
        if ROLES_KEY in schema
    ]
