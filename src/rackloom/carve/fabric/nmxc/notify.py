"""The subscription: wake-ups from the fabric, kept going across restarts of the controller."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress

import grpc.aio

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.carve.fabric.nmxc.replies import require_success
from rackloom.carve.fabric.nmxc.session import CALL_SECONDS, Session
from rackloom.carve.fabric.ports import FabricRefused, FabricUnavailable

HEART_BEAT_SECONDS = 30
"""How often the controller is asked to send its state when nothing happens."""
SILENCE_SECONDS = 4.0 * HEART_BEAT_SECONDS
"""A controller that misses so many heart beats is taken for gone."""
FIRST_DELAY, MAX_DELAY = 0.5, 30.0
"""Seconds before a lost subscription is tried again; doubled until one holds."""


async def wake_ups(session: Session, sleep: Callable[[float], Awaitable[None]]) -> AsyncGenerator[None, None]:
    """One item when a subscription begins (anything may have been missed before), and one per change."""
    delay = FIRST_DELAY
    while True:
        # Whoever observes meets the same trouble and says so; here it only means to try again.
        with suppress(FabricUnavailable, FabricRefused):
            async with aclosing(_subscription(session)) as heard:
                async for is_first in heard:
                    yield
                    if not is_first:
                        delay = FIRST_DELAY
        await sleep(delay)
        delay = min(2 * delay, MAX_DELAY)


async def _subscription(session: Session) -> AsyncGenerator[bool, None]:
    """One subscription, until it is lost; items say whether they stand for its beginning."""
    await session.hello()
    call = session.subscribe(HEART_BEAT_SECONDS)
    try:
        await _hear(call, CALL_SECONDS)
        yield True
        last_state: bytes | None = None
        while True:
            notification = await _hear(call, SILENCE_SECONDS)
            state = _state(notification)
            if state is None or state != last_state:
                yield False
            last_state = state or last_state
    finally:
        call.cancel()


async def _hear(
    call: "grpc.aio.UnaryStreamCall[pb.SubscribeRequest, pb.ServerNotification]", seconds: float
) -> pb.ServerNotification:
    try:
        async with asyncio.timeout(seconds):
            notification: pb.ServerNotification = await call.read()
    except grpc.aio.AioRpcError as error:
        raise FabricUnavailable(f"Subscribe: {error.code().name}: {error.details()}") from error
    except TimeoutError as error:
        raise FabricUnavailable(f"Subscribe: nothing heard for {seconds:.0f} s") from error
    if notification is grpc.aio.EOF:
        raise FabricUnavailable("Subscribe: the controller ended the subscription")
    if notification.HasField("subscription_response"):
        require_success("Subscribe", notification.subscription_response)
    return notification


def _state(notification: pb.ServerNotification) -> bytes | None:
    """The state that a heart beat repeats: beats that say the same are no change."""
    if not notification.HasField("domain_state_info"):
        return None
    return notification.domain_state_info.SerializeToString(deterministic=True)
