"""A planned operation gets the arguments that the framework would give, or leaves them to the framework."""

from typing import Any
from urllib.parse import urlencode

from fastapi.dependencies.utils import request_params_to_args
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from rackloom.carve.api.app import ROUTES
from rackloom.carve.api.operation import OperationRoute, Plan

PLANNED = [
    (route, route.plan) for route in ROUTES if isinstance(route, OperationRoute) and route.plan is not None
]
NAMES = sorted({name for _, plan in PLANNED for model in plan.query for name, _ in model.names})
VALUES = ["", "0", "1", "7", "true", "off", "Ready", "CREATED_DESC", "10.0.0.1", "a\x00", "ü", "x" * 300]
IDS = ["11111111-1111-4111-8111-111111111111", "nowhere", "", "1"]


def _request(route: OperationRoute, object_id: str, query: list[tuple[str, str]]) -> Request:
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    return Request(
        {
            "type": "http",
            "path": route.path,
            "query_string": urlencode(query).encode(),
            "headers": [],
            "path_params": {name: "demo" if name == "org" else object_id for name in names},
        }
    )


def _by_framework(plan: Plan, route: OperationRoute, request: Request) -> dict[str, Any] | None:
    dependants = (route.dependant, *route.dependant.dependencies)
    (dependant,) = [dependant for dependant in dependants if dependant.call is plan.call]
    path, path_errors = request_params_to_args(dependant.path_params, request.path_params)
    query, query_errors = request_params_to_args(dependant.query_params, request.query_params)
    if path_errors or query_errors:
        return None
    if dependant.request_param_name is not None:
        path[dependant.request_param_name] = request
    return path | query


@given(
    st.sampled_from(PLANNED),
    st.sampled_from(IDS),
    st.lists(st.tuples(st.sampled_from([*NAMES, "unknown"]), st.sampled_from(VALUES + IDS)), max_size=4),
)
def test_the_values_are_those_of_the_framework(
    planned: tuple[OperationRoute, Plan], object_id: str, query: list[tuple[str, str]]
) -> None:
    route, whole = planned
    for plan in (whole, *whole.dependencies):
        request = _request(route, object_id, query)
        assert plan.own_values(request) == _by_framework(plan, route, request)


def test_the_operations_that_the_framework_calls_are_known() -> None:
    reads = {route.operation_id for route in ROUTES if "GET" in (route.methods or ())}
    by_framework = reads - {route.operation_id for route, _ in PLANNED}
    assert by_framework == {
        "get-all-domain-nvlink",
        "get-all-role",
        "get-domain-nvlink",
        "get-machine-gpu-stats",
        "stream-event",
    }


def test_dependencies_run_in_their_order() -> None:
    for route, plan in PLANNED:
        names = [dependant.name for dependant in route.dependant.dependencies]
        assert [dependency.name for dependency in plan.dependencies] == names
