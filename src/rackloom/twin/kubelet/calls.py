"""The calls that kubelet makes to one registered plugin."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc.aio
import msgspec

from rackloom.claim.node.wire import (
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
    health_v1alpha1_pb2,
    health_v1alpha1_pb2_grpc,
)
from rackloom.twin.kubelet.claims import PodClaim

_VERSIONS: dict[str, tuple[ModuleType, ModuleType]] = {
    "v1": (dra_v1_pb2, dra_v1_pb2_grpc),
    "v1beta1": (dra_v1beta1_pb2, dra_v1beta1_pb2_grpc),
}


class NotPrepared(Exception):
    """What a pod shows as FailedPrepareDynamicResources."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device as the plugin names it to kubelet."""

    requests: tuple[str, ...]
    pool: str
    name: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


class PluginCalls:
    """A connection to the plugin that serves `endpoint`, in one version of the protocol."""

    def __init__(self, endpoint: Path, version: str, timeout: float) -> None:
        self._wire: Any
        self._wire, stubs = _VERSIONS[version]
        self._channel = grpc.aio.insecure_channel(
            f"unix:{endpoint}", options=(("grpc.use_local_subchannel_pool", 1),)
        )
        self._stub: Any = stubs.DRAPluginStub(self._channel)
        self._timeout = timeout

    async def prepare(self, claims: Sequence[PodClaim]) -> dict[str, tuple[Device, ...]]:
        """Devices by claim UID. Raises `NotPrepared` unless every claim was."""
        request = self._wire.NodePrepareResourcesRequest(claims=self._named(claims))
        reply = await self._call(self._stub.NodePrepareResources, request)
        self._check(reply, claims)
        return {uid: tuple(_device(one) for one in answer.devices) for uid, answer in reply.claims.items()}

    async def unprepare(self, claims: Sequence[PodClaim]) -> None:
        """Give claims back. Raises `NotPrepared` unless every one was."""
        request = self._wire.NodeUnprepareResourcesRequest(claims=self._named(claims))
        self._check(await self._call(self._stub.NodeUnprepareResources, request), claims)

    async def health(self) -> AsyncIterator[dict[str, tuple[int, str]]]:
        """Device -> (status number, message), each time the plugin tells."""
        stub = health_v1alpha1_pb2_grpc.DRAResourceHealthStub(self._channel)
        async for told in stub.NodeWatchResources(health_v1alpha1_pb2.NodeWatchResourcesRequest()):
            yield {one.device.device_name: (one.health, one.message) for one in told.devices}

    async def close(self) -> None:
        """Hang up."""
        await self._channel.close()

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self._timeout)
        except grpc.aio.AioRpcError as error:
            raise NotPrepared(f"{error.code().name}: {error.details()}") from error

    def _named(self, claims: Sequence[PodClaim]) -> list[Any]:
        refs = (one.ref for one in claims)
        return [self._wire.Claim(namespace=ref.namespace, name=ref.name, uid=ref.uid) for ref in refs]

    def _check(self, reply: Any, claims: Sequence[PodClaim]) -> None:
        missing = [one.uid for one in claims if one.uid not in reply.claims]
        if missing:
            raise NotPrepared(f"the reply left out {len(missing)} claims")
        errors = [answer.error for answer in reply.claims.values() if answer.error]
        if errors:
            raise NotPrepared("; ".join(errors))


def _device(one: Any) -> Device:
    has_share = "share_id" in one.DESCRIPTOR.fields_by_name and one.HasField("share_id")
    return Device(
        requests=tuple(one.request_names),
        pool=one.pool_name,
        name=one.device_name,
        cdi_ids=tuple(one.cdi_device_ids),
        share_id=one.share_id if has_share else None,
    )
