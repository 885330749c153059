"""A client generated from the served document, against the running service: each operation of it works."""

import asyncio
import importlib
import inspect
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, get_type_hints
from uuid import UUID

import pytest
import sqlalchemy as sa
import uvicorn
from openapi_python_client import Config, MetaType, generate
from openapi_python_client.config import ConfigFile
from tests.carve.api.described import STREAM, Operation, operations

from rackloom.carve.api.auth import Role
from rackloom.carve.store.schema import audit_entry

REASON = {"reason": "a test"}
FIRST = (
    "create-nvlink-logical-partition", "create-vpc", "update-vpc-virtualization", "create-instance",
    "batch-create-instance", "create-instance-type", "create-nvlink-nmxc-endpoint", "create-role",
    "create-service-account", "create-service-account-key", "create-tray-reservation",
)  # fmt: skip
"""Operations that create objects for the others, in this order."""
LAST = (
    "adopt-nvlink-partition", "release-nvlink-partition", "cordon-machine", "uncordon-machine",
    "drain-machine", "end-machine-drain", "force-delete-machine-instance", "pause-nvlink-domain",
    "resume-nvlink-domain", "delete-instance", "delete-vpc", "delete-nvlink-logical-partition",
    "delete-tray-reservation", "delete-machine", "delete-allocation",
    "delete-instance-type-machine-association", "delete-instance-type", "delete-nvlink-nmxc-endpoint",
    "delete-service-account-key", "delete-service-account", "delete-role",
)  # fmt: skip
IN_USE = {
    "release-nvlink-partition", "delete-vpc", "delete-nvlink-logical-partition", "delete-allocation",
    "delete-instance-type-machine-association", "delete-machine",
}  # fmt: skip
"""Refused here: the partition was adopted, and the other objects are in use."""
NOT_CONFIGURED = {
    "power-control-nvlink-domain", "power-control-nvlink-domains", "firmware-update-nvlink-domain",
    "firmware-update-nvlink-domains",
}  # fmt: skip
"""Refused here: no program that does this is configured."""


