"""CDI specs: the oldest version that a spec needs, and files that come and go whole."""

import json

import pytest

from rackloom.claim.node.cdi import CdiDirectory, minimum_version
from rackloom.claim.node.values import DeviceNode, Edits, Mount, Prepared, PreparedDevice, Result

ENV = Edits(env=("A=b",))


def device(name, edits=ENV, shared=()):
    result = Result(request="r", pool="p", device=name)
    return PreparedDevice(result=result, kind="k", edits=edits, shared_cdi_ids=shared)


@pytest.mark.parametrize(
    ("kind", "devices", "version"),
    [
        ("k8s.d/claim", {"all": ENV}, "0.3.0"),
        ("k8s.d/claim", {"0-starts-with-a-digit": ENV}, "0.5.0"),
        (
            "k8s.d/claim",
            {"a": Edits(device_nodes=(DeviceNode(path="/dev/a", host_path="/x", major=1, minor=2),))},
            "0.5.0",
        ),
        ("k8s.d/claim.v1", {"all": ENV}, "0.6.0"),
    ],
)
def test_a_spec_asks_for_no_more_than_it_uses(kind, devices, version):
    assert minimum_version(kind, devices) == version


def test_a_claim_has_one_file_with_a_device_each(tmp_path):
    cdi = CdiDirectory(tmp_path / "cdi", "d.example.com")
    mount = Mount(host_path="/h", container_path="/c", options=("rw",))
    first, second = device("dev-0"), device("dev-1", Edits(mounts=(mount,)), shared=("k8s.other/x=all",))
    cdi.write("u1", Prepared(devices=(first, second, device("dev-2", Edits()))))
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
    assert cdi.ids("u1", device("dev-2", Edits())) == ()
    assert cdi.claims() == {"u1"}
    assert cdi.has_all("u1", ids)
    cdi.remove("u1")
    cdi.remove("u1")
    assert not cdi.has_all("u1", ids)
    assert cdi.has_all("u1", ("k8s.other/x=all",))


def test_a_claim_without_edits_loses_the_file_that_it_had(tmp_path):
    cdi = CdiDirectory(tmp_path, "d.example.com")
    cdi.write("u1", Prepared(devices=(device("dev-0"),)))
    cdi.write("u1", Prepared(devices=(device("dev-0", Edits()),)))
    assert list(tmp_path.iterdir()) == []


def test_a_shared_spec_is_no_claim(tmp_path):
    cdi = CdiDirectory(tmp_path, "d.example.com")
    assert cdi.write_shared("device_base", "device", "all", ENV) == ("k8s.d.example.com/device=all",)
    assert cdi.claims() == frozenset()
    assert cdi.write_shared("device_base", "device", "all", Edits()) == ()
    assert list(tmp_path.iterdir()) == []
