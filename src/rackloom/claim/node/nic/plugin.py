"""The driver dra.net: publishing NICs and preparing claims for them.

Preparing only reads. It resolves the claim's configuration (the last one wins, so the claim's over its
class's) and refuses configurations that can never be served (more than one pod, an MTU above that of the
physical function, IPv6 on a smaller MTU than 1280, settings for a NIC without an interface). It requests a
DHCP lease if the configuration wants one, and records the NIC's settings on the host and those for the pod.
The NIC moves when the pod's sandbox exists (`attach`), and is back before the claim is unprepared. With
`interface.type` IPVLAN or MACVLAN it stays, and the pod gets a child of it.

DHCP runs during preparation because a server may take longer to answer than a runtime waits for a
sandbox. A lease is stored at once, so that it is released also when the next NIC of the claim fails.

The pool holds the NICs that can be claimed or are claimed. A NIC that is in a pod keeps its published
attributes. Slices are published again when a link changes, and once a minute.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from rackloom.claim.node.nic import rdma
from rackloom.claim.node.nic.attach import AttachmentManager, ReadyClaim
from rackloom.claim.node.nic.config import (
    NO_PROFILES,
    Profiles,
    PublishFilter,
    StatedAttributes,
    publish_everything,
    with_stated_attributes,
)
from rackloom.claim.node.nic.datapath import kernel_feature_names
from rackloom.claim.node.nic.inventory import HostScanner, link_changes, nic_health
from rackloom.claim.node.nic.leases import LeasedAddress, LeaseRecord
from rackloom.claim.node.nic.links import read_links, read_settings
from rackloom.claim.node.nic.metadata import CloudWatcher
from rackloom.claim.node.nic.netlink import HOST_NAMESPACE, Rtnetlink, in_namespace
from rackloom.claim.node.plugin import (
    CheckpointEntry,
    ContainerEdits,
    DeviceHealth,
    DevicePool,
    NodePlugin,
    PreparedClaim,
    PreparedDevice,
    PrepareState,
)
from rackloom.claim.node.tasks import run_background, to_the_end
from rackloom.core.allocate.objects import Device
from rackloom.core.cluster.claims import AllocatedClaim, AllocatedDevice
from rackloom.core.domains.network_config import (
    SMALLEST_IPV6_MTU,
    NetworkConfig,
    decode_network_config,
    needs_ipv6,
)
from rackloom.core.nics.attachment import (
    LinkIdentity,
    LinkSettings,
    NetworkLink,
    NicRecord,
    PreparedNic,
    child_identity,
    find_link,
    pod_settings,
)
from rackloom.core.nics.cloud import NO_CLOUD_ATTRIBUTES, CloudAttributes, with_cloud_attributes
from rackloom.core.nics.devices import (
    HostNic,
    NicSnapshot,
    PciNames,
    fit_attributes,
    gpu_partners,
    host_nics,
    merge_devices,
    nic_device,
    rail_numbers,
)
from rackloom.core.nics.lease import DhcpLease
from rackloom.errors import Refused, Retry
from rackloom.topology.discovery.sysfs import Sysroot
from rackloom.topology.nics import POD_INTERFACE_KINDS, ClusterNetwork

# The requests of a claim. Pure.


def consuming_pod(claim: AllocatedClaim) -> str:
    """UID of the one pod that may use the claim: an interface is in one namespace at a time."""
    if len(claim.consumers) != 1:
        raise Refused(
            f"claim {claim.ref} is reserved for {len(claim.consumers)} consumers; a NIC serves one pod",
            nearest_fix="give each pod a claim of its own, with a ResourceClaimTemplate",
        )
    (consumer,) = claim.consumers
    if consumer.resource != "pods":
        raise Refused(f"claim {claim.ref} is for {consumer.resource}, not a pod")
    return consumer.uid


def nic_config(
    claim: AllocatedClaim, result: AllocatedDevice, profiles: Profiles = NO_PROFILES
) -> NetworkConfig:
    """The configuration of one NIC: the last that applies, so that the claim wins over its class."""
    configs = [decode_network_config(written.parameters) for written in claim.configs_for(result)]
    return profiles.applied_to(configs[-1]) if configs else NetworkConfig()


# From a NIC and a configuration to the NIC that is attached later.


NIC_RETRY_SECONDS = 2.0


def prepare_nic(
    host_nic: HostNic, published: Device, config: NetworkConfig, sysroot: Sysroot, mode: rdma.NetnsMode
) -> tuple[PreparedNic, DhcpLease | None]:
    """A claim's settings for a NIC, and the lease of its address if a DHCP server gave it.

    Raises `Refused` and, while its interface does not show, `Retry`.
    """
    if host_nic.excluded is not None:
        raise Refused(
            f"NIC {host_nic.name} is not for claims: {host_nic.excluded}",
            nearest_fix="claim another NIC; `rackloom topology discover` on the node tells of each why not",
        )
    nodes = () if host_nic.rdma is None else rdma.rdma_device_nodes(sysroot, host_nic.rdma.name)
    if host_nic.rdma is not None and not any("uverbs" in node.path for node in nodes):
        raise Refused(
            f"NIC {host_nic.name} has no uverbs device for RDMA device {host_nic.rdma.name}",
            nearest_fix="load the kernel module ib_uverbs on the node",
        )
    bare = PreparedNic(
        device=host_nic.name,
        published=published,
        rdma=None if host_nic.rdma is None else host_nic.rdma.name,
        moves_rdma=host_nic.rdma is not None and mode is rdma.NetnsMode.EXCLUSIVE,
        below=host_nic.below,
    )
    if host_nic.on is None:
        return _without_interface(host_nic, config, bare), None
    _check_mtu(host_nic, config, sysroot)
    _check_ipv6(host_nic.on.link, config)
    if config.interface.type.is_child:
        return _with_child(host_nic.on.link, config, bare, mode), None
    if not config.interface.asks_dhcp:
        return _with_interface(host_nic.on.link, config, bare), None
    leased = _request_address(host_nic.on.link)
    interface = msgspec.structs.replace(config.interface, addresses=(leased.lease.grant.address,))
    routes = (*leased.routes, *config.routes)
    config = msgspec.structs.replace(config, interface=interface, routes=routes)
    return _with_interface(host_nic.on.link, config, bare), leased.lease


def _without_interface(host_nic: HostNic, config: NetworkConfig, bare: PreparedNic) -> PreparedNic:
    if host_nic.rdma is None:
        raise Retry(f"NIC {host_nic.name} has no interface on the host now", after=NIC_RETRY_SECONDS)
    if config.asks_for_a_netdev:
        raise Refused(
            f"NIC {host_nic.name} has RDMA device {host_nic.rdma.name} and no network interface to configure",
            nearest_fix="remove interface, routes, rules, neighbors and ethtool from its NetworkConfig",
        )
    return bare


def _with_interface(link: NetworkLink, config: NetworkConfig, bare: PreparedNic) -> PreparedNic:
    now, host = in_namespace(HOST_NAMESPACE, lambda: _read_link_settings(link.name))
    pod = pod_settings(config, host)
    changed = kernel_feature_names(pod.features, host.features)
    kept = msgspec.structs.replace(
        host,
        features={name: on for name, on in host.features.items() if name in changed},
        private_flags={name: on for name, on in host.private_flags.items() if name in pod.private_flags},
    )
    return msgspec.structs.replace(bare, identity=now.identity(host, pod), host=kept, pod=pod)


def _with_child(
    link: NetworkLink, config: NetworkConfig, bare: PreparedNic, mode: rdma.NetnsMode
) -> PreparedNic:
    """The interface stays on the host. Its RDMA device can be lent only if all namespaces share it."""
    interface = config.interface
    if interface.mtu is not None and interface.mtu > link.mtu:
        raise Refused(
            f"interface.mtu is {interface.mtu}, but {link.name}, whose child the pod gets, has {link.mtu}",
            nearest_fix=f"ask for at most {link.mtu}, or raise the MTU of {link.name} on the host",
        )
    if not link.up:
        raise Retry(f"interface {link.name} is down: a child of it needs it up", after=NIC_RETRY_SECONDS)
    pod = pod_settings(config, LinkSettings(name=link.name))
    return msgspec.structs.replace(
        bare,
        identity=child_identity(link, interface.type.value.lower(), bare.device),
        pod=pod,
        over=link.identity(),
        rdma=None if mode is rdma.NetnsMode.EXCLUSIVE else bare.rdma,
        moves_rdma=False,
    )


def _read_link_settings(name: str) -> tuple[NetworkLink, LinkSettings]:
    with Rtnetlink() as rtnetlink:
        link = next((read_link for read_link in read_links(rtnetlink) if read_link.name == name), None)
        if link is None:
            raise Retry(f"interface {name} has just left the host", after=NIC_RETRY_SECONDS)
        return link, read_settings(rtnetlink, link, features=True)


def _check_mtu(host_nic: HostNic, config: NetworkConfig, sysroot: Sysroot) -> None:
    """A virtual function's frames go out through the physical one."""
    wanted = config.interface.mtu
    if wanted is None or host_nic.function is None or not host_nic.function.virtual_function:
        return
    interfaces = f"/sys/bus/pci/devices/{host_nic.function.address}/physfn/net"
    for name in sysroot.names(interfaces):
        mtu = sysroot.number(f"{interfaces}/{name}/mtu")
        if mtu is not None and wanted > mtu:
            raise Refused(
                f"interface.mtu is {wanted}, but the physical function below {host_nic.name} has {mtu}",
                nearest_fix=f"ask for at most {mtu}, or raise the physical function's MTU",
            )


