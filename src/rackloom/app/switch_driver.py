"""The way to one switch controller over time: certificates are replaced while it is in use.

What the site keeps is read again when the controller cannot be spoken to, and every `run_interval` of
`[nvlink_config.nmx_c_certificate_rotation]` where that is enabled. Other material takes the place of the old
once the domain was read with it; until then the connection that works stays.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime

import msgspec
import structlog
from cryptography import x509

from rackloom.app.config_sections import CertificateRotation, NvlinkConfig
from rackloom.carve.fabric.ports import FabricDriver, FabricUnavailable
from rackloom.carve.fabric.tls import TlsMaterial
from rackloom.carve.plan.values import Observation, Operation
from rackloom.carve.site.controllers import Address

log = structlog.get_logger(__name__)

FIRST_DELAY, MAX_DELAY = 0.5, 30.0
"""Seconds before TLS material that cannot be read is tried again; doubled each time."""


class Way(msgspec.Struct, frozen=True):
    """Where a controller is, and what to show and to trust there; None for plaintext."""

    address: Address
    tls: TlsMaterial | None


class SwitchDriver:
    """`FabricDriver` over whatever `reach` finds now, opened by `connect`; both raise FabricUnavailable.

    `clock` gives seconds since the epoch.
    """

    def __init__(
        self,
        reach: Callable[[], Awaitable[Way]],
        connect: Callable[[Way], Awaitable[FabricDriver]],
        config: NvlinkConfig,
        clock: Callable[[], float],
    ) -> None:
        self._reach = reach
        self._connect = connect
        self._config = config
        self._clock = clock
        self._driver: FabricDriver | None = None
        self._way: Way | None = None
        self._opening = asyncio.Lock()
        self._replaced = asyncio.Event()
        self._retired: list[FabricDriver] = []
        """Replaced, and not yet closed: somebody may listen to them."""
        self._looked = clock()

    async def observe(self) -> Observation:
        """Read the whole domain. Raises FabricUnavailable."""
        bound = None
        if not self._config.enabled:
            bound = self._config.domain_discovery_operation_timeout.total_seconds()
        try:
            async with asyncio.timeout(bound):
                return await self._observe()
        except TimeoutError as error:
            raise FabricUnavailable(f"the domain was not read within {bound:.0f} s") from error

    async def execute(self, operation: Operation) -> int:
        """Carry out one operation; see `FabricDriver`."""
        return await (await self._open()).execute(operation)

    async def notifications(self) -> AsyncIterator[None]:
        """Wake-ups, once the controller can be spoken to at all."""
        while True:
            driver, replaced = await self._opened(), self._replaced
            heard = driver.notifications()
            assert isinstance(heard, AsyncGenerator)  # noqa: S101 - narrows the type; closing needs one
            async with aclosing(heard), aclosing(_until(replaced, heard)) as still:
                async for _ in still:
                    yield
            await self._close_retired()

    async def close(self) -> None:
        """Release the connections."""
        await self._close_retired()
        if self._driver is not None:
            await self._driver.close()

    async def _observe(self) -> Observation:
        driver = await self._open()
        if self._is_due() and (seen := await self._observe_afresh()) is not None:
            return seen
        try:
            return await driver.observe()
        except FabricUnavailable:
            seen = await self._observe_afresh()
            if seen is None:
                raise
            return seen

    def _is_due(self) -> bool:
        rotation = self._config.nmx_c_certificate_rotation
        return rotation.enabled and self._clock() - self._looked >= rotation.run_interval.total_seconds()

    async def _observe_afresh(self) -> Observation | None:
        """Read the domain with other material than before; None without any, or when it does not do."""
        self._looked = self._clock()
        try:
            way = await self._reach()
            _warn_of_expiry(way, self._config.nmx_c_certificate_rotation, self._clock())
            return None if way == self._way else await self._try(way)
        except (FabricUnavailable, TimeoutError) as trouble:
            log.warning("switch.new-material-does-not-do", reason=str(trouble))
            return None

    async def _try(self, way: Way) -> Observation:
        driver = await self._connect(way)
        try:
            async with asyncio.timeout(self._config.nmx_c_certificate_rotation.probe_timeout.total_seconds()):
                seen = await driver.observe()
        except BaseException:
            await driver.close()
            raise
        if self._driver is not None:
            self._retired.append(self._driver)
        self._driver, self._way = driver, way
        self._replaced.set()
        self._replaced = asyncio.Event()
        log.info("switch.material-replaced", host=way.address.host)
        return seen

    async def _open(self) -> FabricDriver:
        async with self._opening:
            if self._driver is None:
                way = await self._reach()
                self._driver, self._way = await self._connect(way), way
            return self._driver

    async def _opened(self) -> FabricDriver:
        delay = FIRST_DELAY
        while True:
            try:
                return await self._open()
            except FabricUnavailable:
                # Whoever observes meets the same trouble and says so.
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_DELAY)

    async def _close_retired(self) -> None:
        while self._retired:
            await self._retired.pop().close()


async def _until(ended: asyncio.Event, heard: AsyncGenerator[None, None]) -> AsyncGenerator[None, None]:
    """What is heard, until `ended` is set."""
    end = asyncio.create_task(ended.wait())
    following: asyncio.Task[None] | None = None
    try:
        while not end.done():
            following = asyncio.create_task(_next(heard))
            await asyncio.wait({following, end}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                yield following.result()
    finally:
        begun = [task for task in (following, end) if task is not None]
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


async def _next(heard: AsyncGenerator[None, None]) -> None:
    await anext(heard)


def _warn_of_expiry(way: Way, rotation: CertificateRotation, now: float) -> None:
    if way.tls is None or way.tls.certificate is None:
        return
    try:
        ends = x509.load_pem_x509_certificate(way.tls.certificate).not_valid_after_utc
    except ValueError:
        return  # it is of no use, which the attempt to use it tells
    if ends - datetime.fromtimestamp(now, UTC) < rotation.rotate_before_expiry:
        log.warning("switch.certificate-expires", host=way.address.host, at=ends.isoformat())
