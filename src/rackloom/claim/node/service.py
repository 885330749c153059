"""The gRPC services that kubelet calls: DRAPlugin, and the registration of a plugin.

kubelet finds a plugin by a registration socket in its plugins_registry directory, asks GetInfo, and then
calls DRAPlugin on the plugin's own socket. DRAPlugin is served as v1 and v1beta1; the messages differ
only in share ids, which are new in v1. A request's own deadline, less one second for the answer's way
back, bounds the work.

Sockets belong to root alone (mode 0600). A path has at most 107 bytes (sockaddr_un); a driver name that
is too long for it is replaced by a hash. When a server stops, its socket goes first, so that no new call
arrives while calls under way get two seconds to finish.
"""

import hashlib
import os
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import Message

from rackloom.claim.node.plugin import ClaimRef, ReadyDevice
from rackloom.claim.node.requests import ANSWER_SECONDS, ClaimAnswer, Requests
from rackloom.claim.node.wire import dra_v1_pb2, dra_v1beta1_pb2
from rackloom.claim.node.wire import registration_pb2 as wire
from rackloom.errors import Refused

# gRPC handlers from coroutines.


UnaryMethod = Callable[[Any, Any], Awaitable[Message]]


def unary_service(
    service: str, methods: Mapping[str, tuple[UnaryMethod, type[Message]]]
) -> grpc.GenericRpcHandler:
    """The unary methods of `service`: name -> (coroutine of request and context, type of the request)."""
    return grpc.method_handlers_generic_handler(
        service,
        {
            name: grpc.unary_unary_rpc_method_handler(
                answer, request_deserializer=request.FromString, response_serializer=serialize_message
            )
            for name, (answer, request) in methods.items()
        },
    )


def serialize_message(message: Message) -> bytes:
    """The bytes of a reply."""
    return message.SerializeToString()


# Servers on unix sockets.


MAX_SOCKET_PATH = 107
"""Bytes of a unix socket's path: sockaddr_un has 108, of which the last is NUL."""
GRACE_SECONDS = 2.0
"""For calls under way when the plugin stops. What they began is in the checkpoint."""


@asynccontextmanager
async def serve_on_socket(path: Path, handlers: tuple[grpc.GenericRpcHandler, ...]) -> AsyncIterator[None]:
    """Serve on the socket `path` while the context is entered; it is gone afterwards."""
    check_socket_path(path)
    # A process that was killed leaves its socket behind.
    _remove_socket(path)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(handlers)
    with _owner_only_umask():
        try:
            server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise Refused(
                f"cannot listen on {path}",
                nearest_fix="does its directory exist, and may this user write to it?",
            ) from error
    try:
        await server.start()
        yield
    finally:
        # Nobody new may come in while calls under way are finished.
        _remove_socket(path)
        await server.stop(GRACE_SECONDS)


def check_socket_path(path: Path) -> None:
    """Raise `Refused` for a path that no unix socket can have."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise Refused(
            f"socket path {path} has {length} bytes; the kernel takes {MAX_SOCKET_PATH}",
            nearest_fix="choose a shorter plugins directory",
        )


def _remove_socket(path: Path) -> None:
    path.unlink(missing_ok=True)


@contextmanager
def _owner_only_umask() -> Iterator[None]:
    """Sockets that are bound in here get mode 0600."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


# DRAPlugin: NodePrepareResources and NodeUnprepareResources.


_MARGIN = 1.0
"""Seconds for the answer's way back."""


def dra_handlers(requests: Requests) -> tuple[grpc.GenericRpcHandler, ...]:
    """The service `DRAPlugin` of v1 and of v1beta1."""
    return tuple(_DraVersion(wire, requests).handler() for wire in (dra_v1_pb2, dra_v1beta1_pb2))


