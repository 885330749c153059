"""/openapi.json: what the framework gathers from the routes, and what it cannot know."""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI


def complete(app: FastAPI) -> None:
    """Say how callers prove who they are, and how lists tell where they stand."""
    gather = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = gather()
            schema["components"]["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}
            }
            schema["security"] = [{"bearer": []}]
            for methods in schema["paths"].values():
                for operation in methods.values():
                    # The framework's own shape of a validation error, which this API never answers with.
                    operation["responses"].pop("422", None)
                    _describe_errors(operation)
                    _describe_page(operation)
        return app.openapi_schema or {}

    app.openapi = described  # type: ignore[method-assign]


def _describe_errors(operation: dict[str, Any]) -> None:
    """Errors are JSON, whatever the media type of the good answer."""
    for status, response in operation["responses"].items():
        if int(status) >= HTTPStatus.BAD_REQUEST:
            (shape,) = response["content"].values()
            response["content"] = {"application/json": shape}


def _describe_page(operation: dict[str, Any]) -> None:
    parameters = {one["name"] for one in operation.get("parameters", ())}
    if "pageNumber" in parameters:
        operation["responses"]["200"]["headers"] = {
            "X-Pagination": {
                "description": "pageNumber, pageSize, total and orderBy as JSON",
                "schema": {"type": "string"},
            }
        }
