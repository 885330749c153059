"""The index of routes finds the same route as trying all of them in their order."""

import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Match

from rackloom.carve.api import access
from rackloom.carve.api.app import ROUTES
from rackloom.carve.api.operation import RouteIndex

INDEX = RouteIndex(access.BASE, ROUTES)
WORDS = sorted({word for route in ROUTES for word in route.path.split("/")[1:]})
PATHS = st.builds(
    lambda route, more: "/".join((route.path.replace("{org}", "demo"), *more)),
    st.sampled_from(ROUTES),
    st.lists(st.sampled_from([*WORDS, ""]), max_size=2),
)
METHODS = st.sampled_from(["GET", "POST", "PATCH", "PUT", "DELETE", "HEAD"])


@given(METHODS, PATHS | st.lists(st.sampled_from([*WORDS, ""])).map("/".join))
def test_it_finds_the_first_route_that_matches(method: str, path: str) -> None:
    scope = {"type": "http", "method": method, "path": path}
    tried = ((route, route.matches(dict(scope))[0]) for route in ROUTES)
    first = next((route for route, match in tried if match is Match.FULL), None)
    match, found = INDEX.matches(scope)
    assert (match is Match.FULL) == (first is not None)
    assert found.get("route") is first


@pytest.mark.parametrize("path", ["/elsewhere", f"{access.BASE}/{{id}}"])
def test_a_route_that_it_cannot_find_is_refused_at_the_start(path: str) -> None:
    router = APIRouter()
    router.add_api_route(path, lambda: None)
    (route,) = router.routes
    assert isinstance(route, APIRoute)
    with pytest.raises(ValueError, match=r"build its router with|no word follows"):
        RouteIndex(access.BASE, [route])
