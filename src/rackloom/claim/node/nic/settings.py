"""What a network interface is like on the host, and what it is to be like in a pod. Both are plain JSON."""

from collections.abc import Mapping

import msgspec

from rackloom.claim.opaque.ipv6_rules import is_ipv6
from rackloom.claim.opaque.network import Addressing, Interface, Neighbor, NetworkConfig, Route, Rule, Vrf

_LISTENING = {
    "ipv6/disable_ipv6": 0,
    "ipv6/accept_ra": 2,
    "ipv6/router_solicitation_delay": 0,
    "ipv6/router_solicitation_interval": 1,
}
"""So that a router's answer comes within a second; a runtime waits two for the whole sandbox."""
_UNCHECKED = {"ipv6/dad_transmits": 0}
"""With the host's hardware address the pod gets the address that the host had: no other has it."""
SIZES = ("gso_max_size", "gro_max_size", "gso_ipv4_max_size", "gro_ipv4_max_size")


class Setting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the values of this module."""


class Identity(Setting, frozen=True, kw_only=True):
    """By what a link is found again in whatever namespace it is, under whatever name."""

    name: str
    kind: str = ""
    """What made it (`veth`, `macvlan`); empty for hardware."""
    parent: str | None = None
    """Address of its PCI function."""
    permanent_mac: str | None = None
    macs: tuple[str, ...] = ()
    """Addresses that it has on the host and is to get in the pod."""
    names: tuple[str, ...] = ()


class Sizes(Setting, frozen=True, kw_only=True):
    """Segmentation sizes in bytes; None leaves one as it is."""

    gso_max_size: int | None = None
    gro_max_size: int | None = None
    gso_ipv4_max_size: int | None = None
    gro_ipv4_max_size: int | None = None


class LinkSettings(Setting, frozen=True, kw_only=True):
    """All that an interface has in one namespace; None leaves a setting as it is."""

    name: str
    mtu: int | None = None
    mac: str | None = None
    up: bool = True
    sizes: Sizes = Sizes()
    addresses: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ()
    rules: tuple[Rule, ...] = ()
    neighbors: tuple[Neighbor, ...] = ()
    features: Mapping[str, bool] = {}
    private_flags: Mapping[str, bool] = {}
    sysctls: Mapping[str, int] = {}
    """By `<family>/conf/<setting>`; the name of the interface goes between."""
    vrf: Vrf | None = None
    without_ebpf: bool = False
    autoconfigures: bool = False
    """Whether it is to get an IPv6 address from a router's advertisement before it counts as attached."""


def in_pod(config: NetworkConfig, host: LinkSettings) -> LinkSettings:
    """What the pod gets: what the claim asks for, and the host's settings where it does not say.

    Routes and rules of the host go with the host's addresses: to other addresses they would lead nowhere.
    """
    wish = config.interface
    kept = not wish.addresses
    autoconfigures = wish.addressing is Addressing.SLAAC
    host = _without_ipv6(host) if autoconfigures else host
    vrf = wish.vrf
    return LinkSettings(
        name=wish.name or host.name,
        mtu=wish.mtu,
        mac=None if wish.hardware_addr is None else normal_mac(wish.hardware_addr),
        sizes=Sizes(**{name: getattr(wish, name) for name in SIZES}),
        addresses=wish.addresses or host.addresses,
        routes=_routes(config, host if kept else None),
        rules=() if vrf is not None else _once((*(host.rules if kept else ()), *config.rules)),
        neighbors=_neighbors(config, host if kept else None),
        features=dict(config.ethtool.features),
        private_flags=dict(config.ethtool.private_flags),
        sysctls=_sysctls(wish),
        vrf=vrf,
        without_ebpf=bool(wish.disable_ebpf_programs),
        autoconfigures=autoconfigures,
    )


def normal_mac(text: str) -> str:
    """Lower case, with colons, as the kernel's tools print it."""
    return text.lower().replace("-", ":")


def _without_ipv6(host: LinkSettings) -> LinkSettings:
    """A pod that listens to routers learns from them what the host has learnt."""
    return msgspec.structs.replace(
        host,
        addresses=tuple(one for one in host.addresses if not is_ipv6(one)),
        routes=tuple(one for one in host.routes if not is_ipv6(one.destination)),
    )


def _sysctls(wish: Interface) -> dict[str, int]:
    found = {"ipv4/arp_ignore": wish.arp_ignore, "ipv4/arp_announce": wish.arp_announce}
    if wish.forwarding is not None:
        found |= {"ipv4/forwarding": int(wish.forwarding), "ipv6/forwarding": int(wish.forwarding)}
    if wish.addressing is Addressing.SLAAC:
        found |= _LISTENING | ({} if wish.hardware_addr else _UNCHECKED)
    found |= {f"ipv6/{name}": value for name, value in wish.ipv6.items()}
    return {name: value for name, value in found.items() if value is not None}


def _routes(config: NetworkConfig, host: LinkSettings | None) -> tuple[Route, ...]:
    """The claim's route wins over the host's to the same destination in the same table."""
    known = {(one.destination, one.table): one for one in (*(host.routes if host else ()), *config.routes)}
    return tuple(known.values())


def _neighbors(config: NetworkConfig, host: LinkSettings | None) -> tuple[Neighbor, ...]:
    known = {one.destination: one for one in (*(host.neighbors if host else ()), *config.neighbors)}
    return tuple(known.values())


def _once(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(dict.fromkeys(rules))
