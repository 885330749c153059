"""Reads the records of a running NICo over its REST interface, and writes nothing.

Each organisation is read with a token that may do so: a tenant's with TENANT_ADMIN, and, if one is
named, the provider's with PROVIDER_VIEWER for the machines. Lists are read page by page. A list counts
only if it holds exactly the number of different objects in `X-Pagination`. `read_nico` reads everything until
two successive readings are equal, at most three times, because a plan from half a change would be wrong.

Only `https` is spoken, except to this machine, because each request carries a token. Redirects are not
followed. No token appears in an error, and no proxy of the environment is used.
"""

import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx2
import msgspec

from rackloom.core.takeover.records import (
    NicoAllocation,
    NicoInstance,
    NicoInstanceType,
    NicoInterface,
    NicoLogicalPartition,
    NicoMachine,
    NicoQuota,
    NicoReading,
    NicoSite,
    NicoTenant,
    NicoVpc,
)
from rackloom.errors import Refused, Retry, Undecodable, file_error_text
from rackloom.runtime.foreign_text import decode_json
from rackloom.serving.loopback import is_this_host
from rackloom.serving.request_log import asked

PAGE_SIZE = 100
REQUEST_SECONDS = 50.0
READINGS = 3
_TOO_MANY_REQUESTS, _SERVER_ERROR = 429, 500
_MESSAGE_LENGTH = 300
Json = dict[str, Any]
T = TypeVar("T")


# The client.


class NicoReader(msgspec.Struct, frozen=True):
    """An organisation, and a token with which it is read. Its text does not show the token."""

    org: str
    token: str

    def __repr__(self) -> str:
        return f"NicoReader({self.org!r})"


