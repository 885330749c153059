"""CDI specs: the oldest version that a spec needs, and files that come and go whole."""

import json
import string
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.node.cdi import CdiDirectory, cdi_spec, minimum_cdi_version
from rackloom.claim.node.plugin import (
    ContainerEdits,
    ContainerHook,
    ContainerMount,
    DeviceNode,
    PreparedClaim,
    PreparedDevice,
)
from rackloom.core.cluster.claims import AllocatedDevice

ENV = ContainerEdits(env=("A=b",))
paths = st.text(string.ascii_letters + string.digits + "-._/", min_size=1, max_size=30).map("/{}".format)
device_nodes = st.builds(
    DeviceNode,
    path=paths,
    major=st.integers(1, 4095),
    minor=st.integers(0, 1 << 20),
    file_mode=st.integers(0, 0o777),
    permissions=st.sampled_from(["rwm", "rw", "r"]),
)
mounts = st.builds(
    ContainerMount,
    host_path=paths,
    container_path=paths,
    options=st.lists(st.sampled_from(["ro", "rbind"])).map(tuple),
)
hooks = st.builds(
    ContainerHook,
    hook_name=st.sampled_from(["createContainer", "createRuntime"]),
    path=paths,
    args=st.just(("a", "b")),
)
anything = st.builds(
    ContainerEdits,
    env=st.lists(st.from_regex(r"\A[A-Z]{1,9}=[a-z]{0,9}\Z"), max_size=2).map(tuple),
    device_nodes=st.lists(device_nodes, max_size=3, unique_by=lambda node: node.path).map(tuple),
    mounts=st.lists(mounts, max_size=2).map(tuple),
    hooks=st.lists(hooks, max_size=2).map(tuple),
)
specs = st.tuples(
    st.from_regex(r"\A[a-z][a-z0-9._-]{0,20}[a-z0-9]/[a-z][a-z0-9._-]{0,10}[a-z0-9]\Z"),
    st.dictionaries(
        st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._:-]{0,20}[A-Za-z0-9]\Z"),
        anything.filter(bool),
        min_size=1,
        max_size=3,
    ),
)


def device(name, edits=ENV, shared=()):
    result = AllocatedDevice(driver="d", request="r", pool="p", device=name)
    return PreparedDevice(result=result, kind="k", edits=edits, shared_cdi_ids=shared)


@pytest.mark.parametrize(
    ("kind", "devices", "version"),
    [
        ("k8s.d/claim", {"all": ENV}, "0.3.0"),
        ("k8s.d/claim", {"0-starts-with-a-digit": ENV}, "0.5.0"),
        ("k8s.d/claim.v1", {"all": ENV}, "0.6.0"),
    ],
)
def test_a_spec_asks_for_no_more_than_it_uses(kind, devices, version):
    assert minimum_cdi_version(kind, devices) == version


def test_a_claim_has_one_file_with_a_device_each(tmp_path):
    cdi = CdiDirectory(tmp_path / "cdi", "d.example.com")
    mount = ContainerMount(host_path="/h", container_path="/c", options=("rw",))
    first, second = (
        device("dev-0"),
        device("dev-1", ContainerEdits(mounts=(mount,)), shared=("k8s.other/x=all",)),
    )
    cdi.write("u1", PreparedClaim(devices=(first, second, device("dev-2", ContainerEdits()))))
    (file,) = (tmp_path / "cdi").iterdir()
    assert file.name == "k8s.d.example.com-claim_u1.yaml"
    assert json.loads(file.read_bytes()) == {
        "cdiVersion": "0.3.0",
        "kind": "k8s.d.example.com/claim",
        "devices": [
            {"name": "u1-dev-0", "containerEdits": {"env": ["A=b"]}},
            {
                "name": "u1-dev-1",
                "containerEdits": {"mounts": [{"hostPath": "/h", "containerPath": "/c", "options": ["rw"]}]},
            },
        ],
    }
    ids = cdi.ids("u1", second)
    assert ids == ("k8s.other/x=all", "k8s.d.example.com/claim=u1-dev-1")
    assert cdi.ids("u1", device("dev-2", ContainerEdits())) == ()
    assert cdi.claims() == {"u1"}
    assert cdi.has_all("u1", ids)
    cdi.remove("u1")
    cdi.remove("u1")
    assert not cdi.has_all("u1", ids)
    assert cdi.has_all("u1", ("k8s.other/x=all",))


