"""From a NIC of the host and a wish to what is going to be lent. Reads, and changes nothing. Blocking."""

from collections.abc import Iterator

import msgspec

from rackloom.claim.allocate.objects import Device
from rackloom.claim.node.nic import dhcp, rdma
from rackloom.claim.node.nic.ethtool import in_kernel_names
from rackloom.claim.node.nic.lease import Lease
from rackloom.claim.node.nic.links import Link, read_links, read_settings
from rackloom.claim.node.nic.loans import Held
from rackloom.claim.node.nic.namespaces import OWN, inside
from rackloom.claim.node.nic.netlink import Rtnetlink
from rackloom.claim.node.nic.offered import Offered
from rackloom.claim.node.nic.settings import LinkSettings, in_pod
from rackloom.claim.opaque.ipv6_rules import SMALLEST_IPV6_MTU, needs_ipv6
from rackloom.claim.opaque.network import NetworkConfig
from rackloom.errors import Refused, Retry
from rackloom.topology.discovery.sysroot import Sysroot

AGAIN_SECONDS = 2.0


def hold(
    one: Offered, published: Device, config: NetworkConfig, sysroot: Sysroot, mode: rdma.NetnsMode
) -> tuple[Held, Lease | None]:
    """What a claim gets of a NIC, and the lease of its address where a DHCP server gave it.

    Raises `Refused` and, while its interface does not show, `Retry`.
    """
    if one.excluded is not None:
        raise Refused(
            f"NIC {one.name} is not for claims: {one.excluded}",
            nearest_fix="claim another NIC; `rackloom topology discover` on the node tells of each why not",
        )
    bare = Held(
        device=one.name,
        published=published,
        rdma=None if one.rdma is None else one.rdma.name,
        moves_rdma=one.rdma is not None and mode is rdma.NetnsMode.EXCLUSIVE,
    )
    if one.on is None:
        return _without_interface(one, config, bare), None
    _check_mtu(one, config, sysroot)
    _check_ipv6(one.on.link, config)
    given = _leased(one.on.link) if config.interface.asks_dhcp else None
    asked = config if given is None else _with_lease(config, given)
    return _with_interface(one.on.link, asked, bare), None if given is None else given.lease


def _without_interface(one: Offered, config: NetworkConfig, bare: Held) -> Held:
    if one.rdma is None:
        raise Retry(f"NIC {one.name} has no interface on the host now", after=AGAIN_SECONDS)
    if config.asks_for_a_netdev:
        raise Refused(
            f"NIC {one.name} has RDMA device {one.rdma.name} and no network interface to configure",
            nearest_fix="remove interface, routes, rules, neighbors and ethtool from its NetworkConfig",
        )
    return bare


def _with_interface(link: Link, config: NetworkConfig, bare: Held) -> Held:
    now, host = inside(OWN, lambda: _settings(link.name))
    pod = in_pod(config, host)
    changed = in_kernel_names(pod.features, host.features)
    kept = msgspec.structs.replace(
        host,
        features={name: on for name, on in host.features.items() if name in changed},
        private_flags={name: on for name, on in host.private_flags.items() if name in pod.private_flags},
    )
    return msgspec.structs.replace(bare, identity=now.identity(host, pod), host=kept, pod=pod)


def _settings(name: str) -> tuple[Link, LinkSettings]:
    with Rtnetlink() as rtnetlink:
        link = next((one for one in read_links(rtnetlink) if one.name == name), None)
        if link is None:
            raise Retry(f"interface {name} has just left the host", after=AGAIN_SECONDS)
        return link, read_settings(rtnetlink, link, features=True)


def _check_mtu(one: Offered, config: NetworkConfig, sysroot: Sysroot) -> None:
    """A virtual function's frames go out through the physical one."""
    wanted = config.interface.mtu
    if wanted is None or one.function is None or not one.function.virtual_function:
        return
    for mtu in _physical_mtus(sysroot, one.function.address):
        if wanted > mtu:
            raise Refused(
                f"interface.mtu is {wanted}, but the physical function below {one.name} has {mtu}",
                nearest_fix=f"ask for at most {mtu}, or raise the physical function's MTU",
            )


def _check_ipv6(link: Link, config: NetworkConfig) -> None:
    """Without an MTU in the config the interface keeps its own."""
    small = config.interface.mtu is None and link.mtu < SMALLEST_IPV6_MTU
    if small and needs_ipv6(config.interface):
        raise Refused(
            f"the config sets IPv6 on {link.name}, whose MTU is {link.mtu}: IPv6 needs {SMALLEST_IPV6_MTU}",
            nearest_fix=f"ask for interface.mtu {SMALLEST_IPV6_MTU} or more",
        )


def _leased(link: Link) -> dhcp.Leased:
    """What a DHCP server gives. It may take longer to answer than a runtime waits."""
    if link.encapsulation != "ether":
        raise Refused(
            f"interface {link.name} is no Ethernet ({link.encapsulation}): DHCP is for Ethernet here",
            nearest_fix="give interface.addresses, or none to keep those that the interface has on the host",
        )
    if not link.up:
        raise Retry(f"interface {link.name} is down: DHCP needs it up on the host", after=AGAIN_SECONDS)
    return inside(OWN, lambda: dhcp.ask(link.name))


def _with_lease(config: NetworkConfig, given: dhcp.Leased) -> NetworkConfig:
    interface = msgspec.structs.replace(config.interface, addresses=(given.lease.grant.address,))
    return msgspec.structs.replace(config, interface=interface, routes=(*given.routes, *config.routes))


def _physical_mtus(sysroot: Sysroot, address: str) -> Iterator[int]:
    at = f"/sys/bus/pci/devices/{address}/physfn/net"
    for name in sysroot.names(at):
        mtu = sysroot.number(f"{at}/{name}/mtu")
        if mtu is not None:
            yield mtu
