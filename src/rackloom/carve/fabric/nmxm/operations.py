"""Asynchronous operations of NMX-M: a change is accepted first, and then carried out or not."""

import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec

from rackloom.carve.fabric.nmxm import wire
from rackloom.carve.fabric.nmxm.reading import Reading
from rackloom.carve.fabric.nmxm.session import Session
from rackloom.carve.fabric.ports import FabricRefused, FabricUnavailable

POLL_SECONDS = 0.5
"""Between two questions about an operation, as upstream."""
_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
"""An error that is a code; any other is a sentence, and only told as one."""
_UNDER_WAY = ("pending", "in-progress")


class Patience(msgspec.Struct, frozen=True):
    """How long a change may take, in seconds, and how time passes."""

    seconds: float
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]

    async def until(self, look: Callable[[], Awaitable[bool]]) -> bool:
        """Look again and again; False when the time is up and it was not yet true."""
        deadline = self.clock() + self.seconds
        while not await look():
            if self.clock() >= deadline:
                return False
            await self.sleep(POLL_SECONDS)
        return True


async def wait_for(session: Session, call: str, operation_id: str, patience: Patience) -> None:
    """Return when the operation has completed.

    Raises FabricRefused when it failed or was cancelled, FabricUnavailable when that is not known in time;
    then NMX-M is asked to cancel it, and whether it does so shows in the next look at its operations.
    """
    newest: list[wire.Operation] = []

    async def has_ended() -> bool:
        with suppress(FabricUnavailable):
            newest[:] = [await session.get("GetOperation", f"operations/{operation_id}", wire.Operation)]
        return bool(newest) and newest[0].status not in _UNDER_WAY

    try:
        if not await patience.until(has_ended):
            await _cancel(session, operation_id)
            raise FabricUnavailable(f"{call}: operation {operation_id} not done in {patience.seconds:g} s")
    except FabricRefused as refusal:
        # Accepted, and now nobody knows of it: it may have been carried out.
        raise FabricUnavailable(f"{call}: {refusal}") from refusal
    _require_completed(call, newest[0])


async def require_quiet(session: Session, reading: Reading) -> None:
    """Raise FabricRefused while a change of this domain's partitions is under way, whoever asked for it.

    A PUT replaces all members: one that is carried out late would undo what was done meanwhile.
    """
    operations = await session.get("GetOperations", "operations", tuple[wire.Operation, ...])
    for one in operations:
        if one.status in _UNDER_WAY and _concerns(one.request, reading):
            raise FabricRefused("BUSY", f"operation {one.id} on {one.request.uri} is still {one.status}")


def _concerns(request: wire.OperationRequest, reading: Reading) -> bool:
    """Whether a request may change this domain. In doubt it may."""
    *_, collection, entity = ["", *urlsplit(request.uri).path.rstrip("/").split("/")]
    if entity == "partitions":
        named = request.body.get("Members") if isinstance(request.body, dict) else None
        if not named or not all(isinstance(one, str) for one in named):
            return True
        return not {gpu.id for gpu in reading.entities.values()}.isdisjoint(named)
    if collection == "partitions":
        return any(entity == one.entity for one in reading.partitions.values())
    return False


def _require_completed(call: str, operation: wire.Operation) -> None:
    if operation.status == "completed":
        return
    result = operation.result or wire.OperationResult()
    said = f"operation {operation.id} {operation.status}: {result.error} {result.details}".rstrip()
    if operation.status not in ("failed", "cancelled"):
        raise FabricUnavailable(f"{call}: {said}")
    code = result.error if _NAME.fullmatch(result.error) else operation.status.upper()
    raise FabricRefused(code, f"{call}: {said}")


async def _cancel(session: Session, operation_id: str) -> None:
    with suppress(FabricRefused, FabricUnavailable):
        await session.begin("CancelOperation", "DELETE", f"operations/{operation_id}")
