"""The way to each switch controller: which addresses are allowed, and which driver speaks to them."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from google.protobuf.json_format import MessageToJson

from rackloom.app.config import NvlinkConfig
from rackloom.app.secrets.values import SecretProvider
from rackloom.app.switch_secrets import SwitchSecrets
from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.carve.fabric.nmxc.channel import open_channel
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.fabric.nmxc.session import Session as NmxcSession
from rackloom.carve.fabric.nmxm.context import client_context
from rackloom.carve.fabric.nmxm.driver import NmxmDriver
from rackloom.carve.fabric.nmxm.session import Session as NmxmSession
from rackloom.carve.fabric.ports import FabricDriver, FabricRefused, FabricUnavailable
from rackloom.carve.fabric.tls import TlsMaterial
from rackloom.carve.plan.values import Observation, Operation
from rackloom.carve.site.controllers import NMX_M_PATH, Address, ControllerKind, parse
from rackloom.carve.site.endpoints import Endpoint
from rackloom.errors import Refused, Retry

GATEWAY_ID = "rackloom"
FIRST_DELAY, MAX_DELAY = 0.5, 30.0
"""Seconds before TLS material that cannot be read is tried again; doubled each time."""
_NMXM_COLLECTIONS = {"GetComputeNodeInfoList": "compute-nodes", "GetGpuInfoList": "gpus"}
"""What NMX-M has for the questions of NMX-C that can be browsed."""


class Switches:
    """All controllers of the site. `clock` gives seconds since the epoch."""

    def __init__(self, config: NvlinkConfig, secrets: SecretProvider, clock: Callable[[], float]) -> None:
        self.config = config
        self.secrets = SwitchSecrets(config, secrets)
        self.clock = clock

    def check(self, url: str) -> None:
        """Raise Refused for an address that is none, or that is plaintext where that is not allowed."""
        if parse(url).scheme == "http" and not self.config.allow_insecure:
            raise Refused(
                f"{url} is plaintext, which this site does not allow",
                nearest_fix="use https, or set nvlink_config.allow_insecure = true",
            )

    def driver_for(self, endpoint: Endpoint) -> "SwitchDriver":
        """A driver that connects when it is first used."""
        return SwitchDriver(endpoint, self)

    async def open(self, endpoint: Endpoint) -> FabricDriver:
        """A driver with this endpoint's material. Raises FabricUnavailable when it cannot be had."""
        address, tls = await self._reach(endpoint)
        if address.kind is ControllerKind.NMX_C:
            return NmxcDriver(self._nmxc_url(address), clock=self.clock, tls=tls, gateway_id=GATEWAY_ID)
        return NmxmDriver(
            _nmxm_url(address),
            lambda: self.secrets.login(endpoint.chassis_serials),
            clock=self.clock,
            domain=address.domain,
            chassis_serials=endpoint.chassis_serials,
            tls=await _context(tls),
            server_name=tls.authority if tls else None,
            operation_seconds=self.config.nmx_m_operation_timeout.total_seconds(),
        )

    async def nmxm_session(self, endpoint: Endpoint) -> NmxmSession:
        """A connection to an NMX-M, for questions that are not about one domain."""
        address, tls = await self._reach(endpoint)
        return NmxmSession(
            _nmxm_url(address),
            lambda: self.secrets.login(endpoint.chassis_serials),
            tls=await _context(tls),
            server_name=tls.authority if tls else None,
        )

    async def browse(self, endpoint: Endpoint, rpc: str, gpu_uid: int) -> str:
        """What the controller answers to `rpc`, as JSON; of a GPU list only `gpu_uid` unless that is 0.

        NMX-M is asked for the same list of its own.
        """
        if parse(endpoint.url).kind is ControllerKind.NMX_M:
            return await self._browse_nmxm(endpoint, rpc, gpu_uid)
        address, tls = await self._reach(endpoint)
        session = NmxcSession(self._nmxc_url(address), tls, GATEWAY_ID, open_channel)
        try:
            await session.hello()
            if rpc == "GetComputeNodeInfoList":
                nodes = pb.GetComputeNodeInfoListRequest(context=pb.Context(), gateway_id=GATEWAY_ID)
                return _json(await session.call(rpc, nodes))
            asked = pb.GetGpuInfoListRequest(
                context=pb.Context(), attr=pb.NMX_GPU_ATTR_ALL, gateway_id=GATEWAY_ID
            )
            reply = await session.call(rpc, asked)
        finally:
            await session.close()
        return _json(_only(reply, gpu_uid) if gpu_uid else reply)

    async def _browse_nmxm(self, endpoint: Endpoint, rpc: str, gpu_uid: int) -> str:
        session = await self.nmxm_session(endpoint)
        try:
            listed = await session.get("Hello", _NMXM_COLLECTIONS[rpc], list[dict[str, Any]])
        except FabricRefused as refusal:
            raise FabricUnavailable(str(refusal)) from refusal
        finally:
            await session.close()
        kept = [one for one in listed if not gpu_uid or one.get("DeviceUID") == gpu_uid]
        return msgspec.json.format(msgspec.json.encode(kept)).decode()

    def _nmxc_url(self, address: Address) -> str:
        return f"{address.scheme}://{address.host}:{address.port or self.config.nmx_c_endpoint_port}"

    async def _reach(self, endpoint: Endpoint) -> tuple[Address, TlsMaterial | None]:
        try:
            self.check(endpoint.url)
            address = parse(endpoint.url)
            plain = address.scheme == "http"
            tls = None if plain else await self.secrets.tls(address.kind, endpoint.chassis_serials)
        except (Refused, Retry) as error:
            raise FabricUnavailable(error.reason) from error
        except OSError as error:
            raise FabricUnavailable(f"cannot read {error.filename}: {error.strerror}") from error
        return address, tls


