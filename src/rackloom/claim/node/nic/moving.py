"""Moving a link into a pod's namespace and back. Any step may be the last before a crash; all are repeatable.

The kernel carries out each request whole. What is between two requests is found again by the link's identity,
in the pod's namespace or on the host, and brought to its end from there.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from rackloom.claim.node.nic import ethtool, messages
from rackloom.claim.node.nic.links import (
    Link,
    find,
    read_addresses,
    read_autoconfigured,
    read_links,
    sysctl_path,
)
from rackloom.claim.node.nic.namespaces import OWN, inside
from rackloom.claim.node.nic.netlink import Message, Rtnetlink
from rackloom.claim.node.nic.programs import detach_tcx
from rackloom.claim.node.nic.settings import SIZES, Identity, LinkSettings, Setting, Sizes

ADVERTISEMENT_SECONDS = 1.5
"""Less than the two seconds that runtimes give a plugin for a sandbox."""
_LOOK_SECONDS = 0.05
_IF_THERE = frozenset({"ipv6/forwarding"})
"""Follows from a setting that is of IPv4 too."""


class Attached(Setting, frozen=True, kw_only=True):
    """What an interface turned out to be in the pod."""

    name: str
    mac: str | None
    addresses: tuple[str, ...]


def attach(identity: Identity, wanted: LinkSettings, netns: Path) -> Attached:
    """Bring the link into `netns` and make it as `wanted`. Raises `OSError`; `undo` with `detach`."""
    if not inside(netns, lambda: _is_here(identity)):
        _push(identity, netns)
    return inside(netns, lambda: _make(identity, wanted))


def detach(identity: Identity, host: LinkSettings, netns: Path | None) -> bool:
    """Bring the link back to the host, if it is in `netns` or there already, and make it as it was.

    False when it is nowhere to be found: a virtual link dies with the namespace that it is in.
    """
    if netns is not None:
        own = os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            inside(netns, lambda: _pull(identity, host, own))
        finally:
            os.close(own)
    return inside(OWN, lambda: _restore(identity, host))


def readdress(
    identity: Identity, wanted: LinkSettings, netns: Path, address: str, seconds: int
) -> tuple[str, ...]:
    """Let the link in `netns` have `address` for `seconds`, with what hangs on it; 0 takes it off.

    Returns the addresses that it then has. Raises `OSError`. With its last address an interface loses its
    routes too.
    """

    def work() -> tuple[str, ...]:
        with Rtnetlink() as rtnetlink:
            index = _found(rtnetlink, identity).index
            rtnetlink.tell(messages.address(index, address, remove=not seconds, seconds=seconds))
            for message in _when_up(index, wanted) if seconds else ():
                rtnetlink.tell(message)
            return tuple(read_addresses(rtnetlink, index, also_expiring=True))

    return inside(netns, work)


def name_in(identity: Identity, netns: Path) -> str:
    """What the link is called in `netns`. Raises `OSError` where it is not there."""

    def look() -> str:
        with Rtnetlink() as rtnetlink:
            return _found(rtnetlink, identity).name

    return inside(netns, look)


def _is_here(identity: Identity) -> bool:
    with Rtnetlink() as rtnetlink:
        return find(read_links(rtnetlink), identity) is not None


def _push(identity: Identity, netns: Path) -> None:
    handle = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with Rtnetlink() as rtnetlink:
            link = find(read_links(rtnetlink), identity)
            if link is None:
                raise FileNotFoundError(f"interface {identity.name} is neither on the host nor in the pod")
            rtnetlink.tell(messages.set_up(link.index, up=False))
            rtnetlink.tell(messages.move(link.index, handle, identity.names[-1]))
    finally:
        os.close(handle)


def _pull(identity: Identity, host: LinkSettings, own: int) -> None:
    with Rtnetlink() as rtnetlink:
        link = find(read_links(rtnetlink), identity)
        if link is not None:
            rtnetlink.tell(messages.set_up(link.index, up=False))
            rtnetlink.tell(messages.move(link.index, own, host.name))


def _make(identity: Identity, wanted: LinkSettings) -> Attached:
    with Rtnetlink() as rtnetlink:
        _apply(rtnetlink, _found(rtnetlink, identity), wanted)
        _check_sysctls(wanted)
        link = _found(rtnetlink, identity)
        addresses = tuple(read_addresses(rtnetlink, link.index))
        learnt = _autoconfigured(rtnetlink, link) if wanted.autoconfigures else ()
        return Attached(name=link.name, mac=link.mac, addresses=tuple(dict.fromkeys((*addresses, *learnt))))


def _autoconfigured(rtnetlink: Rtnetlink, link: Link) -> tuple[str, ...]:
    """Wait for an address by a router's advertisement, which nothing but the router can hasten."""
    until = time.monotonic() + ADVERTISEMENT_SECONDS
    while not (found := read_autoconfigured(rtnetlink, link.index)):
        if time.monotonic() > until:
            told = f"no router has advertised a prefix on {link.name} within {ADVERTISEMENT_SECONDS} s"
            raise TimeoutError(errno.ETIMEDOUT, told)
        time.sleep(_LOOK_SECONDS)
    return found


