"""Finds the route of a request without trying every route.

The framework tries the regular expression of one route after another: with some hundred of them that took
longer than all else that a read needs. `RouteIndex` stands before them. It knows the routes by method and by
the first word of the path below the base, which is the kind of object, and tries only these, in their order.
What it does not find is left to the routes behind it: they answer for unknown paths and for other methods.
"""

from collections import defaultdict
from collections.abc import Sequence

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send


class RouteIndex(BaseRoute):
    """Routes whose paths are `base`, a word, and whatever follows."""

    def __init__(self, base: str, routes: Sequence[APIRoute]) -> None:
        self._depth = base.count("/") + 1
        self._routes: dict[tuple[str, str], list[APIRoute]] = defaultdict(list)
        for route in routes:
            if not route.path.startswith(f"{base}/"):
                raise ValueError(f"{route.path}: build its router with `routing.operations`")
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