class SwitchDriver:
    """`FabricDriver` that reads its TLS material when it connects, and tries again when it cannot."""

    def __init__(self, endpoint: Endpoint, switches: Switches) -> None:
        self._endpoint = endpoint
        self._switches = switches
        self._driver: FabricDriver | None = None
        self._opening = asyncio.Lock()

    async def observe(self) -> Observation:
        """Read the whole domain. Raises FabricUnavailable."""
        config = self._switches.config
        bound = None if config.enabled else config.domain_discovery_operation_timeout.total_seconds()
        try:
            async with asyncio.timeout(bound):
                return await (await self._open()).observe()
        except TimeoutError as error:
            raise FabricUnavailable(f"the domain was not read within {bound:.0f} s") from error

    async def execute(self, operation: Operation) -> int:
        """Carry out one operation; see `FabricDriver`."""
        return await (await self._open()).execute(operation)

    async def notifications(self) -> AsyncIterator[None]:
        """Wake-ups, once the controller can be spoken to at all."""
        driver = await self._opened()
        heard = driver.notifications()
        assert isinstance(heard, AsyncGenerator)  # noqa: S101 - narrows the type; closing needs a generator
        async with aclosing(heard):
            async for _ in heard:
                yield

    async def close(self) -> None:
        """Release the connection."""
        if self._driver is not None:
            await self._driver.close()

    async def _open(self) -> FabricDriver:
        async with self._opening:
            if self._driver is None:
                self._driver = await self._switches.open(self._endpoint)
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


def _nmxm_url(address: Address) -> str:
    port = "" if address.port is None else f":{address.port}"
    return f"{address.scheme}://{address.host}{port}{NMX_M_PATH}"


async def _context(tls: TlsMaterial | None) -> ssl.SSLContext | None:
    try:
        return None if tls is None else await asyncio.to_thread(client_context, tls)
    except Refused as refusal:
        raise FabricUnavailable(refusal.reason) from refusal


def _json(reply: pb.GetGpuInfoListResponse | pb.GetComputeNodeInfoListResponse) -> str:
    return MessageToJson(reply, preserving_proto_field_name=True)


def _only(reply: pb.GetGpuInfoListResponse, gpu_uid: int) -> pb.GetGpuInfoListResponse:
    kept = [gpu for gpu in reply.gpu_info_list if gpu.gpu_uid == gpu_uid]
    return pb.GetGpuInfoListResponse(server_header=reply.server_header, gpu_info_list=kept)
