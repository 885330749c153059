"""ComputeDomains and their daemon pods as values, hostile ones too."""

import msgspec
import pytest

from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import (
    LONGEST_ERROR,
    ComputeDomainNode,
    ComputeDomainStatus,
    Readiness,
    compute_domain_status_json,
    read_compute_domain,
    read_compute_domain_status,
    read_daemon_pod,
)
from rackloom.core.cluster.names import AllocationMode
from rackloom.core.cluster.objects import Condition
from rackloom.errors import Refused

OBJECT = {
    "apiVersion": "resource.nvidia.com/v1beta1",
    "kind": "ComputeDomain",
    "metadata": {"namespace": "team", "name": "job", "uid": "b1f9", "generation": 1},
    "spec": {"channel": {"resourceClaimTemplate": {"name": "imex-channel-0"}}},
}


def test_the_seed_manifest_without_num_nodes_or_mode():
    domain = read_compute_domain(OBJECT)
    assert (domain.key, domain.uid, domain.template) == ("team/job", "b1f9", "imex-channel-0")
    assert (domain.allocation_mode, domain.num_nodes) == (AllocationMode.SINGLE, 0)
    assert not domain.deleting


def test_a_missing_spec_is_refused_by_name():
    with pytest.raises(Refused, match="team/job: spec"):
        read_compute_domain({key: value for key, value in OBJECT.items() if key != "spec"})


def test_the_status_is_written_with_the_names_of_the_api():
    node = ComputeDomainNode(
        name="n", ip_address="10.0.0.1", clique_id="a.1", index=3, status=Readiness.READY
    )
    condition = Condition(type="Ready", status="True", reason="AllNodesReady")
    status = ComputeDomainStatus(status=Readiness.READY, nodes=(node,), conditions=(condition,))
    written = compute_domain_status_json(status)
    assert written["nodes"] == [
        {"name": "n", "ipAddress": "10.0.0.1", "cliqueID": "a.1", "index": 3, "status": "Ready"}
    ]
    assert read_compute_domain_status({"status": written}) == status


def test_a_status_that_cannot_be_read_is_none():
    assert read_compute_domain_status({"status": {"status": "Perhaps"}}) == ComputeDomainStatus()
    assert read_compute_domain_status({}).status is Readiness.NOT_READY


@pytest.mark.parametrize("text", ["", "{", "\ud800", "[" * 100_000, '{"complete": "yes"}', "7"])
def test_a_mesh_that_cannot_be_read_has_not_been_said(text: str) -> None:
    pod = read_daemon_pod(
        {
            "metadata": {"name": "daemon", "uid": "1", "annotations": {names.MESH_ANNOTATION: text}},
            "spec": {"nodeName": "tray"},
        }
    )
    assert pod is not None
    assert pod.mesh is None


def test_an_error_of_a_daemon_is_one_short_printable_line() -> None:
    text = "exit status 255: \x1b[31mred\u202e\n" + "x" * 100_000
    mesh = msgspec.json.encode({"complete": False, "missing": [text]}).decode()
    annotations = {names.IMEX_ERROR_ANNOTATION: text, names.MESH_ANNOTATION: mesh}
    pod = read_daemon_pod(
        {
            "metadata": {"name": "daemon", "uid": "1", "annotations": annotations},
            "spec": {"nodeName": "tray"},
        }
    )
    assert pod is not None
    assert pod.mesh is not None
    for line in (pod.imex_error, *pod.mesh.missing):
        assert line.startswith("exit status 255: [31mred xxx")
        assert line.isprintable()
        assert len(line) == LONGEST_ERROR