class NicoClient:
    """Reads the lists of one NICo."""

    def __init__(
        self,
        url: str,
        *,
        api_name: str = "nico",
        ca: Path | None = None,
        answered: Callable[[], object] = lambda: None,
    ) -> None:
        """`answered` is called after each answer."""
        _check_url(url)
        self._answered = answered
        self._api_name = api_name
        self._http = httpx2.Client(
            base_url=url.rstrip("/"), timeout=REQUEST_SECONDS, trust_env=False, verify=_trust(ca)
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, reader: NicoReader, path: str) -> Json:
        """One object of an organisation."""
        return _decode(self._answer(reader, path, {}), Json, path)

    def list_all(self, reader: NicoReader, path: str, **filters: str) -> list[Json]:
        """All objects of a list. Raises Retry if the list changed between two pages."""
        found: list[Json] = []
        total = 1
        while len(found) < total:
            page = {"pageNumber": str(len(found) // PAGE_SIZE + 1), "pageSize": str(PAGE_SIZE)}
            answer = self._answer(reader, path, filters | page)
            total = _total(answer, path)
            entries = _decode(answer, list[Json], path)
            found += entries
            if len(entries) < PAGE_SIZE:
                break
        if len(found) != total or len({entry.get("id") for entry in found}) != total:
            raise Retry(f"NICo's list {path} of {reader.org} changed while it was read", after=1.0)
        return found

    def _answer(self, reader: NicoReader, path: str, query: Mapping[str, str]) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {reader.token}"}
        place = f"/v2/org/{quote(reader.org, safe='')}/{self._api_name}/{path}"
        try:
            with asked("GET", self._http.base_url, place) as request:
                answer = self._http.get(place, params=dict(query), headers=headers)
                request.outcome = answer.status_code
        except httpx2.TransportError as error:
            raise Retry(f"NICo did not answer {place}: {type(error).__name__}", after=1.0) from None
        if answer.status_code == httpx2.codes.OK:
            self._answered()
            return answer
        text = f"NICo answered {answer.status_code} to {place}: {_message_of(answer)}"
        if answer.status_code == _TOO_MANY_REQUESTS or answer.status_code >= _SERVER_ERROR:
            raise Retry(text, after=1.0)
        raise Refused(text, nearest_fix="check --url, --org, --api-name, and the roles and age of the token")


def _trust(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca is None else str(ca))
    except OSError as error:  # also a file without a certificate
        reason = "it holds no certificate" if isinstance(error, ssl.SSLError) else file_error_text(error)
        raise Refused(
            f"{ca} cannot be used: {reason}", nearest_fix="give the authority of NICo's REST as PEM"
        ) from error


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme == "http" and parts.hostname and is_this_host(parts.hostname):
        return
    raise Refused(
        "a token is sent over https only, or to this machine", nearest_fix="give --url as https://HOST[:PORT]"
    )


def _message_of(answer: httpx2.Response) -> str:
    try:
        body = decode_json(answer.content, "NICo")
    except Undecodable:
        return answer.reason_phrase
    message = body.get("message") if isinstance(body, dict) else None
    return str(message or answer.reason_phrase)[:_MESSAGE_LENGTH]


def _total(answer: httpx2.Response, path: str) -> int:
    try:
        return int(decode_json(answer.headers["X-Pagination"], path)["total"])
    except (KeyError, TypeError, ValueError):
        raise Refused(f"NICo's list {path} does not say in X-Pagination how long it is") from None


def _decode(answer: httpx2.Response, kind: type[T], path: str) -> T:
    try:
        return decode_json(answer.content, path, kind)
    except Undecodable as error:
        raise _unknown_form(path, error) from None


def _as(kind: type[T], value: Any, path: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _unknown_form(path, error) from None


def _unknown_form(path: str, error: msgspec.DecodeError) -> Refused:
    return Refused(f"NICo answered {path} in a form that is not known: {error}")


# Objects on the wire. Fields that are not named here are ignored, or kept in `extra`.


class _Wire(msgspec.Struct, kw_only=True, rename="camel"):
    id: str


class _Named(_Wire, kw_only=True, rename="camel"):
    name: str
    description: str | None = None


class _WireType(_Named, kw_only=True, rename="camel"):
    labels: dict[str, str] | None = None
    machine_capabilities: list[Json] | None = None


class _WireConstraint(_Wire, kw_only=True, rename="camel"):
    resource_type: str
    resource_type_id: str
    constraint_value: int


class _WireAllocation(_Named, kw_only=True, rename="camel"):
    allocation_constraints: list[_WireConstraint] | None = None


class _WirePartition(_Named, kw_only=True, rename="camel"):
    status: str


class _WireVpc(_Named, kw_only=True, rename="camel"):
    status: str
    logical_partition: str | None = msgspec.field(name="nvLinkLogicalPartitionId", default=None)


class _WireInterface(_Wire, kw_only=True, rename="camel"):
    device_instance: int
    status: str
    gpu_guid: str | None = None
    # Published schemas and servers disagree on the case of one letter.
    logical_partition: str | None = msgspec.field(name="nvLinkLogicalPartitionId", default=None)
    logical_partition_too: str | None = msgspec.field(name="nvLinklogicalPartitionId", default=None)


class _WireInstance(_Named, kw_only=True, rename="camel"):
    status: str
    vpc_id: str
    instance_type_id: str | None = None
    machine_id: str | None = None
    interfaces: list[_WireInterface] | None = msgspec.field(name="nvLinkInterfaces", default=None)


class _WireMachine(_Wire, kw_only=True, rename="camel"):
    status: str
    instance_type_id: str | None = None
    instance_id: str | None = None


_COMPUTED = {
    "id", "name", "description", "org", "siteId", "tenantId", "infrastructureProviderId", "status",
    "statusHistory", "created", "updated", "site", "tenant", "infrastructureProvider", "deprecations",
    "nvLinkLogicalPartitionId", "nvLinkLogicalPartition", "nvLinkLogicalPartitionSummary",
}  # fmt: skip
_COMPUTED_OF_INSTANCE = _COMPUTED | {
    "vpcId", "vpc", "instanceTypeId", "instanceType", "machineId", "machine", "nvLinkInterfaces",
    "isUpdatePending", "warnings", "placementReason", "unknownSince", "controllerInstanceId",
}  # fmt: skip
_COMPUTED_OF_VPC = _COMPUTED | {"controllerVpcId"}


# The reading.


def read_nico(
    client: NicoClient, tenants: Sequence[NicoReader], *, provider: NicoReader | None, site: str | None
) -> NicoReading:
    """The records of `tenants` at a site. Raises Refused where NICo is changed while it is read."""
    previous = _read_once(client, tenants, provider, site)
    for _ in range(READINGS - 1):
        reading = _read_once(client, tenants, provider, site)
        if reading == previous:
            return reading
        previous = reading
    raise Refused(
        "the records of NICo change while they are read",
        nearest_fix="stop what changes them, then plan again",
    )


def _read_once(
    client: NicoClient, tenants: Sequence[NicoReader], provider: NicoReader | None, wanted_site: str | None
) -> NicoReading:
    everybody = [*([provider] if provider else []), *tenants]
    sites = [_as(_Named, raw, "site") for raw in client.list_all(everybody[0], "site")]
    chosen = [site for site in sites if wanted_site in (None, site.name, site.id)]
    if len(chosen) != 1:
        names = ", ".join(site.name for site in sites) or "none"
        raise Refused(f"exactly one site of NICo is taken over; it has: {names}", nearest_fix="give --site")
    site = NicoSite(id=chosen[0].id, name=chosen[0].name)
    ids = {
        reader.org: _as(_Wire, client.get(reader, "tenant/current"), "tenant/current").id
        for reader in tenants
    }

    def records(path: str, make: Callable[[Json, str], T]) -> tuple[T, ...]:
        return tuple(
            make(raw, reader.org)
            for reader in tenants
            for raw in client.list_all(reader, path, siteId=site.id, tenantId=ids[reader.org])
        )

    types = [
        _type(_as(_WireType, raw, "instance/type"))
        for reader in everybody
        for raw in client.list_all(reader, "instance/type", siteId=site.id)
    ]
    return NicoReading(
        site=site,
        tenants=tuple(NicoTenant(id=tenant_id, org=org) for org, tenant_id in ids.items()),
        types=tuple({kind.id: kind for kind in types}.values()),
        allocations=records("allocation", _allocation),
        logical_partitions=records("nvlink-logical-partition", _logical_partition),
        vpcs=records("vpc", _vpc),
        instances=records("instance", _instance),
        machines=tuple(map(_machine, client.list_all(provider, "machine", siteId=site.id)))
        if provider
        else (),
    )


def _type(kind: _WireType) -> NicoInstanceType:
    capabilities = [
        {key: value for key, value in capability.items() if value is not None}
        for capability in kind.machine_capabilities or []
    ]
    return NicoInstanceType(
        id=kind.id,
        name=kind.name,
        description=kind.description,
        labels=kind.labels or {},
        capabilities=capabilities,
    )


def _named(found: _Named, org: str) -> dict[str, Any]:
    return {"id": found.id, "org": org, "name": found.name, "description": found.description}


def _allocation(raw: Json, org: str) -> NicoAllocation:
    found = _as(_WireAllocation, raw, "allocation")
    return NicoAllocation(
        **_named(found, org),
        # Reservations of addresses have no meaning here.
        quotas=tuple(
            NicoQuota(id=entry.id, type_id=entry.resource_type_id, machines=entry.constraint_value)
            for entry in found.allocation_constraints or []
            if entry.resource_type == "InstanceType"
        ),
    )


def _logical_partition(raw: Json, org: str) -> NicoLogicalPartition:
    found = _as(_WirePartition, raw, "nvlink-logical-partition")
    return NicoLogicalPartition(**_named(found, org), status=found.status)


def _vpc(raw: Json, org: str) -> NicoVpc:
    found = _as(_WireVpc, raw, "vpc")
    return NicoVpc(
        **_named(found, org),
        status=found.status,
        logical_partition=found.logical_partition or None,
        extra={key: value for key, value in raw.items() if key not in _COMPUTED_OF_VPC and value is not None},
    )


def _instance(raw: Json, org: str) -> NicoInstance:
    found = _as(_WireInstance, raw, "instance")
    return NicoInstance(
        **_named(found, org),
        status=found.status,
        vpc=found.vpc_id,
        type_id=found.instance_type_id,
        machine=found.machine_id,
        interfaces=tuple(map(_interface, found.interfaces or [])),
        extra={key: value for key, value in raw.items() if key not in _COMPUTED_OF_INSTANCE},
    )


def _interface(entry: _WireInterface) -> NicoInterface:
    return NicoInterface(
        id=entry.id,
        device=entry.device_instance,
        logical_partition=entry.logical_partition or entry.logical_partition_too or "",
        status=entry.status,
        guid=entry.gpu_guid,
    )


def _machine(raw: Json) -> NicoMachine:
    found = _as(_WireMachine, raw, "machine")
    return NicoMachine(
        id=found.id,
        type_id=found.instance_type_id,
        is_used=found.instance_id is not None or found.status == "InUse",
    )
