"""IP addresses, CIDR ranges and URLs, as Kubernetes reads them.

An `IP` or `CIDR` refuses zones and IPv4 addresses that are written as IPv6. `ParsedUrl` is an absolute
URL or a path from the root. A URL must parse both as a request and as a reference, as Kubernetes
requires. The path is returned escaped. The three types are registered as values that compare only with
their own type.
"""

import functools
import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

import msgspec

from rackloom.core.allocate.cel.errors import EvaluationError
from rackloom.core.allocate.cel.types import accepts, cel_function, declare_functions
from rackloom.core.allocate.cel.values import TYPE_NAMES, compare_strictly

# IP addresses and CIDR ranges.


Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_BITS = re.compile(r"0|[1-9][0-9]{0,2}")


@dataclass(frozen=True, slots=True)
class IP:
    """One address. IPv4 addresses written as IPv6 and addresses with a zone are refused."""

    address: Address

    def size(self) -> int:
        """Bytes of the address."""
        return self.address.max_prefixlen // 8


@dataclass(frozen=True, slots=True)
class CIDR:
    """An address and how many of its leading bits name the range."""

    address: Address
    bits: int

    def size(self) -> int:
        """Bytes that the prefix covers."""
        return -(-self.bits // 8)

    def masked(self) -> "CIDR":
        """The same range, written with its first address."""
        return CIDR(self.network.network_address, self.bits)

    @property
    def network(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
        """The range itself."""
        return ipaddress.ip_network((self.address, self.bits), strict=False)


for _kind, _name in ((IP, "net.IP"), (CIDR, "net.CIDR")):
    TYPE_NAMES[_kind] = _name
    compare_strictly(_kind)


@functools.lru_cache(maxsize=1024)
def _parse_address(text: str) -> Address:
    if "%" in text:
        raise EvaluationError(f"IP address {text!r} with zone value is not allowed")
    try:
        address = ipaddress.ip_address(text)
    except ValueError as error:
        raise EvaluationError(
            f"IP Address {text!r} parse error during conversion from string: {error}"
        ) from None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        raise EvaluationError(f"IPv4-mapped IPv6 address {text!r} is not allowed")
    return address


@functools.lru_cache(maxsize=1024)
def _parse_range(text: str) -> CIDR:
    address, slash, bits = text.rpartition("/")
    if not slash or not _BITS.fullmatch(bits):
        raise EvaluationError(f"network address parse error during conversion from string: {text!r}")
    parsed = _parse_address(address)
    if int(bits) > parsed.max_prefixlen:
        raise EvaluationError(f"network address parse error during conversion from string: {text!r}")
    return CIDR(parsed, int(bits))


declare_functions(
    ("string_to_ip", "ip(string) -> net_ip", lambda text: IP(_parse_address(text))),
    ("cidr_ip", "net_cidr.ip() -> net_ip", lambda cidr: IP(cidr.address)),
    ("is_ip", "isIP(string) -> bool", accepts(_parse_address)),
    ("ip_is_canonical", "ip.isCanonical(string) -> bool", lambda text: str(_parse_address(text)) == text),
    ("ip_to_string", "string(net_ip) -> string", lambda ip: str(ip.address)),
    ("ip_family", "net_ip.family() -> int", lambda ip: ip.address.version),
    ("ip_is_unspecified", "net_ip.isUnspecified() -> bool", lambda ip: ip.address.is_unspecified),
    ("ip_is_loopback", "net_ip.isLoopback() -> bool", lambda ip: ip.address.is_loopback),
    ("ip_is_link_local_unicast", "net_ip.isLinkLocalUnicast() -> bool", lambda ip: ip.address.is_link_local),
    ("string_to_cidr", "cidr(string) -> net_cidr", _parse_range),
    ("is_cidr", "isCIDR(string) -> bool", accepts(_parse_range)),
    ("cidr_to_string", "string(net_cidr) -> string", lambda cidr: f"{cidr.address}/{cidr.bits}"),
    ("cidr_prefix_length", "net_cidr.prefixLength() -> int", lambda cidr: cidr.bits),
    ("cidr_masked", "net_cidr.masked() -> net_cidr", CIDR.masked),
)


@cel_function("ip_is_link_local_multicast", "net_ip.isLinkLocalMulticast() -> bool")
def _is_link_local_multicast(ip: IP) -> bool:
    packed = ip.address.packed
    if len(packed) == 4:
        return packed[:3] == b"\xe0\x00\x00"
    return packed[0] == 0xFF and packed[1] & 0x0F == 0x02


@cel_function("ip_is_global_unicast", "net_ip.isGlobalUnicast() -> bool")
def _is_global_unicast(ip: IP) -> bool:
    address = ip.address
    excluded = (address.is_unspecified, address.is_loopback, address.is_multicast, address.is_link_local)
    return not any(excluded) and address.packed != b"\xff\xff\xff\xff"


@cel_function("cidr_contains_ip_ip", "net_cidr.containsIP(net_ip) -> bool")
def _contains_ip(cidr: CIDR, other: IP) -> bool:
    return other.address in cidr.network


@cel_function("cidr_contains_ip_string", "net_cidr.containsIP(string) -> bool")
def _contains_ip_text(cidr: CIDR, other: str) -> bool:
    return _parse_address(other) in cidr.network


@cel_function("cidr_contains_cidr", "net_cidr.containsCIDR(net_cidr) -> bool")
def _contains_cidr(cidr: CIDR, other: CIDR) -> bool:
    return cidr.bits <= other.bits and other.address in cidr.network


@cel_function("cidr_contains_cidr_string", "net_cidr.containsCIDR(string) -> bool")
def _contains_cidr_text(cidr: CIDR, other: str) -> bool:
    return _contains_cidr(cidr, _parse_range(other))


# URLs.


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_USER = re.compile(r"[A-Za-z0-9\-._:~!$&'()*+,;=%@]*")
_HOST = re.compile(r"[^\x00-\x20\\^`{|}/?#@%]*")
_BRACKETED = re.compile(r"\[[^\]]*\]")
_PORT = re.compile(r"(?::[0-9]*)?")
_VALID_PATH = re.compile(r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/\[\]]|%[0-9A-Fa-f]{2})*")
_PLAIN_IN_PATH = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~$&+,/:;=@")


class ParsedUrl(msgspec.Struct, frozen=True):
    """The parts of a URL. `path` is still escaped."""

    text: str
    scheme: str
    host: str
    path: str
    query: str


TYPE_NAMES[ParsedUrl] = "kubernetes.URL"
compare_strictly(ParsedUrl)


def parse_url(text: str) -> ParsedUrl:
    """Read an absolute URL or path. Raises ValueError with the reason if it is neither."""
    _parse_as(text, fragment=False)
    return _parse_as(text, fragment=True)


def _parse_as(text: str, *, fragment: bool) -> ParsedUrl:
    """One reading: as a request, without fragment, or as a reference, which may begin with //."""
    if not text:
        raise ValueError("empty url")
    if _CONTROL.search(text):
        raise ValueError("net/url: invalid control character in URL")
    if text == "*":
        return ParsedUrl(text, "", "", "*", "")
    whole, _, tail = text.partition("#") if fragment else (text, "", "")
    if _BAD_ESCAPE.search(tail):
        raise ValueError(f"invalid URL escape in {tail!r}")
    found = _SCHEME.match(whole)
    if found is None and whole.startswith(":"):
        raise ValueError("missing protocol scheme")
    scheme = "" if found is None else found[1].lower()
    rest, _, query = whole[found.end() if found else 0 :].partition("?")
    if not rest.startswith("/"):
        if scheme or (fragment and not rest):
            return ParsedUrl(text, scheme, "", "", query)
        raise ValueError("invalid URI for request")
    host = ""
    if rest.startswith("//") and (scheme or (fragment and not rest.startswith("///"))):
        authority, slash, path = rest[2:].partition("/")
        host, rest = _parse_authority(authority), slash + path
    if _BAD_ESCAPE.search(rest):
        raise ValueError(f"invalid URL escape in {rest!r}")
    # A path that is properly escaped stays. In any other, everything is escaped that needs it.
    if not _VALID_PATH.fullmatch(rest):
        raw = unquote_to_bytes(rest)
        rest = "".join(chr(byte) if byte in _PLAIN_IN_PATH else f"%{byte:02X}" for byte in raw)
    return ParsedUrl(text, scheme, host, rest, query)


def _parse_authority(authority: str) -> str:
    user, at, host = authority.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise ValueError("net/url: invalid userinfo")
    if at and _BAD_ESCAPE.search(user):
        raise ValueError("invalid URL escape in user")
    bracketed = _BRACKETED.match(host)
    if host.startswith("["):
        if bracketed is None or not _PORT.fullmatch(host[bracketed.end() :]):
            raise ValueError("missing ']' in host or invalid port")
        return host
    name, colon, port = host.partition(":")
    if colon and not _PORT.fullmatch(":" + port):
        raise ValueError(f"invalid port {':' + port!r} after host")
    # Only bytes outside ASCII may be escaped in a host name.
    if _BAD_ESCAPE.search(name) or re.search(r"%[0-7]", name):
        raise ValueError(f"invalid URL escape in {name!r}")
    if not _HOST.fullmatch(re.sub("%..", "", name)):
        raise ValueError(f"invalid character in host name {name!r}")
    return unquote_to_bytes(name).decode(errors="replace") + colon + port


@cel_function("string_to_url", "url(string) -> url")
def _url(text: str) -> ParsedUrl:
    try:
        return parse_url(text)
    except ValueError as error:
        raise EvaluationError(f"URL parse error during conversion from string: {error}") from None


declare_functions(
    ("is_url_string", "isURL(string) -> bool", accepts(parse_url)),
    ("url_get_escaped_path", "url.getEscapedPath() -> string", lambda parsed_url: parsed_url.path),
    ("url_get_scheme", "url.getScheme() -> string", lambda parsed_url: parsed_url.scheme),
    ("url_get_host", "url.getHost() -> string", lambda parsed_url: parsed_url.host),
)


@cel_function("url_get_hostname", "url.getHostname() -> string")
def _get_hostname(parsed_url: ParsedUrl) -> str:
    if parsed_url.host.startswith("["):
        return parsed_url.host[1 : parsed_url.host.index("]")]
    return parsed_url.host.rpartition(":")[0] if ":" in parsed_url.host else parsed_url.host


@cel_function("url_get_port", "url.getPort() -> string")
def _get_port(parsed_url: ParsedUrl) -> str:
    after = parsed_url.host.rpartition("]")[2]
    return after.rpartition(":")[2] if ":" in after else ""


@cel_function("url_get_query", "url.getQuery() -> map<string, list<string>>")
def _get_query(parsed_url: ParsedUrl) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for part in parsed_url.query.split("&"):
        # Parts that are malformed are left out, as Go does.
        if not part or ";" in part or _BAD_ESCAPE.search(part):
            continue
        key, _, value = part.partition("=")
        found.setdefault(_unescaped(key), []).append(_unescaped(value))
    return found


def _unescaped(text: str) -> str:
    return unquote_to_bytes(text.replace("+", " ")).decode(errors="replace")
