"""gRPC services from plain coroutines."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import Message

Answering = Callable[[Any, Any], Awaitable[Message]]


def generic(service: str, methods: Mapping[str, tuple[Answering, type[Message]]]) -> grpc.GenericRpcHandler:
    """The unary methods of `service`: name -> (coroutine of request and context, type of the request)."""
    return grpc.method_handlers_generic_handler(
        service,
        {
            name: grpc.unary_unary_rpc_method_handler(
                answer, request_deserializer=request.FromString, response_serializer=serialized
            )
            for name, (answer, request) in methods.items()
        },
    )


def serialized(message: Message) -> bytes:
    """The bytes of a reply."""
    return message.SerializeToString()
