"""Names and numbers on the wire, written down a second time: a client of upstream speaks these."""

import subprocess
import sys
from pathlib import Path

import pytest

from rackloom.carve.admin import common_pb2, forge_pb2
from rackloom.carve.admin.server import RPCS

FIELDS = {
    "NVLinkLogicalPartition": "id=1 config=2 config_version=3 status=4 created=5",
    "NVLinkLogicalPartitionStatus": "state=1",
    "NVLinkLogicalPartitionConfig": "metadata=1 tenant_organization_id=2",
    "NVLinkLogicalPartitionCreationRequest": "config=1 id=2",
    "NVLinkLogicalPartitionUpdateRequest": "id=1 config=2 if_version_match=3",
    "NVLinkLogicalPartitionSearchFilter": "name=1",
    "NVLinkLogicalPartitionsByIdsRequest": "partition_ids=1 include_history=2",
    "NVLinkPartition": "id=1 name=2 nmx_m_id=3 domain_uuid=4 logical_partition_id=5",
    "NvlinkNmxcEndpoint": "chassis_serial=1 endpoint=2",
    "NvlinkNmxcEndpointList": "entries=1",
    "MachineNVLinkInfo": "domain_uuid=1 gpus=2 chassis_serial=3",
    "NVLinkGpu": "tray_index=2 slot_id=3 device_id=4 guid=5",
    "MachineNVLinkStatusObservation": "gpu_status=1",
    "MachineNVLinkGpuStatusObservation": (
        "gpu_id=1 partition_id=2 logical_partition_id=3 device_instance=4 domain_id=5 guid=6"
    ),
    "InstanceNVLinkConfig": "gpu_configs=1",
    "InstanceNVLinkGpuConfig": "device_instance=1 logical_partition_id=2",
    "InstanceNVLinkStatus": "gpu_statuses=1 configs_synced=101",
    "InstanceNVLinkGpuStatus": "gpu_guid=1 domain_id=2 logical_partition_id=3",
    "NmxcBrowseRequest": "chassis_serial=2 operation=3 gpu_uid=4",
    "NmxcBrowseResponse": "body=1 code=2 headers=3",
    "AdminForceDeleteMachineRequest": (
        "host_query=1 delete_interfaces=2 delete_bmc_interfaces=3 delete_bmc_credentials=4"
    ),
    "Metadata": "name=1 description=2 labels=3",
}
SOME_FIELDS = {
    ("Machine", "nvlink_info"): 43,
    ("Machine", "nvlink_status_observation"): 44,
    ("InstanceConfig", "nvlink"): 24,
    ("InstanceStatus", "nvlink"): 103,
    ("InstanceStatus", "configs_synced"): 101,
    ("Instance", "nvlink_config_version"): 206,
}
BROWSE = "NMXC_BROWSE_OPERATION_"
KINDS = {1: "double", 3: "int64", 4: "uint64", 5: "int32", 8: "bool", 9: "string", 12: "bytes", 13: "uint32"}
"""protobuf: FieldDescriptorProto.Type."""
IDS = {
    "MachineId": "id",
    "InstanceId": "value",
    "NVLinkPartitionId": "value",
    "NVLinkLogicalPartitionId": "value",
    "NVLinkDomainId": "value",
}


@pytest.mark.parametrize("message", FIELDS)
def test_fields(message):
    descriptor = forge_pb2.DESCRIPTOR.message_types_by_name[message]
    assert " ".join(f"{field.name}={field.number}" for field in descriptor.fields) == FIELDS[message]


@pytest.mark.parametrize(("message", "field"), SOME_FIELDS)
def test_fields_of_large_messages(message, field):
    descriptor = forge_pb2.DESCRIPTOR.message_types_by_name[message]
    assert descriptor.fields_by_name[field].number == SOME_FIELDS[message, field]


@pytest.mark.parametrize("message", IDS)
def test_ids(message):
    (field,) = common_pb2.DESCRIPTOR.message_types_by_name[message].fields
    assert (field.name, field.number) == (IDS[message], 1)
    assert common_pb2.DESCRIPTOR.package == "common"


def test_enums():
    assert dict(forge_pb2.SyncState.items()) == {"SYNCED": 0, "PENDING": 1}
    states = ["PROVISIONING", "READY", "CONFIGURING", "TERMINATING", "TERMINATED", "FAILED"]
    assert dict(forge_pb2.TenantState.items()) == {name: number for number, name in enumerate(states)}
    assert forge_pb2.CredentialType.Value("NmxM") == 10
    assert [forge_pb2.NmxcBrowseOperation.Name(number).removeprefix(BROWSE) for number in (1, 2, 3)] == [
        "COMPUTE_NODE_INFO_LIST",
        "GPU_INFO",
        "GPU_INFO_LIST",
    ]


def wire(module):
    """Every RPC, field and enum value of a file, one in a line: what a client of upstream relies on."""
    for service in module.DESCRIPTOR.services_by_name.values():
        for rpc in service.methods:
            yield f"rpc {rpc.name} {rpc.input_type.full_name} {rpc.output_type.full_name}"
    for message in module.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            kind = (
                (field.message_type or field.enum_type).full_name
                if field.type in (11, 14)
                else KINDS[field.type]
            )
            many = "repeated " if field.is_repeated else "optional " if field.has_presence else ""
            yield f"{message.full_name} {field.number} {field.name} {many}{kind}"
    for enum in module.DESCRIPTOR.enum_types_by_name.values():
        for value in enum.values:
            yield f"{enum.full_name} {value.number} {value.name}"


def test_the_whole_wire_is_that_of_upstream():
    """The table was compared with the descriptors of NVIDIA/infra-controller a02fa34b7 (docs/api.md)."""
    table = Path(__file__).with_name("forge_wire.txt").read_text().splitlines()
    assert sorted([*wire(forge_pb2), *wire(common_pb2)]) == table


def test_every_rpc_of_the_proto_is_served_and_takes_its_own_request():
    from rackloom.carve.admin import operator_pb2

    for module, service in ((forge_pb2, "forge.Forge"), (operator_pb2, "rackloom.admin.v1.Operator")):
        methods = module.DESCRIPTOR.services_by_name[service.rpartition(".")[2]].methods
        assert {method.name: method.input_type.full_name for method in methods} == {
            name: rpc.request.DESCRIPTOR.full_name for name, rpc in RPCS[service].items()
        }


def test_the_generated_code_is_that_of_the_proto(tmp_path):
    source = Path(__file__).parents[3] / "src"
    room = source / "rackloom" / "carve" / "admin"
    protos = sorted(str(path) for path in room.glob("*.proto"))
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={source}"),
            *(f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", *protos),
        ],
        check=True,
    )
    made = sorted((tmp_path / "rackloom" / "carve" / "admin").glob("*.py"))
    assert len(made) == 6
    for file in made:
        assert file.read_bytes() == (room / file.name).read_bytes(), file.name
