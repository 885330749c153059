"""The one place where refusals become status codes."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rackloom.carve.api import respond
from rackloom.carve.api.bodies import MEANING
from rackloom.carve.site.problems import Kind, Rejected
from rackloom.errors import Refused, Retry, Unknown

STATUS = {Kind.INVALID: 400, Kind.FORBIDDEN: 403, Kind.NOT_FOUND: 404, Kind.CONFLICT: 409}


def install(app: FastAPI) -> None:
    """Make `app` answer every error in the error body of this API."""
    app.exception_handler(RequestValidationError)(_bad_request)
    app.exception_handler(HTTPException)(_http)
    app.exception_handler(Refused)(_refused)
    app.exception_handler(Retry)(_retry)
    app.exception_handler(Unknown)(_unknown)
    app.exception_handler(Exception)(_defect)


def rejected(error: Refused) -> Response:
    """The answer to a refusal; the nearest fix goes into `data`."""
    kind = error.kind if isinstance(error, Rejected) else Kind.CONFLICT
    data: Mapping[str, str] = (error.data if isinstance(error, Rejected) else None) or {}
    if error.nearest_fix is not None:
        data = {**data, "nearestFix": error.nearest_fix}
    return respond.problem(STATUS[kind], error.reason, data or None)


async def _refused(_request: Request, error: Refused) -> Response:
    return rejected(error)


async def _bad_request(_request: Request, error: RequestValidationError) -> Response:
    problems = error.errors()
    if any(one["type"] == "json_invalid" for one in problems):
        return respond.problem(400, "Failed to parse request data, potentially invalid structure")
    fields = {_field(one): _said(one) for one in problems}
    return respond.problem(400, "Error validating request data", fields)


def _field(problem: Mapping[str, Any]) -> str:
    """`nvLinkInterfaces.0.deviceInstance`; the whole body is `body`. A repeated parameter is one field."""
    if problem["loc"][0] == "query":
        return str(problem["loc"][1])
    return ".".join(str(part) for part in problem["loc"][1:]) or str(problem["loc"][0])


def _said(problem: Mapping[str, Any]) -> str:
    """A pattern says little to a person; what it means says more."""
    meaning = MEANING.get(problem.get("ctx", {}).get("pattern", ""))
    return meaning or str(problem["msg"])


async def _http(_request: Request, error: HTTPException) -> Response:
    message = "The requested path was not found" if error.status_code == 404 else str(error.detail)
    return respond.problem(error.status_code, message, headers=error.headers)


async def _retry(_request: Request, error: Retry) -> Response:
    return respond.problem(503, error.reason, headers={"Retry-After": str(max(1, round(error.after)))})


async def _unknown(_request: Request, error: Unknown) -> Response:
    return respond.problem(503, error.reason)


async def _defect(_request: Request, _error: Exception) -> Response:
    return respond.problem(500, "Internal error: nothing was changed")
