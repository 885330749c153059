"""Names and numbers on the wire, written down a second time: runtimes and ttrpc speak these."""

import subprocess
import sys
from pathlib import Path

from rackloom.claim.node.nri import nri_pb2

FIELDS = {
    "Status": "code=1 message=2",
    "Request": "service=1 method=2 payload=3 timeout_nano=4",
    "Response": "status=1 payload=2",
    "RegisterPluginRequest": "plugin_name=1 plugin_idx=2",
    "ConfigureRequest": "config=1 runtime_name=2 runtime_version=3",
    "ConfigureResponse": "events=2",
    "Namespace": "type=1 path=2",
    "LinuxSandbox": "namespaces=5",
    "Sandbox": "id=1 name=2 uid=3 namespace=4 linux=8",
    "SynchronizeRequest": "pods=1 more=3",
    "SynchronizeResponse": "more=2",
    "SandboxRequest": "pod=1",
    "StateChangeEvent": "event=1 pod=2",
}


def test_messages():
    messages = nri_pb2.DESCRIPTOR.message_types_by_name
    found = {
        name: " ".join(f"{field.name}={field.number}" for field in message.fields)
        for name, message in messages.items()
    }
    assert found == FIELDS


def test_events():
    assert dict(nri_pb2.Event.items()) == {
        "UNKNOWN": 0,
        "RUN_POD_SANDBOX": 1,
        "STOP_POD_SANDBOX": 2,
        "REMOVE_POD_SANDBOX": 3,
    }


def test_the_generated_code_is_that_of_the_proto(tmp_path):
    source = Path(__file__).parents[4] / "src"
    folder = source / "rackloom" / "claim" / "node" / "nri"
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={source}"]
    outputs = [f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    subprocess.run([*protoc, *outputs, str(folder / "nri.proto")], check=True)
    made = sorted((tmp_path / "rackloom" / "claim" / "node" / "nri").glob("*.py"))
    assert len(made) == 2
    for file in made:
        assert file.read_bytes() == (folder / file.name).read_bytes(), file.name
