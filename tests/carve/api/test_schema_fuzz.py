"""The whole API against its own description: nothing breaks, and every answer is as described."""

import itertools
from typing import Any
from urllib.parse import quote

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from rackloom.carve.api.auth import Role

EXAMPLES = 4
STREAM = "stream-event"
"""It has no end, so test_event_stream.py reads it."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def ids(api: Any) -> dict[str, Any]:
    """Something real for every name in a path or body."""
    api.site.observe_all()
    partition = api.partition()
    vpc = api.vpc(partition=partition)
    instance = api.instance(vpc)
    api.site.converge()
    allocation = api.get("allocation").json()[0]
    return {
        "instanceId": instance["id"],
        "machineId": instance["machineId"],
        "machineAssociationId": instance["machineId"],
        "instanceTypeId": api.site.type_id,
        "siteId": api.site.site_id,
        "vpcId": vpc,
        "nvLinkLogicalPartitionId": partition,
        "nvLinkDomainId": next(iter(api.site.partitions)),
        "chassisSerial": "CHASSIS0",
        "allocationId": allocation["id"],
        "allocationConstraintId": allocation["allocationConstraints"][0]["id"],
        "tenantId": api.site.tenant.id,
    }


@pytest.mark.slow
def test_every_operation_answers_as_described(api: Any, ids: dict[str, Any]) -> None:
    schema = schemathesis.openapi.from_dict(api.client.app.openapi())
    schema.config.generation.update(modes=list(schemathesis.GenerationMode))
    # Deletions last: until then the other operations have something to act on.
    operations = sorted((found.ok() for found in schema.get_all_operations()), key=_destructive)
    turn = itertools.count()
    for operation in operations:
        if operation.definition.raw["operationId"] == STREAM:
            continue

        @SETTINGS
        @given(case=operation.as_strategy())
        def answer(case: Any) -> None:
            call(api, case, ids if next(turn) % 2 else {})

        answer()


def _destructive(operation: Any) -> bool:
    return operation.method == "delete" or operation.path.endswith("/force-delete")


def call(api: Any, case: Any, real: dict[str, Any]) -> None:
    parts = {**case.path_parameters, "org": "demo"}
    parts = {name: real.get(name, value) for name, value in parts.items()}
    path = case.path.format(**{name: quote(str(value), safe="") for name, value in parts.items()})
    body = case.body
    if isinstance(body, dict):
        body = {name: real.get(name, value) for name, value in body.items()}
    token = api.issuer.mint("demo", list(Role), api.site.now, 3600)
    options = {} if case.body is schemathesis.core.NOT_SET else {"json": body}
    answer = api.client.request(
        case.method, path, params=case.query, headers={"Authorization": f"Bearer {token}"}, **options
    )
    case.validate_response(answer, checks=CHECKS)
