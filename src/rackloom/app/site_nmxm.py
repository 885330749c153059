"""The NMX-M of `[nvlink_config]`: one for the whole site, whose chassis need not be registered one by one.

Every chassis that it names and that no endpoint speaks for yet becomes an endpoint of its domain; a chassis
with an NMX-C endpoint keeps it, so that a site may move from one to the other rack by rack.
"""

import asyncio
from collections.abc import Callable

import sqlalchemy as sa
import structlog

from rackloom.app.config_sections import NvlinkConfig
from rackloom.app.switches import Switches
from rackloom.carve.fabric.nmxm import wire
from rackloom.carve.fabric.nmxm.reading import Lists, domains_of
from rackloom.carve.fabric.ports import FabricRefused, FabricUnavailable
from rackloom.carve.reconcile.meter import Meter
from rackloom.carve.site import endpoint_registry, endpoints
from rackloom.carve.site.controllers import ControllerKind, url_of_kind
from rackloom.carve.site.endpoints import Endpoint
from rackloom.carve.site.operator_steps import Order
from rackloom.carve.site.store import Store
from rackloom.carve.site.values import Ids

log = structlog.get_logger(__name__)

NONE = "localhost"
"""The default of upstream's key, by which it says that there is no NMX-M."""
SUBJECT = "nvlink_config.nmx_m_endpoint"


def url_of(config: NvlinkConfig) -> str | None:
    """Where the site's NMX-M is; None without one. Raises Refused for what is no address."""
    named = config.nmx_m_endpoint
    return None if named == NONE else url_of_kind(named, ControllerKind.NMX_M)


class SiteNmxm:
    """Looks which chassis the NMX-M at `url` names, now and every `interval` seconds."""

    def __init__(
        self,
        url: str,
        switches: Switches,
        store: Store,
        clock: Callable[[], float],
        ids: Ids,
        interval: float,
        meter: Meter,
    ) -> None:
        self._url = url
        self._switches = switches
        self._store = store
        self._clock = clock
        self._ids = ids
        self._interval = interval
        self._meter = meter

    async def run(self, endpoints_changed: Callable[[], None]) -> None:
        """Look until cancelled; `endpoints_changed` hears of new endpoints."""
        while True:
            try:
                if await self.enrol():
                    endpoints_changed()
            except (FabricRefused, FabricUnavailable) as trouble:
                self._meter.unreachable(SUBJECT, str(trouble))
                log.warning("nmxm.unreachable", url=self._url, reason=str(trouble))
            except Exception:
                log.exception("nmxm.failed", url=self._url)
            await asyncio.sleep(self._interval)

    async def enrol(self) -> tuple[str, ...]:
        """Ask once; returns the chassis that have an endpoint now and had none.

        Raises FabricUnavailable and FabricRefused when NMX-M does not answer.
        """
        session = await self._switches.nmxm_session(
            Endpoint(id=SUBJECT, url=self._url, chassis_serials=(), domain=None)
        )
        try:
            chassis = await session.hello()
            gpus = await session.get_all("GetGpus", "gpus", wire.Gpu)
        finally:
            await session.close()
        domains = domains_of(Lists(chassis=chassis, nodes=(), gpus=gpus, partitions=()))
        return await self._store.run(self._register, domains)

    def _register(self, conn: sa.Connection, domains: dict[str, set[str]]) -> tuple[str, ...]:
        known = {serial for one in endpoints.every(conn) for serial in one.chassis_serials}
        order = Order(SUBJECT, "named by the site's NMX-M", self._clock())
        new = [(serial, domain) for domain, theirs in domains.items() for serial in theirs - known]
        for serial, domain in sorted(new):
            endpoint_registry.create(conn, serial, f"{self._url}?domain={domain}", order, self._ids)
        return tuple(sorted(serial for serial, _ in new))
