"""The service in virtual time, with one NMX-M for all racks instead of an NMX-C on each."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from rackloom.carve.fabric.nmxm.driver import NmxmDriver
from rackloom.carve.fabric.nmxm.session import Login
from rackloom.carve.site.controllers import NMX_M_PATH
from rackloom.carve.site.fabric_book import Endpoint
from rackloom.carve.site.store.backend import Backend
from rackloom.twin.switches.nmxm_service import NmxmService
from rackloom.twin.virtual.life import Life
from rackloom.twin.virtual.plane import NOBODY_THERE, SimPlane, WatchedDriver
from rackloom.twin.virtual.world import SimNetwork, SimWorld

ORIGIN = "http://nmx-m"
OPERATION_SECONDS = 0.5
"""How long an accepted change takes: others may write meanwhile."""
_LOGIN = Login("rw-user", "simulated")


def speak_nmxm(world: SimWorld) -> None:
    """Let every rack of a world be reached through the one NMX-M."""
    for rack in world.racks:
        rack.url = f"{ORIGIN}{NMX_M_PATH}?domain={rack.fabric.domain}"


class NmxmPlane(SimPlane):
    """A plane whose racks `speak_nmxm`."""

    def __init__(
        self, world: SimWorld, apps: Sequence[Any], records: Backend, rng: random.Random, interval: float
    ) -> None:
        super().__init__(world, apps, records, rng, interval)
        fabrics = tuple(rack.fabric for rack in world.racks)
        self._service = NmxmService(
            fabrics, username=_LOGIN.username, password=_LOGIN.password, seconds=OPERATION_SECONDS
        )

    def _driver(self, life: Life, clock: Callable[[], float], endpoint: Endpoint) -> WatchedDriver:
        base, _, domain = endpoint.url.partition("?domain=")
        network = self.world.rack_at(endpoint.url).network
        wire = NmxmWire(self._service, network, life.checkpoint)
        driver = NmxmDriver(base, _login, clock=clock, domain=domain, transport=wire)
        return WatchedDriver(driver, self.world, self.outcomes[endpoint.url], life)


class NmxmWire(httpx2.AsyncBaseTransport):
    """Requests straight into the simulated NMX-M, as late as the network in front of a rack lets them be."""

    def __init__(self, service: NmxmService, network: SimNetwork, checkpoint: Callable[[], None]) -> None:
        self._inner = httpx2.ASGITransport(service)
        self._network = network
        self._checkpoint = checkpoint

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer one request. Raises ConnectError while nobody can be reached."""
        self._checkpoint()
        if self._network.down:
            await asyncio.sleep(NOBODY_THERE)
            raise httpx2.ConnectError("nobody listens", request=request)
        await asyncio.sleep(self._network.delay())
        answer = await self._inner.handle_async_request(request)
        await asyncio.sleep(self._network.delay())
        self._checkpoint()
        return answer


async def _login() -> Login:
    return _LOGIN
