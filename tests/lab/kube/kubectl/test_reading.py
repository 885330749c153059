"""Bodies in the form that kubectl 1.32 writes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.lab.kube.kubectl import bodies_pb2
from rackloom.lab.kube.kubectl.writes import UnreadableProtobuf, read_protobuf

NAMESPACE = bytes.fromhex(
    "6b38 7300 0a0f 0a02 7631 1209 4e61 6d65 7370 6163 6512 190a 110a 0178"
    "1200 1a00 2200 2a00 3200 3800 4200 1200 1a02 0a00 1a00 2200"
)
"""`kubectl create namespace x`, from its own log."""


def body(kind, message, version="v1"):
    envelope = bodies_pb2.Unknown(
        typeMeta=bodies_pb2.TypeMeta(apiVersion=version, kind=kind), raw=message.SerializeToString()
    )
    return b"k8s\x00" + envelope.SerializeToString()


def test_a_namespace_is_the_one_that_kubectl_wrote():
    found = read_protobuf(NAMESPACE)
    assert (found["apiVersion"], found["kind"], found["metadata"]) == ("v1", "Namespace", {"name": "x"})


def test_an_eviction_says_how_to_delete():
    options = bodies_pb2.DeleteOptions(gracePeriodSeconds=0, dryRun=["All"])
    eviction = bodies_pb2.Eviction(metadata=bodies_pb2.ObjectMeta(name="p"), deleteOptions=options)
    assert read_protobuf(body("Eviction", eviction, "policy/v1")) == {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "p"},
        "deleteOptions": {"gracePeriodSeconds": 0, "dryRun": ["All"]},
    }


def test_bytes_are_written_as_json_has_them():
    secret = bodies_pb2.Secret(data={"a": b"b"}, type="Opaque")
    assert read_protobuf(body("Secret", secret))["data"] == {"a": "Yg=="}


@given(st.binary(max_size=40))
def test_what_is_no_object_is_said_to_be_unreadable(noise):
    for given_body in (noise, b"k8s\x00" + noise):
        with pytest.raises(UnreadableProtobuf):
            read_protobuf(given_body)


def test_a_kind_that_is_not_read_is_named():
    with pytest.raises(UnreadableProtobuf, match="kind 'Job'"):
        read_protobuf(body("Job", bodies_pb2.Namespace()))
