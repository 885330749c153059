"""The way to each switch controller: which addresses are allowed, and with which TLS material.

The files of `[nvlink_config]` are for every controller. One that needs its own has a secret `nmxc/<chassis
serial>/tls`, whose fields `ca`, `certificate`, `key` and `authority` take their place.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from urllib.parse import urlsplit

from google.protobuf.json_format import MessageToJson

from rackloom.app.config import NvlinkConfig
from rackloom.app.secrets.values import Secret, SecretProvider
from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.carve.fabric.nmxc.channel import TlsMaterial, open_channel
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.fabric.nmxc.session import Session
from rackloom.carve.fabric.ports import FabricUnavailable
from rackloom.carve.plan.values import Observation, Operation
from rackloom.carve.site.endpoints import Endpoint
from rackloom.errors import Refused, Retry

GATEWAY_ID = "rackloom"
FIRST_DELAY, MAX_DELAY = 0.5, 30.0
"""Seconds before TLS material that cannot be read is tried again; doubled each time."""


class Switches:
    """All controllers of the site. `clock` gives seconds since the epoch."""

    def __init__(self, config: NvlinkConfig, secrets: SecretProvider, clock: Callable[[], float]) -> None:
        self.config = config
        self.secrets = secrets
        self.clock = clock

    def check(self, url: str) -> None:
        """Raise Refused for an address that is none, or that is plaintext where that is not allowed."""
        address = Address(url)
        if address.scheme == "http" and not self.config.allow_insecure:
            raise Refused(
                f"{url} is plaintext, which this site does not allow",
                nearest_fix="use https, or set nvlink_config.allow_insecure = true",
            )

    def driver_for(self, endpoint: Endpoint) -> "SwitchDriver":
        """A driver that connects when it is first used."""
        return SwitchDriver(endpoint, self)

    async def open(self, endpoint: Endpoint) -> NmxcDriver:
        """A driver with this endpoint's material. Raises FabricUnavailable when it cannot be had."""
        url, tls = await self._reach(endpoint)
        return NmxcDriver(url, clock=self.clock, tls=tls, gateway_id=GATEWAY_ID)

    async def browse(self, endpoint: Endpoint, rpc: str, gpu_uid: int) -> str:
        """What the controller answers to `rpc`, as JSON; of a GPU list only `gpu_uid` unless that is 0."""
        url, tls = await self._reach(endpoint)
        session = Session(url, tls, GATEWAY_ID, open_channel)
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

    async def _reach(self, endpoint: Endpoint) -> tuple[str, TlsMaterial | None]:
        try:
            self.check(endpoint.url)
            address = Address(endpoint.url)
            tls = None if address.scheme == "http" else await self._material(endpoint)
        except (Refused, Retry) as error:
            raise FabricUnavailable(error.reason) from error
        except OSError as error:
            raise FabricUnavailable(f"cannot read {error.filename}: {error.strerror}") from error
        port = address.port or self.config.nmx_c_endpoint_port
        host = f"[{address.hostname}]" if ":" in (address.hostname or "") else address.hostname
        return f"{address.scheme}://{host}:{port}", tls

    async def _material(self, endpoint: Endpoint) -> TlsMaterial:
        own: dict[str, Secret] = {}
        for serial in endpoint.chassis_serials:
            own |= await self.secrets.read(f"nmxc/{serial}/tls") or {}
        if own:
            return TlsMaterial(
                ca=_bytes(own.get("ca")),
                certificate=_bytes(own.get("certificate")),
                key=_bytes(own.get("key")),
                authority=own["authority"].reveal() if "authority" in own else None,
            )
        return await asyncio.to_thread(self._common)

    def _common(self) -> TlsMaterial:
        config = self.config
        return TlsMaterial(
            ca=_content(config.nmx_c_tls_ca_cert_path),
            certificate=_content(config.nmx_c_tls_client_cert_path),
            key=_content(config.nmx_c_tls_client_key_path),
            authority=config.nmx_c_tls_authority,
        )


class Address:
    """Scheme, host and port of a controller's URL. Raises Refused for anything else."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            self.scheme, self.hostname, self.port = parts.scheme, parts.hostname, parts.port
        except ValueError:
            self.scheme, self.hostname, self.port = "", None, None
        if self.scheme not in ("http", "https") or self.hostname is None:
            raise Refused(
                f"{url!r} is not the address of a switch controller", nearest_fix="use https://HOST[:PORT]"
            )


class SwitchDriver:
    """`FabricDriver` that reads its TLS material when it connects, and tries again when it cannot."""

    def __init__(self, endpoint: Endpoint, switches: Switches) -> None:
        self._endpoint = endpoint
        self._switches = switches
        self._driver: NmxcDriver | None = None
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

    async def _open(self) -> NmxcDriver:
        async with self._opening:
            if self._driver is None:
                self._driver = await self._switches.open(self._endpoint)
            return self._driver

    async def _opened(self) -> NmxcDriver:
        delay = FIRST_DELAY
        while True:
            try:
                return await self._open()
            except FabricUnavailable:
                # Whoever observes meets the same trouble and says so.
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_DELAY)


def _json(reply: pb.GetGpuInfoListResponse | pb.GetComputeNodeInfoListResponse) -> str:
    return MessageToJson(reply, preserving_proto_field_name=True)


def _only(reply: pb.GetGpuInfoListResponse, gpu_uid: int) -> pb.GetGpuInfoListResponse:
    kept = [gpu for gpu in reply.gpu_info_list if gpu.gpu_uid == gpu_uid]
    return pb.GetGpuInfoListResponse(server_header=reply.server_header, gpu_info_list=kept)


def _bytes(secret: Secret | None) -> bytes | None:
    return None if secret is None else secret.reveal().encode()


def _content(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
