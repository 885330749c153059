"""One attempt to prepare or unprepare one claim: every step is repeatable after a crash at any other.

What is begun is written down before anything is touched, and forgotten only after everything is undone.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from rackloom.claim.node.cdi import CdiDirectory
from rackloom.claim.node.checkpoint import Checkpoint
from rackloom.claim.node.claims import Obsolete
from rackloom.claim.node.plugin import Plugin
from rackloom.claim.node.values import Claim, Entry, Prepared, PreparedDevice, ReadyDevice, State
from rackloom.errors import Retry

ABORTED_TTL = 90.0
"""Seconds: twice kubelet's timeout. A prepare that overlapped the giving back has ended by then."""
HELD_RETRY_SECONDS = 1.0


class Preparing:
    """Prepares and unprepares claims of one plugin, and keeps the checkpoint and the CDI specs with it."""

    def __init__(
        self, plugin: Plugin, checkpoint: Checkpoint, cdi: CdiDirectory, wall: Callable[[], float]
    ) -> None:
        self._plugin = plugin
        self._checkpoint = checkpoint
        self._cdi = cdi
        self._wall = wall

    def ready(self, uid: str) -> tuple[ReadyDevice, ...] | None:
        """The devices of a claim that is prepared, as the checkpoint and the CDI directory show."""
        entry = self._checkpoint.claims.get(uid)
        if entry is None or entry.state is not State.COMPLETED or entry.undoing:
            return None
        ids = [one for device in entry.devices for one in device.cdi_ids]
        return entry.devices if self._cdi.has_all(uid, ids) else None

    async def prepare(self, claim: Claim) -> tuple[ReadyDevice, ...]:
        """Prepare a claim that is not `ready`. Raises `Retry` or `Refused`."""
        self._refuse_aborted(claim)
        self._await_devices(claim)
        intent = self._plugin.intent(claim)
        self._begin(Entry(ref=claim.ref, state=State.STARTED, fingerprint=claim.fingerprint, record=intent))
        prepared = await self._plugin.prepare(claim)
        # Meanwhile another claim may have completed.
        self._await_devices(claim)
        return self._complete(claim, intent, prepared)

    async def unprepare(self, uid: str) -> None:
        """Give back what a claim has, if it is known. Raises `Retry` or `Refused`."""
        entry = self._checkpoint.claims.get(uid)
        if entry is None or entry.state is State.ABORTED:
            self._cdi.remove(uid)
            return
        self._begin(msgspec.structs.replace(entry, undoing=True))
        await self._plugin.unprepare(entry, self._others(uid))
        self._cdi.remove(uid)
        if entry.state is State.COMPLETED:
            self._checkpoint.drop(uid)
        else:
            self._checkpoint.put(_aborted(entry, self._wall()))

    def _others(self, uid: str) -> list[Entry]:
        """Claims that have, or may soon have, devices here.

        One that is being given back is none of them: two that go at once would each leave it to the other.
        """
        entries = self._checkpoint.claims.values()
        return [
            one
            for one in entries
            if one.ref.uid != uid and one.state is not State.ABORTED and not one.undoing
        ]

    def forget_aborted(self) -> None:
        """Drop the marks of given-up claims whose prepare must have ended by now."""
        for uid, entry in list(self._checkpoint.claims.items()):
            if entry.state is State.ABORTED and self._expired(entry):
                self._checkpoint.drop(uid)

    def sweep_specs(self) -> None:
        """Remove CDI specs of claims that nobody has prepared or is preparing, and halves of specs."""
        self._cdi.remove_partials()
        for uid in self._cdi.claims() - set(self._checkpoint.claims):
            self._cdi.remove(uid)

    def _begin(self, entry: Entry) -> None:
        """Write down what is about to happen."""
        if self._checkpoint.claims.get(entry.ref.uid) != entry:
            self._checkpoint.put(entry)

    def _complete(
        self, claim: Claim, intent: Mapping[str, Any], prepared: Prepared
    ) -> tuple[ReadyDevice, ...]:
        uid = claim.ref.uid
        self._cdi.write(uid, prepared)
        devices = tuple(_ready(device, self._cdi.ids(uid, device)) for device in prepared.devices)
        self._checkpoint.put(
            Entry(
                ref=claim.ref,
                state=State.COMPLETED,
                fingerprint=claim.fingerprint,
                devices=devices,
                record={**intent, **prepared.record},
            )
        )
        return devices

    def _refuse_aborted(self, claim: Claim) -> None:
        entry = self._checkpoint.claims.get(claim.ref.uid)
        if entry is None or entry.state is not State.ABORTED:
            return
        if entry.fingerprint == claim.fingerprint and not self._expired(entry):
            raise _stale(claim)

    def _expired(self, entry: Entry) -> bool:
        return self._wall() - (entry.aborted_at or 0.0) >= ABORTED_TTL

    def _await_devices(self, claim: Claim) -> None:
        """A device that another claim still has will be free once kubelet has unprepared that one."""
        wanted = {
            (one.pool, one.device) for one in claim.results if not one.admin_access and one.share_id is None
        }
        for holder, device in self._held():
            if holder.ref.uid != claim.ref.uid and (device.pool, device.device) in wanted:
                raise Retry(
                    f"device {device.device} is still held by claim"
                    f" {holder.ref.namespace}/{holder.ref.name} on this node",
                    after=HELD_RETRY_SECONDS,
                )

    def _held(self) -> Iterator[tuple[Entry, ReadyDevice]]:
        for entry in self._checkpoint.claims.values():
            if entry.state is State.COMPLETED:
                for device in entry.devices:
                    if not device.admin_access and device.share_id is None:
                        yield entry, device


def _aborted(entry: Entry, now: float) -> Entry:
    return Entry(ref=entry.ref, state=State.ABORTED, fingerprint=entry.fingerprint, aborted_at=now)


def _ready(device: PreparedDevice, cdi_ids: tuple[str, ...]) -> ReadyDevice:
    return ReadyDevice(
        requests=(device.result.main_request,),
        pool=device.result.pool,
        device=device.result.device,
        cdi_ids=cdi_ids,
        share_id=device.result.share_id,
        admin_access=device.result.admin_access,
        kind=device.kind,
    )


def _stale(claim: Claim) -> Obsolete:
    return Obsolete(
        f"stale prepare: claim {claim.ref.namespace}/{claim.ref.name} was already aborted on this node",
        nearest_fix="delete the pod if it still waits for this claim",
    )