def test_a_claim_without_edits_loses_the_file_that_it_had(tmp_path):
    cdi = CdiDirectory(tmp_path, "d.example.com")
    cdi.write("u1", PreparedClaim(devices=(device("dev-0"),)))
    cdi.write("u1", PreparedClaim(devices=(device("dev-0", ContainerEdits()),)))
    assert list(tmp_path.iterdir()) == []


def test_a_shared_spec_is_no_claim(tmp_path):
    cdi = CdiDirectory(tmp_path, "d.example.com")
    assert cdi.write_shared("device_base", "device", "all", ENV) == ("k8s.d.example.com/device=all",)
    assert cdi.claims() == frozenset()


@given(edits=anything)
def test_device_nodes_are_written_in_full(edits):
    (device,) = json.loads(cdi_spec("v/c", {"d": edits}))["devices"]
    written = device["containerEdits"].get("deviceNodes", [])
    assert written == [
        {
            "path": node.path,
            "type": "c",
            "major": node.major,
            "minor": node.minor,
            "fileMode": node.file_mode,
            "permissions": node.permissions,
        }
        for node in edits.device_nodes
    ]


@pytest.mark.slow
@given(drawn=st.lists(specs, min_size=1, max_size=5))
def test_containerd_reads_what_is_written_as_it_was_meant(read_specs, drawn):
    """The version is the oldest that the library allows, and no device is looked for on the host."""
    with tempfile.TemporaryDirectory() as directory:
        for number, (kind, devices) in enumerate(drawn):
            # Vendors differ, so that no device has two specs.
            (Path(directory) / f"{number}.yaml").write_bytes(cdi_spec(f"v{number}.{kind}", devices))
        containers = [
            (f"v{number}.{kind}={name}", edits)
            for number, (kind, devices) in enumerate(drawn)
            for name, edits in devices.items()
        ]
        reading = read_specs(Path(directory), *([cdi_id] for cdi_id, _ in containers))
    assert reading.errors == {}
    assert reading.minimum == {
        f"{number}.yaml": minimum_cdi_version(f"v{number}.{kind}", devices)
        for number, (kind, devices) in enumerate(drawn)
    }
    for (_, edits), container in zip(containers, reading.containers, strict=True):
        assert container.refused == ""
        assert {_numbers(device) for device in container.devices} == {
            (node.path, "c", node.major, node.minor, node.file_mode) for node in edits.device_nodes
        }
        # One rule for each number. If two nodes have the same, the later one counts.
        assert container.allowed == {
            (major, minor, permissions)
            for (major, minor), permissions in {
                (node.major, node.minor): node.permissions for node in edits.device_nodes
            }.items()
        }


@pytest.mark.slow
def test_the_library_looks_at_the_host_where_a_type_is_missing(read_specs, tmp_path):
    """The library is the real one: it does what broke the channels of specs without types."""
    node = {"path": "/dev/not-on-this-host", "major": 235, "minor": 0}
    device = {"name": "d", "containerEdits": {"deviceNodes": [node]}}
    content = {"cdiVersion": "0.3.0", "kind": "v.x/class", "devices": [device]}
    (tmp_path / "v.yaml").write_text(json.dumps(content))
    (container,) = read_specs(tmp_path, ["v.x/class=d"]).containers
    assert 'failed to stat CDI host device "/dev/not-on-this-host"' in container.refused


def _numbers(device):
    return (device["path"], device["type"], device["major"], device["minor"], device["fileMode"])
