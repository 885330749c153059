"""A REST operation as a route: what does not depend on the request is worked out once.

The framework asks for each request which dependencies an operation has, which parameters, how each is named
and which of them are lists. For a page of a listing that takes longer than the database. `OperationRoute`
answers these questions when the route is made. It does so for operations without a body: with a caller and
other dependencies of one level, parameters of the path, and a query model of ours.

The values are those that the framework gives. Dependencies run first, in their order, so a caller is refused
before its parameters are read. Each value is validated by the framework's own field. Where any is not valid,
the framework decides the request from the start and describes all problems; so dependencies run twice then.
Whatever `Plan` does not know of a dependency is left to the framework too, for all requests of the operation.

The framework also tries the regular expression of one route after another. With some hundred routes that took
longer than all else that a read needs. `RouteIndex` stands before them. It knows the routes by method and by
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
    """A route, with what it declares."""

    @cached_property
    def query_rules(self) -> Mapping[str, access.QueryRule]:
        """Its query parameters, each with the roles that it needs besides."""
        return access.query_rules(self.dependant)

    @cached_property
    def plan(self) -> "Plan | None":
        """How a request becomes a call; None where the framework must do that."""
        plan = Plan.of(self.dependant)
        return None if plan is None or signature(plan.call).return_annotation is not Response else plan

    def get_route_handler(self) -> Handler:
        """What answers a request."""
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
    """The names on the wire; whether all values of the name count, and not only the last one."""

    @classmethod
    def of(cls, field: ModelField) -> "_QueryModel | None":
        """None for other parameters, and for a model that refuses parameters that it does not have."""
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
        """What the request has of it."""
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
"""The fields of a dependency that a plan follows; where another one is set, the framework does more."""


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
        """None for what the framework must do itself."""
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
        # The framework runs a dependency once, however often it is named.
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
        """The arguments of the operation, after its dependencies have run; None where some are not valid."""
        found: Values = {}
        for dependency in self.dependencies:
            values = dependency.own_values(request)
            if values is None:
                return None
            found[dependency.name] = await dependency.call(**values)
        own = self.own_values(request)
        return None if own is None else found | own

    def own_values(self, request: Request) -> Values | None:
        """The arguments that the request has; None where some are not valid."""
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
    """Routes whose paths are `base`, a word, and whatever follows."""

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
