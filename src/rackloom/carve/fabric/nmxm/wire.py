"""What NMX-M sends and takes, as JSON under `/nmx/v1` (API 85.1): only the fields that are used.

Entities have an `ID` of 24 hexadecimal digits that NMX-M gives them; GPUs also have the fabric GUID
(`DeviceUID`), partitions also the number by which the network knows them (`PartitionID`).
"""

from typing import Any, TypeVar

import msgspec

from rackloom.carve.fabric.ports import FabricUnavailable

T = TypeVar("T")
_CAPITALS = frozenset({"id", "uid", "uri", "uuid"})


def _spelled(name: str) -> str:
    return "".join(part.upper() if part in _CAPITALS else part.capitalize() for part in name.split("_"))


class Place(msgspec.Struct, frozen=True, kw_only=True, rename=_spelled):
    """A member of a location-based partition."""

    domain_uuid: str
    chassis_id: int
    slot_id: int
    host_id: int
    device_id: int


Member = str | Place
"""A GPU by its entity ID, or the seat where one may be; a partition has members of one kind."""


class LocationInfo(msgspec.Struct, frozen=True, kw_only=True, rename=_spelled):
    """Where something is."""

    chassis_id: int
    slot_id: int
    host_id: int
    tray_index: int
    chassis_serial_number: str = ""


class Chassis(msgspec.Struct, frozen=True, kw_only=True, rename=_spelled):
    """A chassis, and the number that locations in its domain have for it."""

    domain_uuid: str
    internal_id: int
    serial_number: str = ""


class ComputeNode(msgspec.Struct, frozen=True, kw_only=True, rename=_spelled):
    """A compute tray."""

    domain_uuid: str
    location_info: LocationInfo
    health: str = "UNKNOWN"


class Gpu(msgspec.Struct, frozen=True, kw_only=True, rename=_spelled):
    """A GPU. `device_id` is its module in the tray; `partition_id` the partition's number, 0 for none."""

    id: str
    domain_uuid: str
    location_info: LocationInfo
    device_uid: int
    device_id: int
    partition_id: int = 0
    health: str = "UNKNOWN"


class Partition(msgspec.Struct, frozen=True, kw_only=True, rename=_spelled):
    """A partition; null members are none."""

    id: str
    partition_id: int
    name: str
    type: str
    health: str
    members: tuple[Member, ...] | None


class Count(msgspec.Struct, frozen=True):
    """How many of a collection there are."""

    total: int


class Accepted(msgspec.Struct, frozen=True, rename={"operation_id": "operationId"}):
    """The answer 202 to a change: it will be done, or not."""

    operation_id: str


class OperationRequest(msgspec.Struct, frozen=True, kw_only=True, rename=_spelled):
    """What an operation was begun by."""

    method: str
    uri: str
    body: Any = None


class OperationResult(msgspec.Struct, frozen=True, kw_only=True, rename=_spelled):
    """What became of it."""

    error: str = ""
    details: str = ""


class Operation(msgspec.Struct, frozen=True, kw_only=True, rename=_spelled):
    """A change that is under way or done."""

    id: str
    status: str
    request: OperationRequest
    result: OperationResult | None = None


class Problem(msgspec.Struct, frozen=True, rename={"code": "customErrorCode"}):
    """The body of a refusal."""

    code: str = ""
    description: str = ""


class Membership(msgspec.Struct, frozen=True, kw_only=True, rename=_spelled):
    """PUT partitions/{id}: the full list; what is left out leaves the partition."""

    members: tuple[Member, ...]


class NewPartition(msgspec.Struct, frozen=True, kw_only=True, rename=_spelled):
    """POST partitions."""

    name: str
    members: tuple[Member, ...]


def read(call: str, body: bytes, shape: type[T]) -> T:
    """`body` as `shape`. Raises FabricUnavailable when it is anything else: half an answer is none."""
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FabricUnavailable(f"{call}: not an answer of NMX-M: {error}") from error
