"""The way to each switch controller: which addresses are allowed, and which driver speaks to them."""

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from google.protobuf.json_format import MessageToJson

from rackloom.app.config_sections import NvlinkConfig
from rackloom.app.secrets.values import SecretProvider
from rackloom.app.switch_driver import SwitchDriver, Way
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
from rackloom.carve.site.controllers import NMX_M_PATH, Address, ControllerKind, parse
from rackloom.carve.site.endpoints import Endpoint
from rackloom.errors import Refused, Retry

GATEWAY_ID = "rackloom"
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

    def driver_for(self, endpoint: Endpoint) -> SwitchDriver:
        """A driver that connects when it is first used."""
        reach, connect = partial(self._reach, endpoint), partial(self._connect, endpoint)
        return SwitchDriver(reach, connect, self.config, self.clock)

    async def _connect(self, endpoint: Endpoint, way: Way) -> FabricDriver:
        address, tls = way.address, way.tls
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
        way = await self._reach(endpoint)
        return NmxmSession(
            _nmxm_url(way.address),
            lambda: self.secrets.login(endpoint.chassis_serials),
            tls=await _context(way.tls),
            server_name=way.tls.authority if way.tls else None,
        )

    async def browse(self, endpoint: Endpoint, rpc: str, gpu_uid: int) -> str:
        """What the controller answers to `rpc`, as JSON; of a GPU list only `gpu_uid` unless that is 0.

        NMX-M is asked for the same list of its own.
        """
        if parse(endpoint.url).kind is ControllerKind.NMX_M:
            return await self._browse_nmxm(endpoint, rpc, gpu_uid)
        way = await self._reach(endpoint)
        session = NmxcSession(self._nmxc_url(way.address), way.tls, GATEWAY_ID, open_channel)
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

    async def _reach(self, endpoint: Endpoint) -> Way:
        try:
            self.check(endpoint.url)
            address = parse(endpoint.url)
            plain = address.scheme == "http"
            tls = None if plain else await self.secrets.tls(address.kind, endpoint.chassis_serials)
        except (Refused, Retry) as error:
            raise FabricUnavailable(error.reason) from error
        except OSError as error:
            raise FabricUnavailable(f"cannot read {error.filename}: {error.strerror}") from error
        return Way(address, tls)


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
