"""A REST operation as a route that works out once everything that does not depend on the request.

For each request, the framework looks up the dependencies and parameters of the operation, their names, and
which of them are lists. For a page of a listing that takes longer than the database. `OperationRoute` does
this when the route is made. It does so for operations without a body: with a caller and
other dependencies of one level, parameters of the path, and one of our query models.

The values are those that the framework gives. Dependencies run first, in their order, so a caller is refused
before its parameters are read. Each value is validated by the framework's own field. If any is not valid,
the framework decides the request from the start and describes all problems, so dependencies run twice then.
If a dependency has a feature that `Plan` does not know, the framework handles all requests of the operation.

The framework also tries the regular expression of one route after another. With some hundred routes that took
longer than everything else in a read. `RouteIndex` stands before them. It knows the routes by method and by
the first word of the path below the base, which is the kind of object, and tries only these, in their order.
It leaves the rest to the routes behind it, which answer for unknown paths and for other methods.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from inspect import iscoroutinefunction, signature
from typing import Any

import msgspec
from fastapi._compat import ModelField, field_annotation_is_sequence
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from rackloom.carve.api import access, wire

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Values = dict[str, Any]
"""The arguments of a call."""


class OperationRoute(APIRoute):
    """A route with its declarations."""

    @cached_property
    def query_rules(self) -> Mapping[str, access.QueryRule]:
        """Its query parameters, each with its own requirements."""
        return access.query_rules(self.dependant)

    @cached_property
    def plan(self) -> "Plan | None":
        """How a request becomes a call, or None if the framework must handle it."""
        plan = Plan.of(self.dependant)
        return None if plan is None or signature(plan.call).return_annotation is not Response else plan

    def get_route_handler(self) -> Handler:
        """The handler of requests."""
        by_framework, plan = super().get_route_handler(), self.plan
        if plan is None:
            return by_framework

        async def answer(request: Request) -> Response:
            values = await plan.all_values(request)
            if values is None:
                return await by_framework(request)
            response: Response = await plan.call(**values)
            return response

        return answer


class _QueryModel(msgspec.Struct, frozen=True):
    """A query model as a parameter."""

    field: ModelField
    names: Sequence[tuple[str, bool]]
    """The names on the wire, and whether all values of a name count or only the last one."""

    @classmethod
    def of(cls, field: ModelField) -> "_QueryModel | None":
        """The model, or None for other parameters and for a model that refuses unknown parameters."""
        model: Any = field.field_info.annotation
        is_ours = isinstance(model, type) and issubclass(model, wire.Query)
        if not is_ours or model.model_config.get("extra", "ignore") != "ignore":
            return None
        names = [
            (str(declared.validation_alias), field_annotation_is_sequence(declared.annotation))
            for declared in model.model_fields.values()
        ]
        return cls(field, names)

    def sent(self, request: Request) -> Values:
        """The values that the request has for this model."""
        query = request.query_params
        return {
            name: query.getlist(name) if many else query[name] for name, many in self.names if name in query
        }


_KNOWN = frozenset(
    (
        "call", "dependencies", "name", "path", "path_params", "query_params", "request_param_name", "scope",
        "use_cache",
    )
)  # fmt: skip
"""The fields of a dependency that a plan follows. If another one is set, the framework does more."""


class Plan(msgspec.Struct, frozen=True):
    """How to call an operation, or a dependency of one."""

    call: Callable[..., Awaitable[Any]]
    name: str
    """The parameter of the operation that takes the result of a dependency."""
    dependencies: Sequence["Plan"]
    request_name: str | None
    """The parameter that takes the request."""
    path: Sequence[ModelField]
    query: Sequence[_QueryModel]

    @classmethod
    def of(cls, dependant: Dependant) -> "Plan | None":
        """The plan of a dependency, or None if the framework must handle it."""
        call = dependant.call
        others = (getattr(dependant, field.name) for field in fields(Dependant) if field.name not in _KNOWN)
        if (
            call is None
            or any(others)
            or not (iscoroutinefunction(call) or iscoroutinefunction(type(call).__call__))
        ):
            return None
        below = [cls.of(dependency) for dependency in dependant.dependencies]
        dependencies = [plan for plan in below if plan is not None and plan.name and not plan.dependencies]
        query = [model for model in map(_QueryModel.of, dependant.query_params) if model is not None]
        # The framework runs a dependency once, even if it is named several times.
        different = {id(plan.call) for plan in dependencies}
        if len(different) < len(below) or len(query) < len(dependant.query_params):
            return None
        return cls(
            call,
            dependant.name or "",
            dependencies,
            dependant.request_param_name,
            dependant.path_params,
            query,
        )

    async def all_values(self, request: Request) -> Values | None:
        """The arguments of the operation, after its dependencies have run. None if some are not valid."""
        found: Values = {}
        for dependency in self.dependencies:
            values = dependency.own_values(request)
            if values is None:
                return None
            found[dependency.name] = await dependency.call(**values)
        own = self.own_values(request)
        return None if own is None else found | own

    def own_values(self, request: Request) -> Values | None:
        """The arguments that the request has. None if some are not valid."""
        found: Values = {}
        for field in self.path:
            found[field.name], errors = field.validate(request.path_params[field.alias])
            if errors:
                return None
        for model in self.query:
            found[model.field.name], errors = model.field.validate(model.sent(request))
            if errors:
                return None
        if self.request_name is not None:
            found[self.request_name] = request
        return found


# The route of a request.


class RouteIndex(BaseRoute):
    """Routes by the first word of their paths after `base`."""

    def __init__(self, base: str, routes: Sequence[APIRoute]) -> None:
        self._depth = base.count("/") + 1
        self._routes: dict[tuple[str, str], list[APIRoute]] = defaultdict(list)
        for route in routes:
            if not route.path.startswith(f"{base}/"):
                raise ValueError(f"{route.path}: build its router with `routing.Operations`")
            word = self._word(route.path)
            if "{" in word:
                raise ValueError(f"{route.path}: no word follows {base}")
            for method in route.methods or ():
                self._routes[method, word].append(route)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """The first route that matches fully, as the `route` of the request."""
        if scope["type"] == "http":
            for route in self._routes.get((scope["method"], self._word(scope["path"])), ()):
                match, found = route.matches(scope)
                if match is Match.FULL:
                    return match, found
        return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the route that was found."""
        route: APIRoute = scope["route"]
        await route.handle(scope, receive, send)

    def _word(self, path: str) -> str:
        words = path.split("/", self._depth + 1)
        return words[self._depth] if len(words) > self._depth else ""
