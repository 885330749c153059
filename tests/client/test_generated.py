"""The generated part of the client has every operation and object of the document that is served."""

import inspect
from typing import Any

import msgspec
import pytest
from tests.carve.api.described import PREFIX, STREAM
from tests.client import generate

from rackloom.client import models, operations
from rackloom.client.call import Call, PagedCall
from rackloom.client.exchange import ErrorBody


@pytest.fixture(scope="module")
def document() -> Any:
    return generate.document()


def calls() -> list[Call[Any] | PagedCall[Any]]:
    """The call that every function makes, with `x` for each id."""
    made = []
    for _, function in inspect.getmembers(operations, inspect.isfunction):
        if function.__module__ != operations.__name__:
            continue
        needed = [
            "x"
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is inspect.Parameter.empty
            and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        named = {
            parameter.name: "x"
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is inspect.Parameter.empty
            and parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        made.append(function(*needed, **named))
    return made


def test_every_operation_has_a_function(document: Any) -> None:
    described = {
        (operation["operationId"], method.upper(), "/".join(
            "x" if part.startswith("{") else part for part in path.removeprefix(PREFIX).split("/")
        ))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }  # fmt: skip
    made = {(call.operation, getattr(call, "method", "GET"), call.path) for call in calls()}
    assert described - made == {(STREAM, "GET", "event")}, "its function is `Client.events`"
    assert made - described == set()


def test_every_parameter_of_a_query_can_be_given(document: Any) -> None:
    given = {call.operation: set(call.query) for call in calls()}
    for methods in document["paths"].values():
        for operation in methods.values():
            if operation["operationId"] == STREAM:
                continue
            described = {
                query["name"]
                for query in operation["parameters"]
                if query["in"] == "query"
                and not (query.get("deprecated") or query["schema"].get("deprecated"))
            }
            assert described - set(generate.PAGING) - {"dryRun"} == given[operation["operationId"]] - {
                "dryRun"
            }


def test_every_object_has_the_fields_of_the_document(document: Any) -> None:
    for name, schema in generate.schemas(document).items():
        if schema.get("type") == "object":
            model = getattr(models, name)
            fields = {field.encode_name: field for field in msgspec.structs.fields(model)}
            assert set(fields) == set(schema["properties"]), name
            assert {key for key, field in fields.items() if field.required} == set(schema["required"]), name
    assert set(msgspec.structs.asdict(ErrorBody("x"))) <= set(
        document["components"]["schemas"]["Problem"]["properties"]
    )


@pytest.mark.slow
def test_the_generated_code_is_that_of_the_document(tmp_path: Any) -> None:
    """When this fails, run `make client`."""
    generate.write(tmp_path)
    for name in ("models.py", "operations.py"):
        assert (tmp_path / name).read_text() == (generate.PACKAGE / name).read_text(), f"{name}: make client"
