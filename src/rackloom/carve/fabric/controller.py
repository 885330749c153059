"""A switch controller of any protocol: driver interface, errors, TLS material, address.

`FabricDriver` observes a whole domain and executes one operation. `FabricUnavailable` means that the
state or the outcome is unknown, never that the domain is empty. `FabricRefused` means that the
controller answered and did nothing. Its code is shown to tenants. Its message may contain addresses, and is
shown only to operators.

`read_again_in_doubt` repeats a reading that fails or contradicts itself. A controller lists GPUs and
partitions one after the other, and the two lists may contradict each other: `contradicted_gpus` names the
GPUs with an unknown partition. All others are as listed.

The URL determines the protocol: NMX-C is gRPC and has no path, NMX-M is REST below `/nmx/v1`. One NMX-M
may speak for several domains while an endpoint is one domain, so its URL may name it as `?domain=UUID`.
A URL with user, password or fragment is refused, because the endpoint list would show it.

To add a protocol: add its kind here, and a package with a driver beside `nmxc` and `nmxm`.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

import msgspec

from rackloom.core.partitions.domain import DomainObservation, ObservedPartition, PartitionOperation
from rackloom.errors import Refused

# Driver interface and errors.


class FabricUnavailable(Exception):
    """The controller did not answer, or not completely: its state, or the outcome, is unknown."""


class DriverFailed(FabricUnavailable):
    """The driver or the records did not foresee an answer. `__cause__` is the exception."""

    def __init__(self, error: Exception) -> None:
        # Cut, because an exception may quote a whole answer.
        super().__init__(f"unforeseen: {type(error).__name__}: {error}"[:500])
        self.__cause__ = error


class FabricRefused(Exception):
    """The controller answered and refused: it did nothing.

    `code` is the controller's own name for the reason. For NMX-C it is the StReturnCode without `NMX_ST_`
    (RESOURCE_IN_USE), its number where it is not published, or the gRPC status of the refused call. Tenants
    read the code, never the message, which may hold addresses.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class FabricDriver(Protocol):
    """One controller endpoint."""

    async def observe(self) -> DomainObservation:
        """Read the whole domain. Raises FabricUnavailable instead of returning a partial reading."""

    async def execute(self, operation: PartitionOperation) -> int:
        """Execute one operation and return the partition id it acted on.

        Raises FabricRefused when the controller refuses, FabricUnavailable when the outcome is unknown.
        """

    def notifications(self) -> AsyncIterator[None]:
        """One item for each notification of a change, and when these may have been missed or are lost.

        A wake-up, never a fact.
        """

    async def close(self) -> None:
        """Release the connection."""


# Readings in doubt.


def contradicted_gpus(claims: Mapping[int, int], partitions: Collection[ObservedPartition]) -> frozenset[int]:
    """The GPUs with an uncertain partition. `claims`: fabric GUID -> id of the partition that the GPU names.

    A GPU is contradicted when the partition that it names does not list it, or several partitions do. The
    other GPUs of these partitions are uncertain, too: the GPU may share memory with all of them. Id 0
    contradicts nothing: ids begin at 1, and a field without a value reads as 0 (proto3).
    """
    members = {partition.id: partition.members for partition in partitions}
    denied = {
        guid for guid, number in claims.items() if number and guid not in members.get(number, frozenset())
    }
    listings = Counter(guid for guids in members.values() for guid in guids)
    denied |= {guid for guid, times in listings.items() if times > 1}
    # Both sides of a contradiction are concerned: the partition that the GPU names, and those that list it.
    concerned = {claims[guid] for guid in denied & claims.keys()}
    concerned |= {number for number, guids in members.items() if not denied.isdisjoint(guids)}
    # One step is enough: a GPU that both lists place alike ties no further partition to these.
    listed = (members[number] for number in concerned & members.keys())
    naming = {guid for guid, number in claims.items() if number in concerned}
    return frozenset(naming).union(*listed)


QUICK_SECONDS = 1.0
"""A reading that took longer to fail has waited for its controller already, and is not repeated."""
REREAD_PAUSES = (0.05, 0.2)
"""Seconds before each further attempt."""
REREAD_SECONDS = 1.0
"""The time limit of all further attempts together."""


async def read_again_in_doubt(driver: FabricDriver) -> DomainObservation:
    """The domain as `driver` reads it. Raises FabricUnavailable when no attempt in a row succeeds.

    One lost call is no lost controller, and one change between two lists makes no GPU uncertain: without
    further attempts a domain, or some GPUs of it, would be unknown for a moment.
    """
    time = asyncio.get_running_loop().time
    began = time()
    result = await _attempt_reading(driver)
    if _is_doubtful(result) and time() - began < QUICK_SECONDS:
        with suppress(TimeoutError):
            async with asyncio.timeout(REREAD_SECONDS):
                for pause in REREAD_PAUSES:
                    await asyncio.sleep(pause)
                    newer = await _attempt_reading(driver)
                    # A reading that is uncertain about some GPUs is better than none.
                    if not isinstance(newer, FabricUnavailable) or isinstance(result, FabricUnavailable):
                        result = newer
                    if not _is_doubtful(result):
                        break
    if isinstance(result, FabricUnavailable):
        raise result
    return result


