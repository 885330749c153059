"""The served OpenAPI document: valid, complete, and the same as what the routes enforce."""

from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

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


def test_the_document_is_valid(document: Any) -> None:
    problems = [error.message for error in OpenAPIV31SpecValidator(document).iter_errors()]
    assert problems == []


def test_every_name_in_a_path_is_a_described_parameter(document: Any) -> None:
    for method, path, operation in operations(document):
        named = {part[1:-1] for part in path.split("/") if part.startswith("{")}
        described = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"}
        assert described == named, (method, path)


def test_every_operation_declares_who_may_call_it(document: Any) -> None:
    known = {MEMBER, *Role}
    for method, path, operation in operations(document):
        roles = operation[ROLES_KEY]
        assert roles, (method, path)
        assert known.issuperset(roles), (method, path)
