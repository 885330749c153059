"""An object from protobuf, as JSON has it."""

from collections.abc import Mapping

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError, Message

from rackloom.claim.kube.api import Object
from rackloom.twin.kube.protobuf import bodies_pb2 as wire

CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"
_MESSAGES: Mapping[str, type[Message]] = {
    "ConfigMap": wire.ConfigMap,
    "DeleteOptions": wire.DeleteOptions,
    "Eviction": wire.Eviction,
    "Namespace": wire.Namespace,
    "Secret": wire.Secret,
    "ServiceAccount": wire.ServiceAccount,
}


class Unreadable(Exception):
    """It is no object in protobuf, or one of a kind that is not read; the text says which."""


def read(body: bytes) -> Object:
    """The object. Raises `Unreadable`."""
    try:
        return _read(body)
    except DecodeError as error:
        raise Unreadable(str(error)) from error


def _read(body: bytes) -> Object:
    if not body.startswith(_MAGIC):
        raise Unreadable("it does not begin as Kubernetes' protobuf does")
    envelope = wire.Unknown.FromString(body.removeprefix(_MAGIC))
    kind = envelope.typeMeta.kind
    if kind not in _MESSAGES:
        raise Unreadable(f"kind {kind!r}")
    message = _MESSAGES[kind].FromString(envelope.raw)
    told = MessageToDict(message, preserving_proto_field_name=True)
    return {"apiVersion": envelope.typeMeta.apiVersion, "kind": kind, **told}