class _DraVersion:
    """One version: the messages of `wire`, which differ only in that shares are new in v1."""

    def __init__(self, wire: ModuleType, requests: Requests) -> None:
        self._wire: Any = wire
        self._requests = requests
        self._has_shares = "share_id" in wire.Device.DESCRIPTOR.fields_by_name

    def handler(self) -> grpc.GenericRpcHandler:
        return unary_service(
            f"{self._wire.DESCRIPTOR.package}.DRAPlugin",
            {
                "NodePrepareResources": (self._prepare, self._wire.NodePrepareResourcesRequest),
                "NodeUnprepareResources": (self._unprepare, self._wire.NodeUnprepareResourcesRequest),
            },
        )

    async def _prepare(self, request: Any, context: Any) -> Any:
        answers = await self._requests.prepare(_claim_refs(request.claims), _answer_within(context))
        return self._wire.NodePrepareResourcesResponse(
            claims={uid: self._prepared(answer) for uid, answer in answers.items()}
        )

    async def _unprepare(self, request: Any, context: Any) -> Any:
        answers = await self._requests.unprepare(_claim_refs(request.claims), _answer_within(context))
        return self._wire.NodeUnprepareResourcesResponse(
            claims={
                uid: self._wire.NodeUnprepareResourceResponse(error=answer.error)
                for uid, answer in answers.items()
            }
        )

    def _prepared(self, answer: ClaimAnswer) -> Any:
        devices = [self._device(device) for device in answer.devices]
        return self._wire.NodePrepareResourceResponse(devices=devices, error=answer.error)

    def _device(self, device: ReadyDevice) -> Any:
        shares = {"share_id": device.share_id} if self._has_shares else {}
        return self._wire.Device(
            request_names=device.requests,
            pool_name=device.pool,
            device_name=device.device,
            cdi_device_ids=device.cdi_ids,
            **shares,
        )


def _claim_refs(claims: Iterable[Any]) -> list[ClaimRef]:
    return [ClaimRef(namespace=claim.namespace, name=claim.name, uid=claim.uid) for claim in claims]


def _answer_within(context: Any) -> float:
    """Less than the caller's own deadline, so that it still hears the reason."""
    remaining = context.time_remaining()
    return ANSWER_SECONDS if remaining is None else max(0.0, min(ANSWER_SECONDS, remaining - _MARGIN))


# Registration with kubelet.


log = structlog.get_logger(__name__)

SUPPORTED_SERVICES = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1alpha1.DRAResourceHealth")


def registrar_path(directory: Path, driver: str) -> Path:
    """Where kubelet looks for `driver`; a name too long for a socket is replaced by a hash of it."""
    path = directory / f"{driver}-reg.sock"
    if len(str(path).encode()) <= MAX_SOCKET_PATH:
        return path
    digest = urlsafe_b64encode(hashlib.sha256(driver.encode()).digest()[:16]).rstrip(b"=").decode()
    return directory / f"dra-{digest}-reg.sock"


class Registrar:
    """The registration service of one plugin.

    `registered` is what kubelet said last, None before it said anything; `refusal` is why it said no.

    `on_registered` is called whenever kubelet says that it has the plugin: also after a restart of kubelet.
    """

    def __init__(self, driver: str, endpoint: Path, on_registered: Callable[[], None] = lambda: None) -> None:
        self._info = wire.PluginInfo(
            type="DRAPlugin", name=driver, endpoint=str(endpoint), supported_versions=SUPPORTED_SERVICES
        )
        self.registered: bool | None = None
        self.refusal = ""
        self._on_registered = on_registered

    def handler(self) -> grpc.GenericRpcHandler:
        """What to serve."""
        return unary_service(
            "pluginregistration.Registration",
            {
                "GetInfo": (self._info_of, wire.InfoRequest),
                "NotifyRegistrationStatus": (self._hear, wire.RegistrationStatus),
            },
        )

    async def _info_of(self, _request: wire.InfoRequest, _context: Any) -> wire.PluginInfo:
        return self._info

    async def _hear(self, status: wire.RegistrationStatus, _context: Any) -> wire.RegistrationStatusResponse:
        self.registered, self.refusal = status.plugin_registered, status.error
        if status.plugin_registered:
            log.info("node.registered", driver=self._info.name)
            self._on_registered()
        else:
            log.error("node.not-registered", driver=self._info.name, reason=status.error)
        return wire.RegistrationStatusResponse()