def _check_sysctls(wanted: LinkSettings) -> None:
    """A kernel without IPv6, or an interface too small for it, has no files for its settings."""
    for name, value in wanted.sysctls.items():
        if value and name not in _IF_THERE and not sysctl_path(name, wanted.name).exists():
            raise FileNotFoundError(errno.ENOENT, f"setting {name} of {wanted.name}: it has no IPv6")


def _restore(identity: Identity, host: LinkSettings) -> bool:
    with Rtnetlink() as rtnetlink:
        link = find(read_links(rtnetlink), identity)
        if link is None:
            return False
        _apply(rtnetlink, link, host)
        return True


def _found(rtnetlink: Rtnetlink, identity: Identity) -> Link:
    link = find(read_links(rtnetlink), identity)
    if link is None:
        raise FileNotFoundError(f"interface {identity.name} is not in this namespace any more")
    return link


def _apply(rtnetlink: Rtnetlink, link: Link, wanted: LinkSettings) -> None:
    """From whatever the link is to what is wanted. Down first: names and addresses change only then."""
    for step in _steps(rtnetlink, link, wanted):
        step()


def _steps(rtnetlink: Rtnetlink, link: Link, wanted: LinkSettings) -> Iterator[Callable[[], None]]:
    def tell(message: Message) -> Callable[[], None]:
        return lambda: rtnetlink.tell(message)

    index = link.index
    yield tell(messages.set_up(index, up=False))
    if link.name != wanted.name:
        yield tell(messages.rename(index, wanted.name))
    if wanted.without_ebpf:
        yield tell(messages.without_xdp(index))
        yield tell(messages.without_clsact(index))
        yield lambda: detach_tcx(index)
    for message in messages.of_link(index, _changed(link, wanted)):
        yield tell(message)
    if wanted.vrf is not None:
        yield tell(messages.make_vrf(wanted.vrf))
        yield tell(messages.enslave(index, _index_of(rtnetlink, wanted.vrf.name)))
    for name, value in wanted.sysctls.items():
        yield lambda name=name, value=value: _set_sysctl(name, wanted.name, value)  # type: ignore[misc]
    for stale in set(read_addresses(rtnetlink, index)) - set(wanted.addresses):
        yield tell(messages.address(index, stale, remove=True))
    for cidr in wanted.addresses:
        yield tell(messages.address(index, cidr))
    yield lambda: ethtool.set_features(wanted.name, wanted.features)
    yield lambda: ethtool.set_private_flags(wanted.name, wanted.private_flags)
    if wanted.up:
        yield from map(tell, _when_up(index, wanted))


def _changed(link: Link, wanted: LinkSettings) -> LinkSettings:
    """Without what the link has already: some take no address (IPoIB), and some are reset by any MTU."""
    sizes = {
        name: None
        if getattr(wanted.sizes, name) == getattr(link.sizes, name)
        else getattr(wanted.sizes, name)
        for name in SIZES
    }
    return msgspec.structs.replace(
        wanted,
        mtu=None if wanted.mtu == link.mtu else wanted.mtu,
        mac=None if wanted.mac == link.mac else wanted.mac,
        sizes=Sizes(**sizes),
    )


def _when_up(index: int, wanted: LinkSettings) -> Iterator[Message]:
    yield messages.set_up(index, up=True)
    table = None if wanted.vrf is None else wanted.vrf.routing_table
    yield from messages.routes(index, wanted.routes, table)
    yield from map(messages.rule, wanted.rules)
    for one in wanted.neighbors:
        yield messages.neighbor(index, one)


def _index_of(rtnetlink: Rtnetlink, name: str) -> int:
    return next(one.index for one in read_links(rtnetlink) if one.name == name)


def _set_sysctl(name: str, link: str, value: int) -> None:
    path = sysctl_path(name, link)
    if path.exists():
        path.write_text(f"{value}\n")
