"""Small translations that several RPCs share: states, versions, times, and how many ids one may ask for."""

from collections.abc import Sequence
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.site.problems import conflict, invalid
from rackloom.carve.site.values import Status

MAX_FIND_BY_IDS = 100
"""Upstream's limit; its clients page by it."""

_STATES = {
    Status.PENDING: pb.PROVISIONING,
    Status.PROVISIONING: pb.PROVISIONING,
    Status.CONFIGURING: pb.CONFIGURING,
    Status.READY: pb.READY,
    Status.DELETING: pb.TERMINATING,
    Status.TERMINATING: pb.TERMINATING,
    Status.TERMINATED: pb.TERMINATED,
    Status.ERROR: pb.FAILED,
    # There is no unknown on this wire; CONFIGURING claims nothing.
    Status.UNKNOWN: pb.CONFIGURING,
}


def state(status: str) -> pb.TenantState.ValueType:
    """The state on the wire."""
    return _STATES[Status(status)]


def version(updated: float) -> str:
    """A version that changes with every update; microseconds since the epoch, in upstream's form."""
    return f"V1-T{round(updated * 1_000_000)}"


def check_version(request: Any, updated: float) -> None:
    """Refuse a change that was made from an older version than the current one."""
    if request.HasField("if_version_match") and request.if_version_match != version(updated):
        raise conflict(f"ConcurrentModification: the version is {version(updated)} now")


def timestamp(seconds: float) -> Timestamp:
    """Seconds since the epoch as the wire has them."""
    at = Timestamp()
    at.FromMicroseconds(round(seconds * 1_000_000))
    return at


def check_ids(ids: Sequence[object]) -> None:
    """Refuse an empty list of ids, and one above the limit."""
    if not 1 <= len(ids) <= MAX_FIND_BY_IDS:
        raise invalid(f"between 1 and {MAX_FIND_BY_IDS} ids are needed, not {len(ids)}")