def _check_ipv6(link: NetworkLink, config: NetworkConfig) -> None:
    """Without an MTU in the config the interface keeps its own."""
    small = config.interface.mtu is None and link.mtu < SMALLEST_IPV6_MTU
    if small and needs_ipv6(config.interface):
        raise Refused(
            f"the config sets IPv6 on {link.name}, whose MTU is {link.mtu}: IPv6 needs {SMALLEST_IPV6_MTU}",
            nearest_fix=f"ask for interface.mtu {SMALLEST_IPV6_MTU} or more",
        )


def _request_address(link: NetworkLink) -> LeasedAddress:
    """The grant of a DHCP server. The server may take longer to answer than a runtime waits."""
    if link.encapsulation != "ether":
        raise Refused(
            f"interface {link.name} is no Ethernet ({link.encapsulation}): DHCP is for Ethernet here",
            nearest_fix="give interface.addresses, or none to keep those that the interface has on the host",
        )
    if not link.up:
        raise Retry(f"interface {link.name} is down: DHCP needs it up on the host", after=NIC_RETRY_SECONDS)
    from rackloom.claim.node.nic import dhcp

    return in_namespace(HOST_NAMESPACE, lambda: dhcp.request_lease(link.name))


# The driver.


NIC_DRIVER = "dra.net"
NIC_KIND = "nic"
PUBLISH_SECONDS = 60.0
SETTLE_SECONDS = 2.0
log = structlog.get_logger(__name__)


class NicSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that are fixed for one node."""

    node: str
    moves_ipoib: bool = True
    """Whether an IPoIB interface goes into the pod with its RDMA device, or the RDMA device goes alone."""
    is_published: PublishFilter = publish_everything
    names: PciNames = PciNames()
    profiles: Profiles = NO_PROFILES
    extras: StatedAttributes = msgspec.field(default_factory=dict)


@dataclass(eq=False)
class NicPlugin(NodePlugin):
    """The NICs of one node."""

    driver = NIC_DRIVER
    kinds = (NIC_KIND,)

    settings: NicSettings
    scanner: HostScanner
    manager: AttachmentManager
    wall: Callable[[], float]
    network: Callable[[], Awaitable[ClusterNetwork]]
    cloud: CloudWatcher | None = None
    """None outside the clouds that can be read."""
    _mode: rdma.NetnsMode = field(default_factory=rdma.netns_mode, init=False)
    _reasons: dict[str, str] = field(default_factory=dict, init=False)
    """Why interfaces are not published, as logged last."""
    prepared: dict[str, ReadyClaim] = field(default_factory=dict, init=False)
    """Claims that are ready for their pods, by UID."""

    def remember(self, entries: Iterable[CheckpointEntry]) -> None:
        """Read the prepared claims from the checkpoint, before anything is published or attached."""
        for entry in entries:
            if entry.state is PrepareState.COMPLETED and not entry.undoing:
                record = msgspec.convert(entry.record, NicRecord)
                self.prepared[entry.ref.uid] = ReadyClaim(ref=entry.ref, pod=record.pod, nics=record.nics)

    async def pools(self) -> tuple[DevicePool, ...]:
        """The node's pool: NICs that can be claimed or are claimed, with their attributes."""
        snapshot = await self._scan()
        devices = self._published(snapshot, self._host_nics(snapshot))
        live = [device for device in devices.values() if self.settings.is_published(device)]
        held = [nic.published for claim in self.prepared.values() for nic in claim.nics]
        return (DevicePool(name=self.settings.node, devices=merge_devices(live, held)),)

    def intent(self, claim: AllocatedClaim) -> Mapping[str, Any]:
        """The pod. Refuses a claim that can never be prepared."""
        pod = consuming_pod(claim)
        for result in claim.results:
            nic_config(claim, result, self.settings.profiles)
        return {"pod": pod}

    async def prepare(self, claim: AllocatedClaim) -> PreparedClaim:
        """Read the NICs' settings, and record those that they get in the pod."""
        snapshot = await self._scan()
        found = {host_nic.name: host_nic for host_nic in self._host_nics(snapshot)}
        live = self._published(snapshot, found.values())
        nics = [await self._prepare_nic(claim, result, found, live) for result in claim.results]
        record = NicRecord(pod=consuming_pod(claim), nics=tuple(nics))
        self.prepared[claim.ref.uid] = ReadyClaim(ref=claim.ref, pod=record.pod, nics=record.nics)
        devices = (self._device(result, nic) for result, nic in zip(claim.results, nics, strict=True))
        return PreparedClaim(devices=tuple(devices), record=msgspec.to_builtins(record))

    async def unprepare(self, entry: CheckpointEntry, others: Collection[CheckpointEntry]) -> None:
        """Detach the NICs from the pod, if they are still there. Raises `Retry`."""
        self.prepared.pop(entry.ref.uid, None)
        for attachment in self.manager.attachments.of_claim(entry.ref.uid):
            await self.manager.detach(attachment)
        await self.manager.release_leases(entry.ref.uid)

    async def tidy(self, claims: Collection[CheckpointEntry]) -> None:
        """Detach the NICs of claims that are not in the checkpoint, then release their leases."""
        known = {entry.ref.uid for entry in claims}
        for attachment in self.manager.attachments.all():
            if attachment.claim not in known:
                await self.manager.try_detach(attachment)
        # A lease is kept while its address may still be on an interface.
        known |= {attachment.claim for attachment in self.manager.attachments.all()}
        for record in self.manager.leases.all():
            if record.claim not in known:
                await self.manager.release_leases(record.claim)

    async def run(self, wake: Callable[[], None]) -> None:
        """Publish again after a link change and once a minute. Detach NICs that have lost their pods."""
        async with run_background(*(() if self.cloud is None else (self.cloud.watch(wake),))):
            async for _ in link_changes(settle=SETTLE_SECONDS, at_least_every=PUBLISH_SECONDS):
                await self.manager.detach_lost()
                wake()

    async def health(self) -> tuple[DeviceHealth, ...]:
        """Whether each NIC has a link. A NIC that is not published is unknown, with the reason."""
        found = self._host_nics(await self._scan())
        at = self.wall()
        return tuple(nic_health(nic, self.settings.node, at) for nic in found if not _is_pod_end(nic))

    def _published(self, snapshot: NicSnapshot, found: Iterable[HostNic]) -> dict[str, Device]:
        cloud = NO_CLOUD_ATTRIBUTES if self.cloud is None else self.cloud.known
        return _published_devices(self.settings, snapshot, found, cloud)

    async def _scan(self) -> NicSnapshot:
        self.scanner.cluster = await self.network()
        try:
            return await asyncio.to_thread(self.scanner)
        except OSError as error:
            raise Retry(f"the node's interfaces cannot be read: {error}", after=SETTLE_SECONDS) from error

    def _host_nics(self, snapshot: NicSnapshot) -> tuple[HostNic, ...]:
        """All NICs. Logs which are newly excluded or published, but not the ends of pods' interfaces."""
        attached = [attachment.nic for attachment in self.manager.attachments.all()]
        away = {nic.device: nic.identity for nic in attached if nic.identity is not None and nic.over is None}
        held = [*attached, *(nic for claim in self.prepared.values() for nic in claim.nics)]
        seen = host_nics(snapshot, moves_ipoib=self.settings.moves_ipoib)
        found = tuple(_unless_held(_without_lent_ports(nic, away), held) for nic in seen)
        reasons = {nic.name: nic.excluded for nic in found if nic.excluded and not _is_pod_end(nic)}
        for nic in found:
            before, now = self._reasons.get(nic.name), reasons.get(nic.name)
            about = {"device": nic.name, "interface": None if nic.on is None else nic.on.link.name}
            if now is not None and now != before:
                log.info("nic.not-published", **about, reason=now)
            elif before is not None and nic.excluded is None:
                log.info("nic.published-again", **about, was=before)
        self._reasons = reasons
        return found

    async def _prepare_nic(
        self,
        claim: AllocatedClaim,
        result: AllocatedDevice,
        found: Mapping[str, HostNic],
        live: Mapping[str, Device],
    ) -> PreparedNic:
        name, sysroot = result.device, self.scanner.sysroot
        host_nic = found.get(name)
        if host_nic is None:
            raise Retry(f"there is no NIC {name} on this node now", after=SETTLE_SECONDS)
        if any(attachment.nic.device == name for attachment in self.manager.attachments.all()):
            raise Retry(f"NIC {name} is not back from its last pod yet", after=SETTLE_SECONDS)
        config = nic_config(claim, result, self.settings.profiles)
        published = live.get(name) or Device(name=name)

        async def prepared() -> PreparedNic:
            try:
                nic, lease = await asyncio.to_thread(
                    prepare_nic, host_nic, published, config, sysroot, self._mode
                )
            except OSError as error:
                raise Refused(f"NIC {name} cannot be read: {error}") from error
            if lease is not None:
                await self._keep_lease(claim, nic, lease)
            return nic

        # A lease that comes after the attempt was given up is kept too: it has to be released.
        return await to_the_end(prepared())

    async def _keep_lease(self, claim: AllocatedClaim, nic: PreparedNic, lease: DhcpLease) -> None:
        """Write it to disk at once, so that it is released also when the next NIC of the claim fails.

        One that cannot be written is released now.
        """
        leases, (pod,) = self.manager.leases, claim.consumers
        record = LeaseRecord(
            ref=claim.ref, pod=pod.uid, pod_name=pod.name, nic=nic, lease=lease, boot_id=leases.boot_id
        )
        try:
            leases.put(record)
        except OSError as error:
            await self.manager.release(record)
            raise Retry(
                f"the lease of NIC {nic.device} cannot be written: {error}", after=NIC_RETRY_SECONDS
            ) from error

    def _device(self, result: AllocatedDevice, nic: PreparedNic) -> PreparedDevice:
        nodes = () if nic.rdma is None else rdma.rdma_device_nodes(self.scanner.sysroot, nic.rdma)
        return PreparedDevice(result=result, kind=NIC_KIND, edits=ContainerEdits(device_nodes=nodes))


