"""Telling kubelet that the plugin is there."""

import hashlib
from base64 import urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import structlog

from rackloom.claim.node.rpc import generic
from rackloom.claim.node.sockets import MAX_PATH
from rackloom.claim.node.wire import registration_pb2 as wire

log = structlog.get_logger(__name__)

SUPPORTED = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1alpha1.DRAResourceHealth")


def registrar_path(directory: Path, driver: str) -> Path:
    """Where kubelet looks for `driver`; a name too long for a socket is replaced by a hash of it."""
    path = directory / f"{driver}-reg.sock"
    if len(str(path).encode()) <= MAX_PATH:
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
            type="DRAPlugin", name=driver, endpoint=str(endpoint), supported_versions=SUPPORTED
        )
        self.registered: bool | None = None
        self.refusal = ""
        self._on_registered = on_registered

    def handler(self) -> grpc.GenericRpcHandler:
        """What to serve."""
        return generic(
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
