"""The protocol file: its generated code is current, its names and numbers are those of the wire."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rackloom.carve.fabric import nmxc
from rackloom.carve.fabric.controller import FabricRefused, FabricUnavailable, canonical_domain
from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.carve.fabric.nmxc.driver import read_gpus, read_partitions, require_success
from rackloom.carve.fabric.nmxc.protocol import return_code_name
from rackloom.core.partitions.domain import GpuHealth, PartitionHealth

HERE = Path(next(iter(nmxc.__path__)))
SRC = HERE.parents[3]


def test_the_checked_in_code_is_what_the_proto_generates(tmp_path: Path) -> None:
    proto = HERE / "nmx_c.proto"
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={SRC}", *outputs, str(proto)],
        check=True,
        capture_output=True,
        env={**os.environ, "PATH": tools},
    )
    generated = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(generated) == 4
    for path in generated:
        assert path.read_text() == (SRC / path.relative_to(tmp_path)).read_text(), path.name


def test_full_method_names() -> None:
    service = pb.DESCRIPTOR.services_by_name["NMX_Controller"]
    assert service.full_name == "nmx_c.NMX_Controller"
    assert {method.name for method in service.methods} == {
        "Hello",
        "Subscribe",
        "GetDomainProperties",
        "GetDomainStateInfo",
        "GetComputeNodeInfoList",
        "GetGpuInfoList",
        "GetPartitionInfoList",
        "CreatePartition",
        "DeletePartition",
        "AddGpusToPartition",
        "RemoveGpusFromPartition",
    }


def test_bytes_on_the_wire() -> None:
    """Written by hand from the published field numbers: tag is number * 8 + wire type."""
    request = pb.UpdatePartitionRequest(
        partition_id=pb.PartitionId(partition_id=7), gpu_uid=[5], gateway_id="g", name="n", reroute=True
    )
    assert request.SerializeToString() == (
        b"\x12\x02\x08\x07"  # 2: {1: 7}
        b"\x22\x01\x05"  # 4: packed [5]
        b"\x2a\x01g"  # 5
        b"\x32\x01n"  # 6
        b"\x38\x01"  # 7
    )
    made = pb.CreatePartitionRequest(name="n", gpu_resource_id=[pb.GpuResourceId(gpu_uid=5)], gateway_id="g")
    assert made.SerializeToString() == b"\x12\x01n" + b"\x1a\x02\x10\x05" + b"\x3a\x01g"
    hello = pb.ClientHello(gateway_id="g", major_version=2, minor_version=20)
    assert hello.SerializeToString() == b"\x0a\x01g\x10\x02\x18\x14"


def test_fields_and_kinds_that_later_controllers_send_are_skipped() -> None:
    header = b"\x22\x00"  # 4 with the wrong wire type, and
    unknown = b"\xf2\x3f\x03abc"  # field 1022
    assert pb.ServerNotification.FromString(b"\x62\x02\x0a\x00").WhichOneof("notification") is None
    assert pb.ServerHeader.FromString(header + unknown).return_code == pb.NMX_ST_UNDEFINED


def test_a_code_that_is_not_published_is_a_refusal_by_number() -> None:
    reply = pb.DeletePartitionResponse(server_header=pb.ServerHeader.FromString(b"\x20\xf5\x03"))
    assert return_code_name(reply.server_header.return_code) == "501"
    with pytest.raises(FabricRefused, match="501"):
        require_success("DeletePartition", reply)


def test_a_domain_has_one_spelling() -> None:
    upper = "0A5DCC40-211E-48A7-ABF7-9E32D199285F"
    assert canonical_domain(upper) == "0a5dcc40-211e-48a7-abf7-9e32d199285f"


def test_gpus_without_a_guid_of_their_own_are_no_reading() -> None:
    for guids in ((0,), (5, 5)):
        with pytest.raises(FabricUnavailable, match="without a GUID of their own"):
            read_gpus([pb.GpuInfo(gpu_uid=guid) for guid in guids])


def test_a_partition_without_an_id_is_no_reading() -> None:
    with pytest.raises(FabricUnavailable, match="without an id"):
        read_partitions([pb.PartitionInfo(name="x")], [])


def test_two_partitions_with_one_id_are_no_reading() -> None:
    partition_info = pb.PartitionInfo(partition_id=pb.PartitionId(partition_id=1))
    with pytest.raises(FabricUnavailable, match="two partitions"):
        read_partitions([partition_info, partition_info], [])


def test_health_values_of_later_controllers_are_unknown() -> None:
    (gpu,) = read_gpus([pb.GpuInfo.FromString(b"\x18\x05\x20\x63")])
    assert (gpu.guid, gpu.health) == (5, GpuHealth.UNKNOWN)
    info = pb.PartitionInfo.FromString(b"\x0a\x02\x08\x01\x30\x63")
    (partition,) = read_partitions([info], [])
    assert (partition.id, partition.health) == (1, PartitionHealth.UNKNOWN)
