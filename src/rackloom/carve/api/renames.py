"""The two served versions of NVIDIA Infra Controller's REST contract, and their differences.

Clients of version 1.6.0 and of version 2.0.0 use the same paths. Neither sends its version in a request, so
nothing is negotiated. If a name was changed, both names are read and both are written, for good. `RENAMES`
lists them all. No other module knows an old name.

A request may use either name of a field or of a query parameter. It is refused if it uses both with
different values. Null counts as not given. An answer has both names with the same value. The decoders of both
versions ignore unknown fields in these answers: only models of requests are strict.

`UNSERVED` names the groups of operations of version 2.0.0 that do not exist here. /metadata and
/openapi.json report both, and a test compares them with the operations that are described.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel

CONTRACTS = ("1.6.0", "2.0.0")
"""The served versions of the contract, the newest last."""


class Rename(NamedTuple):
    """A name that was changed, and the models that have it. Their subclasses have it too."""

    old: str
    new: str
    requests: tuple[str, ...] = ()
    """Models of bodies: either name is read."""
    queries: tuple[str, ...] = ()
    """Models of query parameters that have a field for each name: either is read."""
    answers: tuple[str, ...] = ()
    """Models of answers: both names are written."""


RENAMES = (
    Rename(
        "nvLinklogicalPartitionId",
        "nvLinkLogicalPartitionId",
        requests=("InterfaceBody",),
        answers=("InterfaceSummary", "NVLinkInterface"),
    ),
    Rename(
        "ResourceTypeID",
        "resourceTypeId",
        requests=("AllocationConstraint",),
        answers=("AllocationConstraintAnswer",),
    ),
    Rename(
        "rackLevelAdministration", "flow", requests=("SiteCapabilities",), answers=("SiteCapabilitiesAnswer",)
    ),
    Rename("id", "machineId", answers=("MachineAssociationAnswer",)),
    Rename("isRackLevelAdministrationEnabled", "isFlowEnabled", queries=("SiteQuery",)),
    # Both versions have one name in the list and the other in a single type.
    Rename("includeMachineAssociation", "includeMachineAssignment", queries=("InstanceTypeIncludes",)),
)

UNSERVED: Mapping[str, tuple[str, ...]] = {
    "credentials": ("/credential",),
    "DPU extension services": ("/dpu-extension-service",),
    "expected hardware": (
        "/expected-machine",
        "/expected-power-shelf",
        "/expected-rack",
        "/expected-rack-group",
        "/expected-switch",
    ),
    "host firmware": ("/firmware-config",),
    "InfiniBand": ("/infiniband-partition", "/infiniband-interface"),
    "IP blocks": ("/ipblock",),
    "iPXE templates": ("/ipxe-template",),
    "measured boot": ("/measured-boot",),
    "network security groups": ("/network-security-group",),
    "operating systems": ("/operating-system",),
    "machine power, firmware and validation": (
        "/machine/{machineId}/bmc",
        "/machine/{machineId}/decommission",
        "/machine/{machineId}/dpu",
        "/machine/{machineId}/health-report",
        "/machine/{machineId}/power",
        "/machine/{machineId}/validation",
    ),
    "racks": ("/rack",),
    "site explorer": ("/site-explorer",),
    "SKUs": ("/sku",),
    "SpectrumX": ("/spectrumx-partition",),
    "SSH keys": ("/sshkey", "/sshkeygroup"),
    "tasks": ("/task",),
    "tenant accounts": ("/tenant/account",),
    "tenant identity": ("/site/{siteId}/tenant-identity", "/site/{siteId}/.well-known"),
    "trays": ("/tray",),
    "users": ("/user",),
    "VPC peering": ("/vpc-peering",),
}
"""Group of operations -> the beginnings of its paths. No operation of these groups exists here."""


@cache
def renames_of(model: type[BaseModel], part: str) -> tuple[Rename, ...]:
    """The renames of a model. `part` is `requests`, `queries` or `answers`."""
    names = {base.__name__ for base in model.__mro__}
    return tuple(rename for rename in RENAMES if not names.isdisjoint(getattr(rename, part)))


def read_body(model: type[BaseModel], value: Any) -> Any:
    """A body with the new names in place of the old. Raises ValueError if both are given and differ."""
    renames = renames_of(model, "requests")
    if not renames or not isinstance(value, dict):
        return value
    read = dict(value)
    for rename in renames:
        read[rename.new] = _chosen(rename, read.pop(rename.old, None), read.get(rename.new))
        if read[rename.new] is None and rename.new not in value:
            del read[rename.new]
    return read


def read_query(query: BaseModel) -> None:
    """Read each renamed parameter under either name. Raises ValueError if both are given and differ."""
    for rename in renames_of(type(query), "queries"):
        fields = {str(field.alias): name for name, field in type(query).model_fields.items()}
        old, new = fields[rename.old], fields[rename.new]
        setattr(query, new, _chosen(rename, getattr(query, old), getattr(query, new)))


def write_answer(model: type[BaseModel], answer: dict[str, Any]) -> dict[str, Any]:
    """`answer`, which has the new names, with the old ones too."""
    for rename in renames_of(model, "answers"):
        answer[rename.old] = answer[rename.new]
    return answer


def _chosen(rename: Rename, old: object, new: object) -> object:
    if old is not None and new is not None and not _is_same(old, new):
        raise ValueError(f"{rename.new} and {rename.old} are two names of the same field, and differ")
    return old if new is None else new


def _is_same(old: object, new: object) -> bool:
    """Compare texts without case, as ids are UUIDs, and other values by type too: 1 is not true."""
    if isinstance(old, str) and isinstance(new, str):
        return old.casefold() == new.casefold()
    return type(old) is type(new) and old == new


def describe_renames(document: dict[str, Any]) -> None:
    """Describe the old names of fields, as deprecated, in an OpenAPI document."""
    schemas = document["components"]["schemas"]
    for rename in RENAMES:
        for name in (*rename.requests, *rename.answers):
            schema = schemas[name]
            twin = {"deprecated": True, "description": f"The same as {rename.new}, for older clients."}
            schema["properties"][rename.old] = {**schema["properties"][rename.new], **twin}
        for name in rename.answers:
            if rename.old not in schemas[name]["required"]:
                schemas[name]["required"].append(rename.old)
