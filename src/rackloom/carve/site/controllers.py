"""Which protocol a switch controller speaks: its address says so.

NMX-C is gRPC and has no path; the REST interface of NMX-M lies under `/nmx/v1`. One NMX-M may speak for
several domains, while an endpoint is one domain: then the address names it, as `/nmx/v1?domain=UUID`.
"""

import uuid
from enum import StrEnum
from urllib.parse import parse_qs, urlsplit

import msgspec

from rackloom.errors import Refused

NMX_M_PATH = "/nmx/v1"


class ControllerKind(StrEnum):
    """The protocols."""

    NMX_C = "nmx-c"
    NMX_M = "nmx-m"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A controller's URL, read."""

    kind: ControllerKind
    scheme: str
    host: str
    """In brackets where it is an IPv6 address."""
    port: int | None
    domain: str | None
    """The domain that is meant where an NMX-M has several; its uuid in lower case."""


def parse(url: str) -> Address:
    """Read a controller's URL. Raises Refused for what is none, and for one with a password in it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        domain = _domain(parts.query)
    except ValueError:
        host, port, domain = None, None, None
    kinds = {"": ControllerKind.NMX_C, NMX_M_PATH: ControllerKind.NMX_M}
    kind = kinds.get(parts.path.rstrip("/")) if host and port != 0 else None
    # A password in the URL would be shown to whoever may list the endpoints.
    extra = kind and (parts.username or parts.password or parts.fragment or (parts.query and not domain))
    if not host or not kind or extra or parts.scheme not in ("http", "https"):
        raise _refused(url)
    if domain is not None and kind is not ControllerKind.NMX_M:
        raise _refused(url)
    bracketed = f"[{host}]" if ":" in host else host
    return Address(kind=kind, scheme=parts.scheme, host=bracketed, port=port, domain=domain)


def kind_of(url: str) -> ControllerKind:
    """The protocol of a registered controller; NMX-C for an address that was never checked."""
    try:
        return parse(url).kind
    except Refused:
        return ControllerKind.NMX_C


def url_of_kind(url: str, kind: ControllerKind) -> str:
    """`url` such that it says `kind`. Raises Refused when it says another one."""
    whole = url.rstrip("/")
    if kind is ControllerKind.NMX_M and not urlsplit(whole).path:
        whole += NMX_M_PATH
    if parse(whole).kind is not kind:
        raise Refused(
            f"{url} is not the address of an {kind.upper()}",
            nearest_fix=f"that of an NMX-M has the path {NMX_M_PATH}, that of an NMX-C has none",
        )
    return whole


def _domain(query: str) -> str | None:
    named = parse_qs(query, strict_parsing=True) if query else {}
    if not named:
        return None
    (domain,) = named.pop("domain", [""])
    if named:
        raise ValueError("only the domain can be named")
    return str(uuid.UUID(domain))


def _refused(url: str) -> Refused:
    return Refused(
        f"{url!r} is not the address of a switch controller",
        nearest_fix=f"use https://HOST[:PORT] for NMX-C or https://HOST[:PORT]{NMX_M_PATH} for NMX-M",
    )