def _published_devices(
    settings: NicSettings,
    snapshot: NicSnapshot,
    found: Iterable[HostNic],
    cloud: CloudAttributes = NO_CLOUD_ATTRIBUTES,
) -> dict[str, Device]:
    """Devices by name, without those that are excluded."""
    partners, rails = gpu_partners(snapshot.machine), rail_numbers(snapshot.machine)
    devices = {}
    for host_nic in found:
        if host_nic.excluded is None:
            index = -1 if host_nic.nic is None else host_nic.nic.index
            device = nic_device(host_nic, snapshot, settings.names, partners.get(index), rails.get(index))
            link = None if host_nic.on is None else host_nic.on.link
            macs = () if link is None else (link.mac, link.permanent_mac)
            device = with_cloud_attributes(device, macs, cloud)
            devices[device.name] = fit_attributes(with_stated_attributes(device, settings.extras))
    return devices


def _without_lent_ports(host_nic: HostNic, away: Mapping[str, LinkIdentity]) -> HostNic:
    """The NIC without a port, and its speed, that it would show only because its interface is in a pod."""
    if host_nic.on is None:
        return host_nic
    identity, link = away.get(host_nic.name), host_nic.on.link
    if identity is not None and find_link((link,), identity) is None:
        nic = host_nic.nic and msgspec.structs.replace(host_nic.nic, line_rate_gbps=None)
        return msgspec.structs.replace(host_nic, on=None, nic=nic)
    # Subfunctions, virtio and VMBus have no PCI parent, and an InfiniBand parent has a kind.
    may_be_away = any(lent.parent or not lent.kind for lent in away.values())
    if link.over is not None and host_nic.excluded is None and may_be_away:
        reason = "sends through an interface of another namespace, which may be a NIC in a pod"
        return msgspec.structs.replace(host_nic, excluded=reason)
    return host_nic


def _unless_held(host_nic: HostNic, held: Iterable[PreparedNic]) -> HostNic:
    """The NIC, excluded if a claim holds an interface above it."""
    holder = next((nic.device for nic in held if host_nic.name in nic.below), None)
    if holder is None or host_nic.excluded is not None:
        return host_nic
    return msgspec.structs.replace(host_nic, excluded=f"carries {holder}, which a claim holds")


def _is_pod_end(host_nic: HostNic) -> bool:
    return (
        host_nic.excluded is not None
        and host_nic.on is not None
        and host_nic.on.link.kind in POD_INTERFACE_KINDS
    )
