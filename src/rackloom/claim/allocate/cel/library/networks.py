"""IP addresses and address ranges."""

import functools
import ipaddress
import re
from dataclasses import dataclass

from rackloom.claim.allocate.cel.errors import EvaluationError
from rackloom.claim.allocate.cel.overloads import Library
from rackloom.claim.allocate.cel.values import TYPE_NAMES, compare_strictly

NETWORKS = Library()
_add = NETWORKS.add

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
def _address(text: str) -> Address:
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
def _range(text: str) -> CIDR:
    address, slash, bits = text.rpartition("/")
    if not slash or not _BITS.fullmatch(bits):
        raise EvaluationError(f"network address parse error during conversion from string: {text!r}")
    parsed = _address(address)
    if int(bits) > parsed.max_prefixlen:
        raise EvaluationError(f"network address parse error during conversion from string: {text!r}")
    return CIDR(parsed, int(bits))


@_add("string_to_ip", "ip(string) -> net_ip")
def _ip(text: str) -> IP:
    return IP(_address(text))


@_add("cidr_ip", "net_cidr.ip() -> net_ip")
def _ip_of(one: CIDR) -> IP:
    return IP(one.address)


@_add("is_ip", "isIP(string) -> bool")
def _is_ip(text: str) -> bool:
    try:
        _address(text)
    except EvaluationError:
        return False
    return True


@_add("ip_is_canonical", "ip.isCanonical(string) -> bool")
def _is_canonical(text: str) -> bool:
    return str(_address(text)) == text


@_add("ip_to_string", "string(net_ip) -> string")
def _text(one: IP) -> str:
    return str(one.address)


@_add("ip_family", "net_ip.family() -> int")
def _family(one: IP) -> int:
    return one.address.version


@_add("ip_is_unspecified", "net_ip.isUnspecified() -> bool")
def _is_unspecified(one: IP) -> bool:
    return one.address.is_unspecified


@_add("ip_is_loopback", "net_ip.isLoopback() -> bool")
def _is_loopback(one: IP) -> bool:
    return one.address.is_loopback


@_add("ip_is_link_local_multicast", "net_ip.isLinkLocalMulticast() -> bool")
def _is_link_local_multicast(one: IP) -> bool:
    packed = one.address.packed
    if len(packed) == 4:
        return packed[:3] == b"\xe0\x00\x00"
    return packed[0] == 0xFF and packed[1] & 0x0F == 0x02


@_add("ip_is_link_local_unicast", "net_ip.isLinkLocalUnicast() -> bool")
def _is_link_local_unicast(one: IP) -> bool:
    return one.address.is_link_local


@_add("ip_is_global_unicast", "net_ip.isGlobalUnicast() -> bool")
def _is_global_unicast(one: IP) -> bool:
    address = one.address
    excluded = (address.is_unspecified, address.is_loopback, address.is_multicast, address.is_link_local)
    return not any(excluded) and address.packed != b"\xff\xff\xff\xff"


@_add("string_to_cidr", "cidr(string) -> net_cidr")
def _cidr(text: str) -> CIDR:
    return _range(text)


@_add("is_cidr", "isCIDR(string) -> bool")
def _is_cidr(text: str) -> bool:
    try:
        _range(text)
    except EvaluationError:
        return False
    return True


@_add("cidr_to_string", "string(net_cidr) -> string")
def _range_text(one: CIDR) -> str:
    return f"{one.address}/{one.bits}"


@_add("cidr_contains_ip_ip", "net_cidr.containsIP(net_ip) -> bool")
def _contains_ip(one: CIDR, other: IP) -> bool:
    return other.address in one.network


@_add("cidr_contains_ip_string", "net_cidr.containsIP(string) -> bool")
def _contains_ip_text(one: CIDR, other: str) -> bool:
    return _address(other) in one.network


@_add("cidr_contains_cidr", "net_cidr.containsCIDR(net_cidr) -> bool")
def _contains_cidr(one: CIDR, other: CIDR) -> bool:
    return one.bits <= other.bits and other.address in one.network


@_add("cidr_contains_cidr_string", "net_cidr.containsCIDR(string) -> bool")
def _contains_cidr_text(one: CIDR, other: str) -> bool:
    return _contains_cidr(one, _range(other))


@_add("cidr_prefix_length", "net_cidr.prefixLength() -> int")
def _prefix_length(one: CIDR) -> int:
    return one.bits


@_add("cidr_masked", "net_cidr.masked() -> net_cidr")
def _masked(one: CIDR) -> CIDR:
    return one.masked()