@pytest.fixture
def url(api: Any) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(api.client.app, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(30)
    listener.close()


@pytest.fixture
def package(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The generated package."""
    name = "generated_rackloom_client"
    wanted = Config.from_sources(
        ConfigFile(post_hooks=[]), MetaType.NONE, f"{url}/openapi.json", "utf-8", False, tmp_path / name
    )
    assert [problem.header for problem in generate(config=wanted)] == []
    monkeypatch.syspath_prepend(tmp_path)
    return name


def bodies(ids: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The request body of each operation that takes one."""
    specs = [{"nvLinkLogicalPartitionId": ids["nvLinkLogicalPartitionId"], "deviceInstance": 0}]
    placed = {"vpcId": ids["vpcId"], "instanceTypeId": ids["instanceTypeId"], "nvLinkInterfaces": specs}
    found = {"nvLinkDomainId": ids["nvLinkDomainId"], "name": "theirs", "reason": "a test"}
    kind = {"name": "kind", "siteId": ids["siteId"], "labels": {"a": "b"}}
    site = {"siteId": ids["siteId"]}
    logical = ids["nvLinkLogicalPartitionId"]
    share = {"name": "share", "siteId": ids["siteId"], "tenantId": ids["tenantId"]}
    return {
        "update-site": {"description": "a site", "contact": {"email": "ops@example.com"}},
        "create-instance-type": kind | {"machineCapabilities": [{"type": "CPU", "name": "a CPU"}]},
        "update-instance-type": {"description": "small"},
        "create-instance-type-machine-association": {"machineIds": [ids["machineId"]]},
        "update-machine": {"labels": {"row": "7"}},
        "create-nvlink-nmxc-endpoint": {"chassisSerial": "CHASSIS9", "endpoint": "https://nine.example:9370"},
        "update-nvlink-nmxc-endpoint": {"endpoint": "https://ten.example:9370"},
        "adopt-nvlink-partition": found
        | {"owner": {"tenantOrg": "acme", "vpcName": "net", "nvLinkLogicalPartitionName": "train"}},
        "release-nvlink-partition": found,
        "create-allocation": share,
        "update-allocation": {"description": "a share"},
        "update-allocation-constraint": {"constraintValue": 5},
        "create-nvlink-logical-partition": {"name": "lp", "siteId": ids["siteId"]},
        "update-nvlink-logical-partition": {"description": "a partition"},
        "create-vpc": {"name": "net", "siteId": ids["siteId"], "nvLinkLogicalPartitionId": logical},
        "update-tenant-quota": {"quotas": [{"resource": "vpcs", "limit": 100}]},
        "create-role": {"name": "watcher", "side": "TENANT", "permissions": ["vpcs:read"]},
        "update-role": {"description": "watches VPCs"},
        "create-service-account": {"name": "ci", "roles": ["watcher"], "expires": "2200-01-01T00:00:00Z"},
        "create-tray-reservation": {
            "tenantId": ids["tenantId"],
            "instanceTypeId": ids["instanceTypeId"],
            "until": "1970-01-02T00:00:00Z",
            "reason": "a test",
        },
        "update-tray-reservation": {"until": "1970-01-03T00:00:00Z", "reason": "a test"},
        "update-vpc": {"description": "a network"},
        "update-vpc-virtualization": {"networkVirtualizationType": "FNN"},
        "create-instance": placed | {"name": "vm"},
        "batch-create-instance": placed | {"namePrefix": "more", "count": 2},
        "update-instance": {"description": "an instance", "nvLinkInterfaces": specs},
        "power-control-nvlink-domain": site | {"state": "off"},
        "power-control-nvlink-domains": site | {"state": "off", "domainIds": [ids["nvLinkDomainId"]]},
        "firmware-update-nvlink-domain": site | {"version": "1.0"},
        "firmware-update-nvlink-domains": site | {"domainIds": [ids["nvLinkDomainId"]]},
    }


class Caller:
    """Calls operations of the generated package as a person with every role."""

    def __init__(self, package: str, url: str, api: Any) -> None:
        self.package = package
        token = api.issuer.mint("demo", list(Role), api.site.now, 3600)
        client = importlib.import_module(f"{package}.client")
        self.client = client.AuthenticatedClient(base_url=url, token=token, raise_on_unexpected_status=True)

    def arguments(self, operation: Operation, function: Any, ids: dict[str, str]) -> dict[str, Any]:
        """The path, the body where there is one, and the parameters of queries that have no default."""
        hints, parameters = get_type_hints(function), inspect.signature(function).parameters
        names = [
            name
            for name, parameter in parameters.items()
            if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        values = ["demo", *(ids[name] for name in operation.names)]
        given = {
            name: UUID(value) if hints[name] is UUID else value
            for name, value in zip(names, values, strict=True)
        }
        if "site_id" in parameters and parameters["site_id"].default is inspect.Parameter.empty:
            given["site_id"] = UUID(ids["siteId"])
        if "body" in hints:
            given["body"] = hints["body"].from_dict(bodies(ids).get(operation.name, REASON))
        return given

    def module(self, operation: Operation) -> Any:
        return importlib.import_module(f"{self.package}.api.default.{operation.name.replace('-', '_')}")

    def call(self, operation: Operation, ids: dict[str, str]) -> Any:
        function = self.module(operation).sync_detailed
        return function(client=self.client, **self.arguments(operation, function, ids))

    def opens_stream(self, operation: Operation) -> int:
        request = self.module(operation)._get_kwargs("demo")
        with self.client.get_httpx_client().stream(**request) as answer:
            return int(answer.status_code)


@pytest.mark.slow
def test_every_operation_of_a_generated_client_works(api: Any, url: str, package: str) -> None:
    site = api.site
    domain = next(iter(site.partitions))
    site.partitions[domain]["theirs"] = frozenset({site.guid(domain, 2, 0)})
    site.observe_all()
    ids = dict.fromkeys(("nvLinkLogicalPartitionId", "vpcId", "machineId"), str(UUID(int=0)))
    ids |= {"siteId": site.site_id, "tenantId": site.tenant.id, "instanceTypeId": site.type_id}
    api.partition("entered")
    ids |= {"auditEntryId": api.get("audit").json()[0]["id"]}
    ids |= {"nvLinkDomainId": domain, "chassisSerial": "CHASSIS9", "roleName": "watcher"}
    (given,) = api.get("allocation").json()
    ids |= {"allocationId": given["id"], "allocationConstraintId": given["allocationConstraints"][0]["id"]}
    described = {operation.name: operation for operation in operations(api.client.app.openapi())}
    between = [name for name in described if name not in (*FIRST, *LAST, STREAM)]
    caller, refused = Caller(package, url, api), {}
    with caller.client:
        assert caller.opens_stream(described[STREAM]) == HTTPStatus.OK
        for name in (*FIRST, *between, *LAST):
            renamed = {"instanceTypeId": ids["newTypeId"]} if name == "delete-instance-type" else {}
            answer = caller.call(described[name], ids | renamed)
            assert answer.parsed is not None, name
            if answer.status_code >= HTTPStatus.BAD_REQUEST:
                refused[name] = (answer.status_code, answer.parsed.message)
            else:
                remember(ids, name, answer.parsed)
    assert refused.keys() == IN_USE | NOT_CONFIGURED, refused
    changing = {name for name, operation in described.items() if operation.method != "GET"}
    entered = api.site.run(lambda conn: conn.execute(sa.select(audit_entry)).all())
    assert changing - IN_USE - NOT_CONFIGURED <= {entry.operation for entry in entered}
    assert [entry.operation for entry in entered if not (entry.object_kind and entry.object_id)] == []


def remember(ids: dict[str, str], name: str, made: Any) -> None:
    """Keep the ids of the first objects that were made."""
    if name == "create-nvlink-logical-partition":
        ids["nvLinkLogicalPartitionId"] = str(made.id)
    elif name == "create-vpc":
        ids["vpcId"] = str(made.id)
    elif name == "create-instance-type":
        ids["newTypeId"] = str(made.id)
    elif name == "create-service-account":
        ids["serviceAccountId"] = str(made.id)
    elif name == "create-service-account-key":
        ids["serviceAccountKeyId"] = str(made.id)
    elif name == "create-tray-reservation":
        ids["trayReservationId"] = str(made.id)
    elif name == "create-instance":
        ids |= {"instanceId": str(made.id), "machineId": made.machine_id}
        ids["machineAssociationId"] = made.machine_id
