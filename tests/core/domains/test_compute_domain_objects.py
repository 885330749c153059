"""ComputeDomains as values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.cluster.metadata import Condition
from rackloom.core.domains.clique import Readiness, clean_line, is_ip_address
from rackloom.core.domains.compute_domain import (
    AllocationMode,
    ComputeDomainNode,
    ComputeDomainStatus,
    compute_domain_status_json,
    read_compute_domain,
    read_compute_domain_status,
)
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


@pytest.mark.parametrize("text", ["10.0.0.1", "255.255.255.255", "fd00::7", "::", "::1"])
def test_an_ip_address(text):
    assert is_ip_address(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "10.0.0", "10.0.0.01", "10.0.0.256", "10.0.0.1/24", "pod.example.com", "1" * 1000),
        *("10.0.0.1\n", " 10.0.0.1", "10.0.0.1\x00", "\u0661.0.0.1"),
        *("fe80::1%eth0", "fe80::1%a\n10.0.0.66 b", "::ffff:10.0.0.1"),
    ],
)
def test_no_ip_address(text):
    assert not is_ip_address(text)


@given(st.text(), st.integers(4, 40))
def test_a_clean_line_can_be_shown_and_is_not_too_long(text, most):
    line = clean_line(text, most)
    assert line.isprintable()
    assert len(line) <= most
    assert clean_line(line, most) == line
