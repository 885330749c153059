"""Facts of single objects as the API server sends them: absent and null fields, and the parts of a claim."""

import pytest

from rackloom.core.cluster.claims import (
    ClaimConsumer,
    ClaimRef,
    allocated_devices,
    claim_consumers,
    class_selectors,
    held_devices,
    read_claim,
)
from rackloom.core.cluster.gang_objects import read_tray_node
from rackloom.core.cluster.nodes import (
    SlicePool,
    node_addresses,
    pod_networks,
    slice_content,
    slice_pool,
    taints_of,
)
from rackloom.core.cluster.objects import condition_of, conditions_of, has_same_spec
from rackloom.core.cluster.pods import ClaimTemplateObject, command_words, decode_object
from rackloom.errors import Refused

REF = ClaimRef(namespace="team", name="c", uid="claim")


def test_a_condition_whose_time_is_null_is_one_without_a_time():
    pod = {"status": {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": None}]}}
    found = condition_of(pod, "Ready")
    assert found is not None
    assert (found.status, found.last_transition_time) == ("True", "")
    assert condition_of({"status": {"conditions": None}}, "Ready") is None


def test_a_condition_of_another_shape_hides_no_other():
    ready = {"type": "Ready", "status": "True"}
    obj = {"status": {"conditions": [{"type": "Ready", "status": True}, {"status": "True"}, "no", ready]}}
    assert [condition.type for condition in conditions_of(obj)] == ["Ready"]


def test_a_taint_without_a_value_is_read_in_all_forms():
    for value in ({}, {"value": None}, {"value": ""}):
        node = {
            "metadata": {"name": "n"},
            "spec": {"taints": [{"key": "a", "effect": "NoSchedule", **value}]},
        }
        assert [taint.text for taint in taints_of(node)] == ["a:NoSchedule"]
        assert read_tray_node(node).taints == taints_of(node)


def test_null_and_newer_fields_of_an_allocated_device_hide_nothing():
    device = {"driver": "d", "pool": "p", "device": "x", "adminAccess": None, "newer": {"a": 1}}
    claim = {"status": {"allocation": {"devices": {"results": [device, device | {"adminAccess": True}]}}}}
    assert [found.device for found in allocated_devices(claim)] == ["x", "x"]
    assert [found.device for found in held_devices(claim)] == ["x"]
    assert allocated_devices({"status": None}) == ()


def test_two_states_without_a_spec_have_the_same():
    assert has_same_spec({}, {"metadata": {}})
    assert not has_same_spec({"spec": {"a": 1}}, {})


def test_the_part_of_a_claim_that_concerns_a_driver():
    device = {"request": "gpu/first", "driver": "ours", "pool": "n1", "device": "gpu-0"}
    opaque = {"opaque": {"driver": "ours", "parameters": {"a": 1}}}
    allocation = {
        "devices": {
            "results": [device, device | {"driver": "theirs"}],
            "config": [
                {"source": "FromClaim", "requests": None, **opaque},
                {"source": "FromClass", "requests": ["gpu"], **opaque},
                {"source": "FromClass", "opaque": None},
            ],
        }
    }
    obj = {"metadata": {"name": "c"}, "status": {"allocation": allocation, "reservedFor": None}}
    claim = read_claim(obj, REF, "ours")
    (result,) = claim.results
    assert (result.main_request, result.pool, result.device) == ("gpu", "n1", "gpu-0")
    assert [config.source for config in claim.configs_for(result)] == ["FromClass", "FromClaim"]
    assert (claim.consumers, claim.of_pod) == ((), None)

    # A report of a driver changes nothing, and another consumer changes the fingerprint.
    reported = obj | {"status": obj["status"] | {"devices": [{"driver": "ours"}]}}
    assert read_claim(reported, REF, "ours") == claim
    consumer = {"resource": "pods", "name": "p", "uid": "pod"}
    reserved = obj | {"status": {"allocation": allocation, "reservedFor": [consumer]}}
    assert read_claim(reserved, REF, "ours").fingerprint != claim.fingerprint
    assert claim_consumers(reserved) == (ClaimConsumer(**consumer),)


@pytest.mark.parametrize(
    ("metadata", "of_pod"),
    [
        ({"ownerReferences": [{"kind": "Job", "name": "j"}, {"kind": "Pod", "name": "p"}]}, "p"),
        ({"annotations": {"resource.kubernetes.io/pod-claim-name": "gpu"}}, "unknown"),
        ({"ownerReferences": None, "annotations": None}, None),
    ],
)
def test_the_pod_for_which_a_claim_was_made(metadata, of_pod):
    obj = {"metadata": metadata, "status": {"allocation": {"devices": {}}}}
    assert read_claim(obj, REF, "ours").of_pod == of_pod


@pytest.mark.parametrize("status", [None, {}, {"allocation": None}])
def test_a_claim_that_is_not_allocated_is_refused(status):
    with pytest.raises(Refused, match="claim team/c is not allocated"):
        read_claim({"metadata": {}, "status": status}, REF, "ours")


def test_the_classes_of_a_template_are_those_of_exact_requests():
    requests = [{"exactly": {"deviceClassName": "gpu"}}, {"firstAvailable": [{"deviceClassName": "nic"}]}]
    template = {"spec": {"spec": {"devices": {"requests": requests}}}}
    assert decode_object(template, ClaimTemplateObject).spec.spec.classes == {"gpu"}


def test_the_pool_and_the_content_of_a_slice():
    pool = {"name": "n1", "generation": 2, "resourceSliceCount": 3}
    slice_ = {"spec": {"driver": "ours", "nodeName": "n1", "pool": pool, "devices": None}}
    assert slice_pool(slice_) == SlicePool("ours", "n1", 2, 3)
    assert slice_content(slice_) == {"devices": (), "sharedCounters": ()}


def test_addresses_and_pod_networks_of_a_node():
    addresses = [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": "n1"}]
    node = {"spec": {"podCIDR": "10.1.0.0/24"}, "status": {"addresses": addresses}}
    assert (node_addresses(node), pod_networks(node)) == (("10.0.0.1",), ("10.1.0.0/24",))
    assert pod_networks({"spec": {"podCIDR": "a", "podCIDRs": ["a", "b"]}}) == ("a", "b")
    assert (node_addresses({}), pod_networks({})) == ((), ())


def test_selectors_of_a_class_and_commands_of_a_workload():
    device_class = {"spec": {"selectors": [{"cel": {"expression": "device.driver == 'ours'"}}]}}
    assert list(class_selectors(device_class)) == ["device.driver == 'ours'"]
    containers = [{"command": ["run"], "args": None}, {"args": ["--all"]}]
    assert list(command_words({"spec": {"template": {"spec": {"containers": containers}}}})) == [
        "run",
        "--all",
    ]
    assert not list(command_words({"spec": {}}))
