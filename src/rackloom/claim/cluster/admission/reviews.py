"""AdmissionReview (admission.k8s.io/v1): the question of the API server, and the answer."""

import base64
from typing import Any, Literal

import msgspec

from rackloom.errors import Refused

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
PatchOp = dict[str, Any]
"""One operation of a JSON patch (RFC 6902)."""
Acted = tuple[str, Literal["changed", "warned", "denied"]]
"""A rule, and what it did."""


class Resource(msgspec.Struct, frozen=True):
    """Which type is asked about."""

    group: str = ""
    version: str = ""
    resource: str = ""


class Request(msgspec.Struct, frozen=True, rename="camel"):
    """What is asked."""

    uid: str
    operation: Literal["CREATE", "UPDATE", "DELETE", "CONNECT"]
    resource: Resource = Resource()
    namespace: str = ""
    object: Any = None
    old_object: Any = None


class _Review(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str
    kind: str
    request: Request


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is answered. A denial has a `message`; an object that is let in may have been changed."""

    allowed: bool = True
    message: str = ""
    code: int = 422
    """HTTP status of a denial, for whoever sent the object."""
    warnings: tuple[str, ...] = ()
    patch: tuple[PatchOp, ...] = ()
    rules: tuple[Acted, ...] = ()
    """What decided it, for counting."""

    def and_then(self, later: "Verdict") -> "Verdict":
        """Both at once: `later` is about the object as this one leaves it. Both let it in."""
        return Verdict(
            warnings=self.warnings + later.warnings,
            patch=self.patch + later.patch,
            rules=self.rules + later.rules,
        )


def read_review(body: bytes | bytearray) -> Request:
    """Read a question. Raises Refused for anything else."""
    try:
        review = msgspec.json.decode(body, type=_Review)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"the body is no {KIND}: {error}") from error
    if (review.api_version, review.kind) != (API_VERSION, KIND):
        raise Refused(
            f"the body is a {review.api_version} {review.kind}", nearest_fix=f"send {API_VERSION} {KIND}"
        )
    return review.request


def answer(uid: str, verdict: Verdict) -> bytes:
    """The answer to the question `uid`."""
    response: dict[str, Any] = {"uid": uid, "allowed": verdict.allowed}
    if not verdict.allowed:
        response["status"] = {"code": verdict.code, "message": verdict.message}
    if verdict.warnings:
        response["warnings"] = verdict.warnings
    if verdict.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(msgspec.json.encode(verdict.patch)).decode()
    return msgspec.json.encode({"apiVersion": API_VERSION, "kind": KIND, "response": response})
