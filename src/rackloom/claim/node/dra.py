"""The DRAPlugin service, in both versions that kubelets speak."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import grpc

from rackloom.claim.node.requests import PATIENCE, Answer, Requests
from rackloom.claim.node.rpc import generic
from rackloom.claim.node.values import ClaimRef, ReadyDevice
from rackloom.claim.node.wire import dra_v1_pb2, dra_v1beta1_pb2

_MARGIN = 1.0
"""Seconds for the answer's way back."""


def handlers(requests: Requests) -> tuple[grpc.GenericRpcHandler, ...]:
    """The service `DRAPlugin` of v1 and of v1beta1."""
    return tuple(_Version(wire, requests).handler() for wire in (dra_v1_pb2, dra_v1beta1_pb2))


class _Version:
    """One version: the messages of `wire`, which differ only in that shares are new in v1."""

    def __init__(self, wire: ModuleType, requests: Requests) -> None:
        self._wire: Any = wire
        self._requests = requests
        self._has_shares = "share_id" in wire.Device.DESCRIPTOR.fields_by_name

    def handler(self) -> grpc.GenericRpcHandler:
        return generic(
            f"{self._wire.DESCRIPTOR.package}.DRAPlugin",
            {
                "NodePrepareResources": (self._prepare, self._wire.NodePrepareResourcesRequest),
                "NodeUnprepareResources": (self._unprepare, self._wire.NodeUnprepareResourcesRequest),
            },
        )

    async def _prepare(self, request: Any, context: Any) -> Any:
        answers = await self._requests.prepare(_refs(request.claims), _patience(context))
        return self._wire.NodePrepareResourcesResponse(
            claims={uid: self._prepared(answer) for uid, answer in answers.items()}
        )

    async def _unprepare(self, request: Any, context: Any) -> Any:
        answers = await self._requests.unprepare(_refs(request.claims), _patience(context))
        return self._wire.NodeUnprepareResourcesResponse(
            claims={
                uid: self._wire.NodeUnprepareResourceResponse(error=answer.error)
                for uid, answer in answers.items()
            }
        )

    def _prepared(self, answer: Answer) -> Any:
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


def _refs(claims: Iterable[Any]) -> list[ClaimRef]:
    return [ClaimRef(namespace=one.namespace, name=one.name, uid=one.uid) for one in claims]


def _patience(context: Any) -> float:
    """Less than the caller's own deadline, so that it still hears the reason."""
    remaining = context.time_remaining()
    return PATIENCE if remaining is None else max(0.0, min(PATIENCE, remaining - _MARGIN))
