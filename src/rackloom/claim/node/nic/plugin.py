"""The plugin of dra.net.

Preparing only reads: what the NIC has on the host, and what the claim wants of it, go into the checkpoint.
The NIC moves when the pod's sandbox is there (`sandboxes`), and is back before the claim is unprepared.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec
import structlog

from rackloom.claim.allocate.objects import Device
from rackloom.claim.node.nic import rdma
from rackloom.claim.node.nic.attributes import device, merged
from rackloom.claim.node.nic.condition import health_of
from rackloom.claim.node.nic.extras import Extras, with_extras
from rackloom.claim.node.nic.filtering import Filter, everything, kept
from rackloom.claim.node.nic.lease import Lease
from rackloom.claim.node.nic.leases import LeaseRecord
from rackloom.claim.node.nic.lender import Lender
from rackloom.claim.node.nic.loans import Held, Record
from rackloom.claim.node.nic.look import Look, Seen
from rackloom.claim.node.nic.offered import Offered, offered
from rackloom.claim.node.nic.partners import gpu_partners, rails
from rackloom.claim.node.nic.pci_names import PciNames
from rackloom.claim.node.nic.preparing import hold
from rackloom.claim.node.nic.profiles import NO_PROFILES, Profiles
from rackloom.claim.node.nic.sandboxes import Prepared as ForPod
from rackloom.claim.node.nic.watching import link_changes
from rackloom.claim.node.nic.wishes import check, config_of, pod_of
from rackloom.claim.node.values import (
    Claim,
    DeviceHealth,
    Edits,
    Entry,
    Pool,
    Prepared,
    PreparedDevice,
    Result,
    State,
)
from rackloom.errors import Refused, Retry
from rackloom.topology.discovery.nics import POD_ENDS, ClusterNetwork

DRIVER = "dra.net"
KIND = "nic"
LOOK_SECONDS = 60.0
SETTLE_SECONDS = 2.0
log = structlog.get_logger(__name__)


class NicSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is fixed for one node."""

    node: str
    moves_ipoib: bool = True
    """Whether an IPoIB interface goes into the pod with its device, or the RDMA device alone is lent."""
    is_published: Filter = everything
    names: PciNames = PciNames()
    profiles: Profiles = NO_PROFILES
    extras: Extras = msgspec.field(default_factory=dict)


