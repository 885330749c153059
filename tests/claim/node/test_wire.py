"""Names and numbers on the wire, written down a second time: kubelet speaks these."""

import subprocess
import sys
from pathlib import Path

import pytest

from rackloom.claim.node.wire import (
    dra_v1_pb2,
    dra_v1beta1_pb2,
    health_v1alpha1_pb2,
    registration_pb2,
)

DRA = {
    "Claim": "namespace=1 uid=2 name=3",
    "NodePrepareResourcesRequest": "claims=1",
    "NodePrepareResourcesResponse": "claims=1",
    "NodePrepareResourceResponse": "devices=1 error=2",
    "NodeUnprepareResourcesRequest": "claims=1",
    "NodeUnprepareResourcesResponse": "claims=1",
    "NodeUnprepareResourceResponse": "error=1",
}
DEVICE = "request_names=1 pool_name=2 device_name=3 cdi_device_ids=4"
FIELDS = {
    registration_pb2: {
        "PluginInfo": "type=1 name=2 endpoint=3 supported_versions=4",
        "RegistrationStatus": "plugin_registered=1 error=2",
        "InfoRequest": "",
        "RegistrationStatusResponse": "",
    },
    dra_v1_pb2: {**DRA, "Device": f"{DEVICE} share_id=5"},
    dra_v1beta1_pb2: {**DRA, "Device": DEVICE},
    health_v1alpha1_pb2: {
        "NodeWatchResourcesRequest": "",
        "NodeWatchResourcesResponse": "devices=1",
        "DeviceIdentifier": "pool_name=1 device_name=2",
        "DeviceHealth": ("device=1 health=2 last_updated_time=3 health_check_timeout_seconds=4 message=5"),
    },
}
SERVICES = {
    registration_pb2: "pluginregistration.Registration: GetInfo NotifyRegistrationStatus",
    dra_v1_pb2: "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin: NodePrepareResources NodeUnprepareResources",
    dra_v1beta1_pb2: (
        "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin: NodePrepareResources NodeUnprepareResources"
    ),
    health_v1alpha1_pb2: "v1alpha1.DRAResourceHealth: NodeWatchResources",
}


@pytest.mark.parametrize("wire", FIELDS, ids=lambda wire: wire.__name__.rpartition(".")[2])
def test_messages(wire):
    found = {
        name: " ".join(f"{field.name}={field.number}" for field in message.fields)
        for name, message in wire.DESCRIPTOR.message_types_by_name.items()
    }
    assert found == FIELDS[wire]


@pytest.mark.parametrize("wire", SERVICES, ids=lambda wire: wire.__name__.rpartition(".")[2])
def test_services(wire):
    (service,) = wire.DESCRIPTOR.services_by_name.values()
    assert f"{service.full_name}: {' '.join(method.name for method in service.methods)}" == SERVICES[wire]


def test_health_numbers():
    assert dict(health_v1alpha1_pb2.HealthStatus.items()) == {"UNKNOWN": 0, "HEALTHY": 1, "UNHEALTHY": 2}


def test_replies_are_keyed_by_claim():
    for wire in (dra_v1_pb2, dra_v1beta1_pb2):
        for name in ("NodePrepareResourcesResponse", "NodeUnprepareResourcesResponse"):
            (entry,) = wire.DESCRIPTOR.message_types_by_name[name].nested_types
            assert entry.GetOptions().map_entry


def test_the_generated_code_is_that_of_the_proto(tmp_path):
    source = Path(__file__).parents[3] / "src"
    folder = source / "rackloom" / "claim" / "node" / "wire"
    protos = sorted(str(file) for file in folder.glob("*.proto"))
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={source}"),
            *(f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", *protos),
        ],
        check=True,
    )
    made = sorted((tmp_path / "rackloom" / "claim" / "node" / "wire").glob("*.py"))
    assert len(made) == 8
    for file in made:
        assert file.read_bytes() == (folder / file.name).read_bytes(), file.name
