"""Access to switch controllers: allowed addresses, TLS material, logins, drivers, rotation.

`Switches` refuses plaintext unless the site allows it, and opens the driver that the address calls for:
NMX-C over gRPC, or NMX-M over HTTPS with a name and a password.

TLS material is the files of `[nvlink_config]`. A controller that needs its own has a secret
`nmxc/<chassis serial>/tls` or `nmxm/<chassis serial>/tls` with the fields `ca`, `certificate`, `key` and
`authority`. The login of an NMX-M is `nmxm/<chassis serial>/auth`, or `nmxm/default/auth` for all of
them.

`SwitchDriver` replaces material while it is in use. It reads the material again when the controller
cannot be reached, and at each rotation interval where rotation is enabled. Changed material replaces the
old one only after the whole domain was read with it. Until then the connection that works stays open.
Replaced drivers are closed after their notification stream has moved on. A certificate that expires soon
is logged.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog
from cryptography import x509
from google.protobuf.json_format import MessageToJson

from rackloom.app.config import CertificateRotation, NvlinkConfig
from rackloom.app.site.secrets import Secret, SecretProvider
from rackloom.carve.admin.endpoints import NMX_M_CREDENTIAL
from rackloom.carve.fabric.controller import (
    NMX_M_PATH,
    ControllerAddress,
    ControllerKind,
    FabricDriver,
    FabricRefused,
    FabricUnavailable,
    TlsMaterial,
    parse_controller_url,
)
from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.carve.fabric.nmxc.driver import NmxcDriver, NmxcSession, heart_beat_rate
from rackloom.carve.fabric.nmxc.protocol import open_channel
from rackloom.carve.fabric.nmxm.driver import NmxmDriver
from rackloom.carve.fabric.nmxm.protocol import NmxmLogin, NmxmSession, client_tls_context
from rackloom.carve.inventory.endpoints import Endpoint
from rackloom.core.partitions.domain import DomainObservation, PartitionOperation
from rackloom.errors import Refused, Retry

# TLS material and logins, read from the site's secret store.


SECRET_FAMILY = {ControllerKind.NMX_C: "nmxc", ControllerKind.NMX_M: "nmxm"}


class SwitchSecrets:
    """TLS material and logins of the controllers, read again at every call."""

    def __init__(self, config: NvlinkConfig, secrets: SecretProvider) -> None:
        self._config = config
        self._secrets = secrets

    async def tls(self, kind: ControllerKind, serials: Sequence[str]) -> TlsMaterial:
        """The TLS material for the controller of these chassis.

        Raises Refused and Retry as the provider does, and OSError if a file cannot be read.
        """
        own: dict[str, Secret] = {}
        for serial in serials:
            own |= await self._secrets.read(f"{SECRET_FAMILY[kind]}/{serial}/tls") or {}
        if own:
            return TlsMaterial(
                ca=_secret_bytes(own.get("ca")),
                certificate=_secret_bytes(own.get("certificate")),
                key=_secret_bytes(own.get("key")),
                authority=own["authority"].reveal() if "authority" in own else None,
            )
        return await asyncio.to_thread(self._common)

    async def login(self, serials: Sequence[str]) -> NmxmLogin:
        """Name and password for the NMX-M of these chassis. Raises FabricUnavailable without any."""
        try:
            for path in (*(f"nmxm/{serial}/auth" for serial in serials), NMX_M_CREDENTIAL):
                if fields := await self._secrets.read(path):
                    return _login_of(path, fields)
        except (Refused, Retry) as error:
            raise FabricUnavailable(error.reason) from error
        raise FabricUnavailable(
            f"no secret {NMX_M_CREDENTIAL}: keep it with rackloom admin credential add nmx-m"
        )

    def _common(self) -> TlsMaterial:
        config = self._config
        return TlsMaterial(
            ca=_file_content(config.nmx_c_tls_ca_cert_path),
            certificate=_file_content(config.nmx_c_tls_client_cert_path),
            key=_file_content(config.nmx_c_tls_client_key_path),
            authority=config.nmx_c_tls_authority,
        )


def _login_of(path: str, fields: Mapping[str, Secret]) -> NmxmLogin:
    if not {"username", "password"} <= fields.keys():
        raise FabricUnavailable(f"secret {path} must have the fields username and password")
    return NmxmLogin(fields["username"].reveal(), fields["password"].reveal())


def _secret_bytes(secret: Secret | None) -> bytes | None:
    return None if secret is None else secret.reveal().encode()


def _file_content(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()


# One controller over time.


log = structlog.get_logger(__name__)

FIRST_DELAY, MAX_DELAY = 0.5, 30.0
"""Seconds before TLS material that cannot be read is read again. They double each time."""


class ControllerAccess(msgspec.Struct, frozen=True):
    """The address of a controller, and the TLS material for it. None stands for plaintext."""

    address: ControllerAddress
    tls: TlsMaterial | None


class SwitchDriver:
    """`FabricDriver` that reads its address and material with `reach` and opens a driver with `connect`.

    Both raise FabricUnavailable. `clock` gives seconds since the epoch.
    """

    def __init__(
        self,
        reach: Callable[[], Awaitable[ControllerAccess]],
        connect: Callable[[ControllerAccess], Awaitable[FabricDriver]],
        config: NvlinkConfig,
        clock: Callable[[], float],
    ) -> None:
        self._reach = reach
        self._connect = connect
        self._config = config
        self._clock = clock
        self._driver: FabricDriver | None = None
        self._access: ControllerAccess | None = None
        self._opening = asyncio.Lock()
        self._replaced = asyncio.Event()
        self._retired: list[FabricDriver] = []
        """Replaced, and not yet closed: a notification stream may still read from them."""
        self._read_at = clock()

    async def observe(self) -> DomainObservation:
        """Read the whole domain. Raises FabricUnavailable."""
        bound = None
        if not self._config.enabled:
            bound = self._config.domain_discovery_operation_timeout.total_seconds()
        try:
            async with asyncio.timeout(bound):
                return await self._observe()
        except TimeoutError as error:
            raise FabricUnavailable(f"the domain was not read within {bound:.0f} s") from error

    async def execute(self, operation: PartitionOperation) -> int:
        """Execute one operation. See `FabricDriver`."""
        return await (await self._open()).execute(operation)

    async def notifications(self) -> AsyncIterator[None]:
        """Notifications, from when the controller can be reached."""
        while True:
            driver, replaced = await self._opened(), self._replaced
            stream = driver.notifications()
            assert isinstance(stream, AsyncGenerator)  # noqa: S101 - narrows the type; closing needs one
            async with aclosing(stream), aclosing(_until_replaced(replaced, stream)) as notifications:
                async for _ in notifications:
                    yield
            await self._close_retired()

    async def close(self) -> None:
        """Release the connections."""
        await self._close_retired()
        if self._driver is not None:
            await self._driver.close()

    async def _observe(self) -> DomainObservation:
        driver = await self._open()
        if self._is_due() and (observation := await self._observe_with_new_material()) is not None:
            return observation
        try:
            return await driver.observe()
        except FabricUnavailable:
            observation = await self._observe_with_new_material()
            if observation is None:
                raise
            return observation

    def _is_due(self) -> bool:
        rotation = self._config.nmx_c_certificate_rotation
        return rotation.enabled and self._clock() - self._read_at >= rotation.run_interval.total_seconds()

    async def _observe_with_new_material(self) -> DomainObservation | None:
        """Read the domain with changed material, or return None if it has not changed or does not work."""
        self._read_at = self._clock()
        try:
            access = await self._reach()
            _warn_of_expiry(access, self._config.nmx_c_certificate_rotation, self._clock())
            return None if access == self._access else await self._replace_driver(access)
        except (FabricUnavailable, TimeoutError) as error:
            log.warning("switch.new-material-does-not-do", reason=str(error))
            return None

    async def _replace_driver(self, access: ControllerAccess) -> DomainObservation:
        driver = await self._connect(access)
        try:
            async with asyncio.timeout(self._config.nmx_c_certificate_rotation.probe_timeout.total_seconds()):
                observation = await driver.observe()
        except BaseException:
            await driver.close()
            raise
        if self._driver is not None:
            self._retired.append(self._driver)
        self._driver, self._access = driver, access
        self._replaced.set()
        self._replaced = asyncio.Event()
        log.info("switch.material-replaced", host=access.address.host)
        return observation

    async def _open(self) -> FabricDriver:
        async with self._opening:
            if self._driver is None:
                access = await self._reach()
                self._driver, self._access = await self._connect(access), access
            return self._driver

    async def _opened(self) -> FabricDriver:
        delay = FIRST_DELAY
        while True:
            try:
                return await self._open()
            except FabricUnavailable:
                # The next observation meets the same error and reports it.
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_DELAY)

    async def _close_retired(self) -> None:
        while self._retired:
            await self._retired.pop().close()


async def _until_replaced(
    ended: asyncio.Event, notifications: AsyncGenerator[None, None]
) -> AsyncGenerator[None, None]:
    """The notifications, until `ended` is set."""
    end = asyncio.create_task(ended.wait())
    following: asyncio.Task[None] | None = None
    try:
        while not end.done():
            following = asyncio.create_task(_next_notification(notifications))
            await asyncio.wait({following, end}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                yield following.result()
    finally:
        begun = [task for task in (following, end) if task is not None]
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


async def _next_notification(notifications: AsyncGenerator[None, None]) -> None:
    await anext(notifications)


def _warn_of_expiry(access: ControllerAccess, rotation: CertificateRotation, now: float) -> None:
    if access.tls is None or access.tls.certificate is None:
        return
    try:
        ends = x509.load_pem_x509_certificate(access.tls.certificate).not_valid_after_utc
    except ValueError:
        return  # the attempt to use it reports the error
    if ends - datetime.fromtimestamp(now, UTC) < rotation.rotate_before_expiry:
        log.warning("switch.certificate-expires", host=access.address.host, at=ends.isoformat())


# All controllers of the site.


GATEWAY_ID = "rackloom"
_NMXM_COLLECTIONS = {"GetComputeNodeInfoList": "compute-nodes", "GetGpuInfoList": "gpus"}
"""RPC of NMX-C that can be browsed -> collection of NMX-M with the same content."""


class Switches:
    """All controllers of the site. `clock` gives seconds since the epoch."""

    def __init__(self, config: NvlinkConfig, secrets: SecretProvider, clock: Callable[[], float]) -> None:
        self.config = config
        self.secrets = SwitchSecrets(config, secrets)
        self.clock = clock

    def check(self, url: str) -> None:
        """Raise Refused for an invalid address, and for plaintext if the site does not allow it."""
        if parse_controller_url(url).scheme == "http" and not self.config.allow_insecure:
            raise Refused(
                f"{url} is plaintext, which this site does not allow",
                nearest_fix="use https, or set nvlink_config.allow_insecure = true",
            )

    def driver_for(self, endpoint: Endpoint) -> SwitchDriver:
        """A driver that connects when it is first used."""
        reach, connect = partial(self._reach, endpoint), partial(self._connect, endpoint)
        return SwitchDriver(reach, connect, self.config, self.clock)

    async def _connect(self, endpoint: Endpoint, access: ControllerAccess) -> FabricDriver:
        address, tls = access.address, access.tls
        if address.kind is ControllerKind.NMX_C:
            return NmxcDriver(
                self._nmxc_url(address),
                clock=self.clock,
                tls=tls,
                gateway_id=GATEWAY_ID,
                heart_beat_seconds=heart_beat_rate(self.config.monitor_run_interval.total_seconds()),
            )
        return NmxmDriver(
            _nmxm_url(address),
            lambda: self.secrets.login(endpoint.chassis_serials),
            clock=self.clock,
            domain=address.domain,
            chassis_serials=endpoint.chassis_serials,
            tls=await _tls_context(tls),
            server_name=tls.authority if tls else None,
            operation_seconds=self.config.nmx_m_operation_timeout.total_seconds(),
        )

    async def nmxm_session(self, endpoint: Endpoint) -> NmxmSession:
        """A connection to an NMX-M, for requests that are not about one domain."""
        access = await self._reach(endpoint)
        return NmxmSession(
            _nmxm_url(access.address),
            lambda: self.secrets.login(endpoint.chassis_serials),
            tls=await _tls_context(access.tls),
            server_name=access.tls.authority if access.tls else None,
        )

    async def browse(self, endpoint: Endpoint, rpc: str, gpu_uid: int) -> str:
        """The controller's response to `rpc`, as JSON. From a GPU list only `gpu_uid` unless that is 0.

        From an NMX-M it is the collection with the same content.
        """
        if parse_controller_url(endpoint.url).kind is ControllerKind.NMX_M:
            return await self._browse_nmxm(endpoint, rpc, gpu_uid)
        access = await self._reach(endpoint)
        session = NmxcSession(self._nmxc_url(access.address), access.tls, GATEWAY_ID, open_channel)
        try:
            await session.hello()
            if rpc == "GetComputeNodeInfoList":
                nodes = pb.GetComputeNodeInfoListRequest(context=pb.Context(), gateway_id=GATEWAY_ID)
                return _message_json(await session.call(rpc, nodes))
            request = pb.GetGpuInfoListRequest(
                context=pb.Context(), attr=pb.NMX_GPU_ATTR_ALL, gateway_id=GATEWAY_ID
            )
            reply = await session.call(rpc, request)
        finally:
            await session.close()
        return _message_json(_only_gpu(reply, gpu_uid) if gpu_uid else reply)

    async def _browse_nmxm(self, endpoint: Endpoint, rpc: str, gpu_uid: int) -> str:
        session = await self.nmxm_session(endpoint)
        try:
            listed = await session.get("Hello", _NMXM_COLLECTIONS[rpc], list[dict[str, Any]])
        except FabricRefused as refusal:
            raise FabricUnavailable(str(refusal)) from refusal
        finally:
            await session.close()
        kept = [entry for entry in listed if not gpu_uid or entry.get("DeviceUID") == gpu_uid]
        return msgspec.json.format(msgspec.json.encode(kept)).decode()

    def _nmxc_url(self, address: ControllerAddress) -> str:
        return f"{address.scheme}://{address.host}:{address.port or self.config.nmx_c_endpoint_port}"

    async def _reach(self, endpoint: Endpoint) -> ControllerAccess:
        try:
            self.check(endpoint.url)
            address = parse_controller_url(endpoint.url)
            plain = address.scheme == "http"
            tls = None if plain else await self.secrets.tls(address.kind, endpoint.chassis_serials)
        except (Refused, Retry) as error:
            raise FabricUnavailable(error.reason) from error
        except OSError as error:
            raise FabricUnavailable(f"cannot read {error.filename}: {error.strerror}") from error
        return ControllerAccess(address, tls)


def _nmxm_url(address: ControllerAddress) -> str:
    port = "" if address.port is None else f":{address.port}"
    return f"{address.scheme}://{address.host}{port}{NMX_M_PATH}"


async def _tls_context(tls: TlsMaterial | None) -> ssl.SSLContext | None:
    try:
        return None if tls is None else await asyncio.to_thread(client_tls_context, tls)
    except Refused as refusal:
        raise FabricUnavailable(refusal.reason) from refusal


def _message_json(reply: pb.GetGpuInfoListResponse | pb.GetComputeNodeInfoListResponse) -> str:
    return MessageToJson(reply, preserving_proto_field_name=True)


def _only_gpu(reply: pb.GetGpuInfoListResponse, gpu_uid: int) -> pb.GetGpuInfoListResponse:
    kept = [gpu for gpu in reply.gpu_info_list if gpu.gpu_uid == gpu_uid]
    return pb.GetGpuInfoListResponse(server_header=reply.server_header, gpu_info_list=kept)
