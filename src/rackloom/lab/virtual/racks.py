"""Simulated racks: the true fabric of each NVLink domain, its controllers, and the calls of its clients.

`SimRack` joins a fabric, its leading controller, its network and its faults. A standby controller may
take over at another address. The former leader may come back with the state that it remembers, or learn
that it no longer leads.

`SimSite` builds the racks of a site from a rack profile and a seed.
"""

import random
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from rackloom.lab.switches.fabric import (
    SeededNames,
    SimulatedFabric,
    fabrics_of,
    former_leader_fabric,
    standby_fabric,
)
from rackloom.lab.switches.faults import NmxcFaults
from rackloom.lab.switches.nmxc import NmxcService
from rackloom.lab.virtual.network import SimController, SimNetwork
from rackloom.topology.rack import NvlinkDomain, RackProfile, RackSite, build_site

SMALL_DOMAIN_RATE = 0.2
"""How often a domain holds no more than one to three partitions."""


class FormerLeader(msgspec.Struct, frozen=True):
    """A controller that led, how it is reached, and the fabric as it knew it."""

    url: str
    switch: SimController
    network: SimNetwork
    memory: SimulatedFabric


def _ignore_executed(_rpc: str, _request: Any, _reply: Any, _expected: bool) -> None:
    """Calls to a former leader are not recorded."""


class SimRack:
    """One domain: its fabric, its controller, and its history."""

    def __init__(self, domain: NvlinkDomain, fabric: SimulatedFabric, rng: random.Random) -> None:
        self.home = domain
        self.url = f"http://switch-{domain.racks[0]}"
        self.serials = frozenset(tray.chassis_serial for tray in domain.trays)
        self.fabric = fabric
        self.faults = NmxcFaults()
        self.network = SimNetwork(rng)
        self.switch = SimController(NmxcService(fabric, self.faults), self.network, self._executed)
        self.others: dict[str, SimController] = {}
        """Controllers of the domain that do not lead, by URL."""
        self._standby: SimNetwork | None = None
        self._old: FormerLeader | None = None
        self._moves = 0

    @property
    def name(self) -> str:
        """Short name for traces."""
        return self.home.racks[0]

    async def stand_by(self) -> str:
        """Have another controller ready to lead, and return its URL. It lists no GPU."""
        url = f"http://switch-{self.name}-{self._moves + 2}"
        if self._standby is None:
            self._standby = SimNetwork(self.network.rng)
            service = NmxcService(standby_fabric(self.fabric), NmxcFaults())
            self.others[url] = SimController(service, self._standby, self._executed)
        return url

    async def move(self) -> None:
        """Let the standby lead. The previous URL stops answering, and queued call fates move along."""
        url, old = await self.stand_by(), self.url
        assert self._standby is not None  # noqa: S101 (it was made ready)
        self.network.down = True
        self.switch.break_streams()
        self._old = FormerLeader(old, self.switch, self.network, former_leader_fabric(self.fabric))
        self.others[old], self.switch = self.switch, self.others.pop(url)
        self.switch.serve(NmxcService(self.fabric, self.faults))
        self._standby.next_mutations, self.network.next_mutations = self.network.next_mutations, deque()
        self.network, self._standby = self._standby, None
        self.url = url
        self._moves += 1

    async def old_leader_returns(self) -> str:
        """Let the former leader answer again at its URL, as leader, with the state it remembers."""
        if self._old is None:
            raise RuntimeError("the leader never moved")
        # Its changes apply to its own memory, not to the fabric.
        self._old.switch.serve(NmxcService(self._old.memory, NmxcFaults()), _ignore_executed)
        self._old.network.heal()
        return self._old.url

    async def old_leader_yields(self) -> None:
        """The former leader has learned that another one leads, and lists no GPU any more."""
        if self._old is not None:
            self._old.switch.serve(NmxcService(standby_fabric(self.fabric), NmxcFaults()), self._executed)

    async def go_away(self) -> None:
        """Calls are refused from now on, and subscriptions end."""
        self.network.down = True
        self.switch.break_streams()

    async def come_back(self) -> None:
        """Calls arrive again."""
        self.network.down = False

    def switch_at(self, url: str) -> SimController:
        """The controller at one of its URLs."""
        return self.switch if url == self.url else self.others[url]

    def limit(self, room: int | None) -> None:
        """Let the domain hold no more than `room` partitions, or as many as a real one if None."""
        if room is not None:
            self.fabric.limits = msgspec.structs.replace(self.fabric.limits, max_partitions=room)

    def disturb(self) -> None:
        """Another writer changes the fabric. A rack that is judged records it."""

    def _executed(self, rpc: str, request: Any, reply: Any, expected: bool) -> None:
        """A controller of the domain acted on a call. A rack that is judged records it."""


class SimSite:
    """All racks of a site."""

    def __init__(
        self,
        profile: RackProfile,
        racks: int,
        rng: random.Random,
        *,
        unmanaged_tray: bool,
        room: int | None = None,
        rack_class: type[SimRack] = SimRack,
    ) -> None:
        """With `unmanaged_tray`, the last tray of the first rack is on no machine that the site knows.

        `room` is how many partitions each domain holds.
        """
        names = SeededNames(f"sim-{rng.getrandbits(64):x}")
        self.profile = profile
        self.site: RackSite = build_site(profile, racks, names)
        self.racks = tuple(
            rack_class(domain, fabric, random.Random(rng.getrandbits(64)))  # noqa: S311
            for domain, fabric in zip(self.site.domains, fabrics_of(self.site, names.seed), strict=True)
        )
        for rack in self.racks:
            few = rng.randint(1, 3) if rng.random() < SMALL_DOMAIN_RATE else None
            rack.limit(room or few)
        if unmanaged_tray:
            first, *others = self.site.domains
            known = msgspec.structs.replace(first, trays=first.trays[:-1])
            self.site = msgspec.structs.replace(self.site, domains=(known, *others))

    @property
    def endpoints(self) -> Mapping[str, str]:
        """Domain uuid, as it was ordered, to controller URL."""
        return {rack.home.uuid: rack.url for rack in self.racks}

    def rack_at(self, url: str) -> SimRack:
        """The rack behind a controller URL."""
        return next(rack for rack in self.racks if url == rack.url or url in rack.others)