def _is_doubtful(result: DomainObservation | FabricUnavailable) -> bool:
    return isinstance(result, FabricUnavailable) or bool(result.uncertain)


async def _attempt_reading(driver: FabricDriver) -> DomainObservation | FabricUnavailable:
    try:
        return await driver.observe()
    except FabricUnavailable as error:
        return error
    except Exception as error:
        # Also MemoryError: an answer that needs too much memory is one that can't be read. The pass must not
        # end here, because tenants would read Ready until the last reading is too old.
        return DriverFailed(error)


# TLS material.


class TlsMaterial(msgspec.Struct, frozen=True, kw_only=True):
    """PEM contents. All are optional."""

    ca: bytes | None = None
    """Trusted instead of the built-in roots."""
    certificate: bytes | None = None
    """Client certificate, for controllers that require one (mTLS)."""
    key: bytes | None = None
    authority: str | None = None
    """Name to expect in the controller's certificate. None stands for the host of the URL."""

    def __post_init__(self) -> None:
        """Refuse half of a client identity."""
        if (self.certificate is None) != (self.key is None):
            raise Refused(
                "a client certificate and its key go together", nearest_fix="give both, or neither of them"
            )


# Addresses.


NMX_M_PATH = "/nmx/v1"


class ControllerKind(StrEnum):
    """The protocols."""

    NMX_C = "nmx-c"
    NMX_M = "nmx-m"


class ControllerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a controller's URL."""

    kind: ControllerKind
    scheme: str
    host: str
    """The host, in brackets if it is an IPv6 address."""
    port: int | None
    domain: str | None
    """The domain, if the URL names one of several. Its uuid is in lower case."""


def parse_controller_url(url: str) -> ControllerAddress:
    """Parse a controller's URL. Raises Refused for anything else, and for a URL with a password."""
    refusal = Refused(
        f"{url!r} is not the address of a switch controller",
        nearest_fix=f"use https://HOST[:PORT] for NMX-C or https://HOST[:PORT]{NMX_M_PATH} for NMX-M",
    )
    # `urlsplit` leaves out tabs and line breaks, but the stored URL would still have them.
    if not url.isprintable() or " " in url:
        raise refusal
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        domain = _domain_of_query(parts.query)
    except ValueError:
        raise refusal from None
    kinds = {"": ControllerKind.NMX_C, NMX_M_PATH: ControllerKind.NMX_M}
    kind = kinds.get(parts.path.rstrip("/")) if port != 0 else None
    # A password in the URL would be visible in the list of endpoints.
    extra = parts.username or parts.password or parts.fragment or (parts.query and not domain)
    if not host or not kind or extra or parts.scheme not in ("http", "https"):
        raise refusal
    if domain is not None and kind is not ControllerKind.NMX_M:
        raise refusal
    bracketed = f"[{host}]" if ":" in host else host
    return ControllerAddress(kind=kind, scheme=parts.scheme, host=bracketed, port=port, domain=domain)


def canonical_domain(text: str) -> str:
    """Domain uuid in lower case. Raises FabricUnavailable unless it is a uuid that names something."""
    try:
        domain = uuid.UUID(text)
    except ValueError:
        domain = uuid.UUID(int=0)
    if domain.int == 0:
        raise FabricUnavailable(f"Hello: domain uuid {text!r} names no domain")
    return str(domain)


def controller_kind(url: str) -> ControllerKind:
    """The protocol of a registered controller. NMX-C for an address that was never checked."""
    try:
        return parse_controller_url(url).kind
    except Refused:
        return ControllerKind.NMX_C


def url_of_kind(url: str, kind: ControllerKind) -> str:
    """`url`, completed so that it means `kind`. Raises Refused when it means another kind."""
    whole = url.rstrip("/")
    if kind is ControllerKind.NMX_M and not urlsplit(whole).path:
        whole += NMX_M_PATH
    if parse_controller_url(whole).kind is not kind:
        raise Refused(
            f"{url} is not the address of an {kind.upper()}",
            nearest_fix=f"that of an NMX-M has the path {NMX_M_PATH}, that of an NMX-C has none",
        )
    return whole


def _domain_of_query(query: str) -> str | None:
    """The uuid in `?domain=UUID`. Raises ValueError for any other query."""
    if not query:
        return None
    fields = parse_qs(query, strict_parsing=True)
    (domain,) = fields.pop("domain", [""])
    if fields:
        raise ValueError("only the domain can be named")
    return str(uuid.UUID(domain))