class NicPlugin:
    """The NICs of one node."""

    driver = DRIVER
    kinds = (KIND,)

    def __init__(
        self,
        settings: NicSettings,
        look: Look,
        lender: Lender,
        wall: Callable[[], float],
        network: Callable[[], Awaitable[ClusterNetwork]],
    ) -> None:
        self._settings = settings
        self._network = network
        self._look = look
        self._lender = lender
        self._wall = wall
        self._mode = rdma.netns_mode()
        self._reasons: dict[str, str] = {}
        """Why interfaces are not published, as it was logged last."""
        self.prepared: dict[str, ForPod] = {}
        """Claims that are ready for their pods, by UID."""

    def remember(self, entries: Iterable[Entry]) -> None:
        """Take up what the checkpoint holds, before anything is published or lent."""
        for entry in entries:
            if entry.state is State.COMPLETED and not entry.undoing:
                record = msgspec.convert(entry.record, Record)
                self.prepared[entry.ref.uid] = ForPod(ref=entry.ref, pod=record.pod, nics=record.nics)

    def missing(self) -> str | None:
        """Nothing: the kernel has the NICs that it has."""
        return None

    async def pools(self) -> tuple[Pool, ...]:
        """The node's pool: what can be claimed, and what is claimed, with the attributes of either."""
        seen = await self._now()
        found = self._offered(seen)
        live = kept(_devices(self._settings, seen, found).values(), self._settings.is_published)
        held = {nic.device: nic.published for one in self.prepared.values() for nic in one.nics}
        return (Pool(name=self._settings.node, devices=merged(live.values(), held.values())),)

    def intent(self, claim: Claim) -> Mapping[str, Any]:
        """The pod. Refuses a claim that asks for what can never be."""
        check(claim, self._settings.profiles)
        return {"pod": pod_of(claim)}

    async def prepare(self, claim: Claim) -> Prepared:
        """Read what the NICs have and write down what they are to get."""
        seen = await self._now()
        found = {one.name: one for one in self._offered(seen)}
        live = _devices(self._settings, seen, found.values())
        nics = [await self._hold(claim, result, found, live) for result in claim.results]
        record = Record(pod=pod_of(claim), nics=tuple(nics))
        self.prepared[claim.ref.uid] = ForPod(ref=claim.ref, pod=record.pod, nics=record.nics)
        devices = (self._device(result, nic) for result, nic in zip(claim.results, nics, strict=True))
        return Prepared(devices=tuple(devices), record=msgspec.to_builtins(record))

    async def changes(self, claim: Claim) -> AsyncIterator[None]:
        """Nothing that is waited for is told of."""
        nothing: tuple[None, ...] = ()
        for one in nothing:
            yield one

    async def unprepare(self, entry: Entry, others: Collection[Entry]) -> None:
        """Take the NICs back from the pod, if they are still there. Raises `Retry`."""
        self.prepared.pop(entry.ref.uid, None)
        for loan in self._lender.loans.of_claim(entry.ref.uid):
            await self._lender.take_back(loan)
        await self._lender.end_leases(entry.ref.uid)

    async def tidy(self, claims: Collection[Entry]) -> None:
        """Take back what is lent for claims that nobody knows any more."""
        known = {entry.ref.uid for entry in claims}
        for loan in self._lender.loans.all():
            if loan.claim not in known:
                await self._lender.try_take_back(loan)
        lent = {loan.claim for loan in self._lender.loans.all()}
        for record in self._lender.leases.all():
            if record.ref.uid not in known | lent:
                await self._lender.end_leases(record.ref.uid)

    async def run(self, wake: Callable[[], None]) -> None:
        """Publish anew when a link changed and once a minute; take back what lost its pod meanwhile."""
        async for _ in link_changes(settle=SETTLE_SECONDS, at_least_every=LOOK_SECONDS):
            await self._lender.take_back_lost()
            wake()

    async def health(self) -> tuple[DeviceHealth, ...]:
        """Whether each NIC has a link. One that is not published is unknown, and says why."""
        seen = await self._now()
        at, found = self._wall(), self._offered(seen)
        return tuple(health_of(one, self._settings.node, at) for one in found if not _is_pod_end(one))

    async def _now(self) -> Seen:
        self._look.cluster = await self._network()
        try:
            return await asyncio.to_thread(self._look)
        except OSError as error:
            raise Retry(f"the node's interfaces cannot be read: {error}", after=SETTLE_SECONDS) from error

    def _offered(self, seen: Seen) -> tuple[Offered, ...]:
        """Logs what has changed since the last look, but no ends of pods' interfaces, which come and go."""
        found = offered(seen, moves_ipoib=self._settings.moves_ipoib)
        reasons = {one.name: one.excluded for one in found if one.excluded and not _is_pod_end(one)}
        for one in found:
            before, now = self._reasons.get(one.name), reasons.get(one.name)
            if now is not None and now != before:
                log.info("nic.not-published", device=one.name, interface=_interface(one), reason=now)
            elif before is not None and one.excluded is None:
                log.info("nic.published-again", device=one.name, interface=_interface(one), was=before)
        self._reasons = reasons
        return found

    async def _hold(
        self, claim: Claim, result: Result, found: Mapping[str, Offered], live: Mapping[str, Device]
    ) -> Held:
        """Its lease is kept at once, so that it is given back also when the next NIC fails."""
        one = found.get(result.device)
        if one is None:
            raise Retry(f"there is no NIC {result.device} on this node now", after=SETTLE_SECONDS)
        if any(loan.nic.device == one.name for loan in self._lender.loans.all()):
            raise Retry(f"NIC {one.name} is not back from its last pod yet", after=SETTLE_SECONDS)
        config = config_of(claim, result, self._settings.profiles)
        published = live.get(one.name) or Device(name=one.name)
        try:
            work = asyncio.to_thread(hold, one, published, config, self._look.sysroot, self._mode)
            nic, lease = await work
        except OSError as error:
            raise Refused(f"NIC {one.name} cannot be read: {error}") from error
        if lease is not None:
            self._keep(claim, nic, lease)
        return nic

    def _keep(self, claim: Claim, nic: Held, lease: Lease) -> None:
        (pod,) = claim.consumers
        leases = self._lender.leases
        record = LeaseRecord(
            ref=claim.ref, pod=pod.uid, pod_name=pod.name, nic=nic, lease=lease, boot_id=leases.boot_id
        )
        leases.put(record)

    def _device(self, result: Result, nic: Held) -> PreparedDevice:
        nodes = () if nic.rdma is None else rdma.device_nodes(self._look.sysroot, nic.rdma)
        return PreparedDevice(result=result, kind=KIND, edits=Edits(device_nodes=nodes))


def _devices(settings: NicSettings, seen: Seen, found: Iterable[Offered]) -> dict[str, Device]:
    """Devices by name, without those that are excluded."""
    partners, on_rail = gpu_partners(seen.machine), rails(seen.machine)
    shown = (
        device(one, seen, settings.names, partners.get(_index(one)), on_rail.get(_index(one)))
        for one in found
        if one.excluded is None
    )
    return {one.name: with_extras(one, settings.extras) for one in shown}


def _is_pod_end(one: Offered) -> bool:
    return one.excluded is not None and one.on is not None and one.on.link.kind in POD_ENDS


def _interface(one: Offered) -> str | None:
    return None if one.on is None else one.on.link.name


def _index(one: Offered) -> int:
    return -1 if one.nic is None else one.nic.index
