"""AdmissionReview (admission.k8s.io/v1): the request of the API server, the verdict, and the response.

A verdict allows or denies, may carry warnings and a JSON patch (RFC 6902), and names the rules that
decided, for metrics. A problem becomes a warning or a denial, depending on the mode that the operator
set.
"""

import base64
from enum import StrEnum
from typing import Any, Literal

import msgspec

from rackloom.core.cluster.objects import PatchOperation
from rackloom.errors import Refused, Undecodable
from rackloom.runtime.foreign_text import decode_json

REVIEW_API_VERSION = "admission.k8s.io/v1"
REVIEW_KIND = "AdmissionReview"


RuleOutcome = tuple[str, Literal["changed", "warned", "denied"]]
"""A rule and its effect."""


class ReviewedResource(msgspec.Struct, frozen=True):
    """The type of the reviewed object."""

    group: str = ""
    version: str = ""
    resource: str = ""


class ReviewRequest(msgspec.Struct, frozen=True, rename="camel"):
    """The request of an AdmissionReview."""

    uid: str
    operation: Literal["CREATE", "UPDATE", "DELETE", "CONNECT"]
    resource: ReviewedResource = ReviewedResource()
    namespace: str = ""
    object: Any = None
    old_object: Any = None


class _AdmissionReview(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str
    kind: str
    request: ReviewRequest


class AdmissionVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a review. A denial has a `message`. An admitted object may be patched."""

    allowed: bool = True
    message: str = ""
    code: int = 422
    """HTTP status of a denial, for the client that sent the object."""
    warnings: tuple[str, ...] = ()
    patch: tuple[PatchOperation, ...] = ()
    rules: tuple[RuleOutcome, ...] = ()
    """The rules that decided, for metrics."""

    def and_then(self, later: "AdmissionVerdict") -> "AdmissionVerdict":
        """Two admitting verdicts as one. `later` is about the object with the changes of this one."""
        return AdmissionVerdict(
            warnings=self.warnings + later.warnings,
            patch=self.patch + later.patch,
            rules=self.rules + later.rules,
        )


def read_review(body: bytes | bytearray) -> ReviewRequest:
    """Decode an AdmissionReview. Raises Refused for anything else."""
    try:
        review = decode_json(bytes(body), "the body", _AdmissionReview)
    except Undecodable as error:
        raise Refused(f"the body is no {REVIEW_KIND}: {error.reason}") from error
    if (review.api_version, review.kind) != (REVIEW_API_VERSION, REVIEW_KIND):
        raise Refused(
            f"the body is a {review.api_version} {review.kind}",
            nearest_fix=f"send {REVIEW_API_VERSION} {REVIEW_KIND}",
        )
    return review.request


def encode_response(uid: str, verdict: AdmissionVerdict) -> bytes:
    """The response to the request `uid`."""
    response: dict[str, Any] = {"uid": uid, "allowed": verdict.allowed}
    if not verdict.allowed:
        response |= {"status": {"code": verdict.code, "message": verdict.message}}
    if verdict.warnings:
        response["warnings"] = verdict.warnings
    if verdict.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(msgspec.json.encode(verdict.patch)).decode()
    return msgspec.json.encode({"apiVersion": REVIEW_API_VERSION, "kind": REVIEW_KIND, "response": response})


# Warning or denial.


class AdmissionMode(StrEnum):
    """Whether an object with a problem is stored."""

    WARN = "warn"
    ENFORCE = "enforce"


def verdict_on(problems: tuple[str, ...], mode: AdmissionMode, denial: str, rule: str) -> AdmissionVerdict:
    """A verdict by one `rule` that names all problems at once. `denial` begins the text of a refusal."""
    if not problems:
        return AdmissionVerdict()
    if mode is AdmissionMode.WARN:
        return AdmissionVerdict(warnings=problems, rules=((rule, "warned"),))
    return AdmissionVerdict(
        allowed=False, message=f"{denial}: {'; '.join(problems)}", rules=((rule, "denied"),)
    )
