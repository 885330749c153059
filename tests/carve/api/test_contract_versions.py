"""Both versions of the contract are served: every renamed name, and the reported operations."""

from importlib.metadata import version
from typing import Any

import pytest
from tests.carve.api.described import operations, plain_values

from rackloom.carve.api.auth import Role
from rackloom.carve.api.renames import CONTRACTS, RENAMES, UNSERVED, Rename

ADMIN, VIEWER = Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER
UNKNOWN = "11111111-1111-4111-8111-111111111111"

IN_BODIES = [rename for rename in RENAMES if rename.requests]
IN_QUERIES = [rename for rename in RENAMES if rename.queries]
IN_ANSWERS = [rename for rename in RENAMES if rename.answers]


class Requests:
    """For each renamed field, a request that has it, and the part of the answer that shows it."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.vpc = api.vpc()
        self.partition = api.partition()
        self.other_partition = api.partition("other")

    def values(self, rename: Rename) -> tuple[object, object]:
        """A value of the field, and another."""
        return {
            "nvLinkLogicalPartitionId": (self.partition, self.other_partition),
            "resourceTypeId": (self.api.site.type_id, UNKNOWN),
            "flow": (True, False),
        }[rename.new]

    def send(self, rename: Rename, given: dict[str, object]) -> Any:
        """A request with an object that has the fields `given`."""
        api, site = self.api, self.api.site
        if rename.new == "nvLinkLogicalPartitionId":
            placed = {"name": "vm", "vpcId": self.vpc, "instanceTypeId": site.type_id}
            return api.post("instance", placed | {"nvLinkInterfaces": [{"deviceInstance": 0} | given]})
        if rename.new == "resourceTypeId":
            share = {"name": "share", "siteId": site.site_id, "tenantId": site.other_tenant().id}
            kept = {"resourceType": "InstanceType", "constraintType": "Reserved", "constraintValue": 1}
            return api.post("allocation", share | {"allocationConstraints": [kept | given]}, role=ADMIN)
        return api.patch(f"site/{site.site_id}", {"capabilities": given}, role=ADMIN)

    @staticmethod
    def shown(rename: Rename, answer: Any) -> Any:
        """The part of the answer that has the field."""
        return {
            "nvLinkLogicalPartitionId": lambda: answer["nvLinkInterfaces"][0],
            "resourceTypeId": lambda: answer["allocationConstraints"][0],
            "flow": lambda: answer["capabilities"],
        }[rename.new]()


@pytest.mark.parametrize("rename", IN_BODIES, ids=lambda rename: rename.old)
@pytest.mark.parametrize("names", [("old",), ("new",), ("old", "new")], ids="-".join)
def test_either_name_of_a_field_is_read_and_both_are_written(
    api: Any, rename: Rename, names: tuple[str, ...]
) -> None:
    requests = Requests(api)
    value, _ = requests.values(rename)
    answer = requests.send(rename, {getattr(rename, name): value for name in names})
    assert answer.status_code in (200, 201), answer.text
    shown = requests.shown(rename, answer.json())
    assert (shown[rename.old], shown[rename.new]) == (value, value)


@pytest.mark.parametrize("rename", IN_BODIES, ids=lambda rename: rename.old)
def test_two_names_with_different_values_are_refused(api: Any, rename: Rename) -> None:
    requests = Requests(api)
    value, other = requests.values(rename)
    answer = requests.send(rename, {rename.old: value, rename.new: other})
    assert answer.status_code == 400
    (why,) = answer.json()["data"].values()
    assert rename.old in why
    assert rename.new in why


def test_the_same_id_is_the_same_in_capital_letters(api: Any) -> None:
    requests = Requests(api)
    rename = next(rename for rename in IN_BODIES if rename.old == "ResourceTypeID")
    value, _ = requests.values(rename)
    answer = requests.send(rename, {rename.old: value.upper(), rename.new: value})
    assert answer.status_code in (200, 201), answer.text


def test_a_number_is_not_the_same_as_a_truth_value(api: Any) -> None:
    requests = Requests(api)
    rename = next(rename for rename in IN_BODIES if rename.new == "flow")
    assert requests.send(rename, {rename.old: 1, rename.new: True}).status_code == 400


@pytest.mark.parametrize("rename", IN_BODIES, ids=lambda rename: rename.old)
def test_null_is_not_given(api: Any, rename: Rename) -> None:
    requests = Requests(api)
    value, _ = requests.values(rename)
    answer = requests.send(rename, {rename.old: value, rename.new: None})
    assert answer.status_code in (200, 201), answer.text
    assert requests.shown(rename, answer.json())[rename.new] == value


QUERIES = {"isFlowEnabled": "site", "includeMachineAssignment": "instance/type"}
"""New name of a parameter -> an operation that has it."""


@pytest.mark.parametrize("rename", IN_QUERIES, ids=lambda rename: rename.old)
def test_either_name_of_a_parameter_is_read(api: Any, rename: Rename) -> None:
    path = QUERIES[rename.new]
    for value in ("true", "false"):
        by_old, by_new, by_both = (
            api.get(f"{path}?{query}", role=VIEWER)
            for query in (
                f"{rename.old}={value}",
                f"{rename.new}={value}",
                f"{rename.old}={value}&{rename.new}={value}",
            )
        )
        assert by_new.status_code == 200, by_new.text
        assert by_old.json() == by_new.json() == by_both.json()
    assert api.get(f"{path}?{rename.old}=true", role=VIEWER).json() != by_old.json()
    refused = api.get(f"{path}?{rename.old}=true&{rename.new}=false", role=VIEWER)
    assert refused.status_code == 400
    assert rename.old in next(iter(refused.json()["data"].values()))


def test_every_name_of_the_table_is_described(api: Any) -> None:
    schemas = api.client.app.openapi()["components"]["schemas"]
    for rename in IN_BODIES + IN_ANSWERS:
        for model in (*rename.requests, *rename.answers):
            fields = schemas[model]["properties"]
            assert fields[rename.old]["deprecated"] is True
            assert fields[rename.new].items() <= {**fields[rename.old], **fields[rename.new]}.items()
    parameters = {name for operation in operations(api.client.app.openapi()) for name in operation.parameters}
    assert {rename.old for rename in IN_QUERIES} | {rename.new for rename in IN_QUERIES} <= parameters


def test_the_association_of_a_machine_has_its_id_under_both_names(api: Any) -> None:
    (first, *_) = api.get(f"instance/type/{api.site.type_id}/machine", role=VIEWER).json()
    assert first["id"] == first["machineId"]


# The operations that are served.


def test_the_version_is_the_truth(api: Any) -> None:
    info = api.client.get("/openapi.json").json()["info"]
    reported = api.get("metadata").json()
    assert reported["implementation"] == f"rackloom {info['version']}" == f"rackloom {version('rackloom')}"
    assert reported["contracts"] == info["x-rackloom-contracts"] == list(CONTRACTS)
    assert reported["version"] == CONTRACTS[-1]
    assert reported["unserved"] == info["x-rackloom-unserved"] == sorted(UNSERVED)


def test_no_operation_of_an_unserved_group_exists(api: Any) -> None:
    """When this fails, remove the groups that are now served from the table."""
    served = {f"/{operation.path}" for operation in operations(api.client.app.openapi())}
    found = {
        (group, path)
        for group, beginnings in UNSERVED.items()
        for path in served
        for beginning in beginnings
        if path == beginning or path.startswith(f"{beginning}/")
    }
    assert found == set()


# The contract's documentation of the operations that are served.


DOCUMENTED = {
    "get-all-site": "infrastructureProviderId isNativeNetworkingEnabled isNetworkSecurityGroupEnabled "
    "isNVLinkPartitionEnabled isFlowEnabled tenantId status query includeRelation includeMachineStats "
    "includeGpuStats",
    "get-all-instance-type": "siteId infrastructureProviderId tenantId status query includeAllocationStats "
    "includeMachineAssignment excludeUnallocated includeRelation",
    "get-instance-type": "includeAllocationStats includeMachineAssociation includeRelation",
    "get-all-machine": "siteId id instanceTypeId tenantId hasInstance hasInstanceType isMissingOnSite status "
    "capabilityType capabilityName hwSkuDeviceType query includeMetadata includeRelation",
    "get-machine": "includeMetadata includeRelation",
    "get-machine-gpu-stats": "siteId",
    "get-all-allocation": "infrastructureProviderId siteId tenantId id resourceType resourceTypeId "
    "constraintType constraintValue status query includeRelation",
    "get-allocation": "infrastructureProviderId tenantId includeRelation",
    "get-all-nvlink-logical-partition": "siteId status query includeInterfaces includeStats includeVpcs "
    "includeRelation",
    "get-nvlink-logical-partition": "includeInterfaces includeStats includeVpcs includeRelation",
    "get-all-nvlink-interface": "siteId instanceId nvLinkLogicalPartitionId nvLinkDomainId status "
    "includeRelation",
    "get-all-instance-nvlink-interface": "status includeRelation",
    "get-all-vpc": "siteId status networkSecurityGroupId nvLinkLogicalPartitionId query includeRelation",
    "get-vpc": "includeRelation",
    "get-all-subnet": "siteId vpcId status query includeUsageStats includeRelation",
    "get-all-vpc-prefix": "siteId vpcId status query includeUsageStats includeRelation",
    "get-all-instance": "siteId infrastructureProviderId instanceTypeId machineId vpcId operatingSystemId "
    "networkSecurityGroupId name ipAddress status query includeRelation",
    "get-instance": "includeRelation",
    "get-all-interface": "status includeRelation",
    "get-all-instance-infiniband-interface": "status includeRelation",
    "get-all-domain-nvlink": "siteId includeComponents name",
    "get-domain-nvlink": "siteId includeComponents",
}
"""Operation -> its query parameters in either version, except those of pages."""
PAGED = {"pageNumber", "pageSize", "orderBy"}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_documented_parameter_is_one_of_the_operation(api: Any, name: str) -> None:
    (operation,) = (found for found in operations(api.client.app.openapi()) if found.name == name)
    wanted = set(DOCUMENTED[name].split())
    assert wanted <= operation.parameters.keys()
    if name.startswith("get-all-"):
        assert operation.parameters.keys() >= PAGED


@pytest.mark.parametrize("name", DOCUMENTED)
def test_no_documented_parameter_is_ignored(api: Any, name: str) -> None:
    """A value that cannot be meant is refused: the parameter is read."""
    (operation,) = (found for found in operations(api.client.app.openapi()) if found.name == name)
    role = ADMIN if Role.PROVIDER_ADMIN in operation.declared else Role.TENANT_ADMIN
    instance = api.instance(api.vpc(partition=(partition := api.partition())))
    ids = {
        "instanceTypeId": api.site.type_id,
        "machineId": instance["machineId"],
        "allocationId": api.get("allocation").json()[0]["id"],
        "nvLinkLogicalPartitionId": partition,
        "vpcId": instance["vpcId"],
        "instanceId": instance["id"],
        "nvLinkDomainId": UNKNOWN,
    }
    path = "/".join(ids.get(part.strip("{}"), part) for part in operation.path.split("/"))
    for parameter in DOCUMENTED[name].split():
        nonsense = "\x00" if not list(plain_values(operation.parameters[parameter])) else "nonsense"
        refused = api.get(path, params={parameter: nonsense}, role=role)
        assert refused.status_code == 400, (parameter, refused.text)


def test_both_ranges_of_virtual_functions_are_accepted(api: Any) -> None:
    """Contract 1.6.0 counts them from 1 to 16, and 2.0.0 from 0 to 15."""
    body = {"name": "vm", "vpcId": api.vpc(), "instanceTypeId": api.site.type_id}
    for index, status in ((0, 201), (16, 201), (17, 400), (-1, 400), ("1", 400)):
        interfaces = [{"isPhysical": False, "virtualFunctionId": index}]
        answer = api.post("instance", body | {"name": f"vm{index}", "interfaces": interfaces})
        assert answer.status_code == status, (index, answer.text)
