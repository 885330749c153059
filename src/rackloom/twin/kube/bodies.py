"""What the body of a request says, in whichever format it is written."""

from typing import Any

import msgspec

from rackloom.claim.kube.api import KubeError
from rackloom.twin.kube import answers, protobuf

LARGEST = 3 << 20
"""Bytes of a body that an API server reads (k8s.io/apiserver, MaxRequestBodyBytes)."""
_FEW = 200
"""Levels that are read anywhere."""
_SPARE = 700
"""Of Python's 1000 calls, those that whoever walks through a body has left."""


def read_body(content: bytes, content_type: str) -> Any:
    """The value; None where there is none. Raises `KubeError` (413, 415) and `Rejected` (400)."""
    if len(content) > LARGEST:
        raise too_large()
    if not content:
        return None
    if content_type.startswith(protobuf.CONTENT_TYPE):
        return _from_protobuf(content)
    try:
        return _decoded(content, 0 if content.count(b"[") + content.count(b"{") <= _FEW else _SPARE)
    except RecursionError:
        raise answers.bad_request("the body of the request is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise answers.bad_request(f"the body of the request is not JSON: {error}") from error


def _decoded(content: bytes, spare: int) -> Any:
    # msgspec counts its levels on top of Python's calls, so that calls are what bounds them.
    return _decoded(content, spare - 1) if spare else msgspec.json.decode(content)


def too_large() -> KubeError:
    """A body above the limit."""
    return answers.too_large(f"Request entity too large: limit is {LARGEST}")


def _from_protobuf(content: bytes) -> Any:
    try:
        return protobuf.read(content)
    except protobuf.Unreadable as error:
        way = "of this one the API server reads JSON (kubectl create -f, kubectl apply)"
        raise unknown_format(f"{protobuf.CONTENT_TYPE}, {error}: {way}") from error


def unknown_format(what: str) -> KubeError:
    """A body, or a patch, that is not understood."""
    return KubeError(415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {what}")
