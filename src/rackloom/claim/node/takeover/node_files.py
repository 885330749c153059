"""Takeover of the files of one node: the files found, the plan, and the writes that carry it out.

Both drivers keep `<plugins>/<driver>/checkpoint.json`. The files show the progress of a takeover:

| `checkpoint.json` | `checkpoint.nvidia.json` | phase |
|---|---|---|
| none | any | nothing to take over |
| NVIDIA's | any | to be taken over: another kept file is of an earlier takeover, and out of date |
| ours | NVIDIA's | taken over |
| ours | none | ours from the beginning |

`apply` writes two files: first `checkpoint.nvidia.json`, a copy of the file found, byte for byte, then our
`checkpoint.json` in its place. `back` replaces `checkpoint.json` by NVIDIA's, then deletes the kept file.
Each write replaces a file whole and durably, so a crash leaves one of the phases, from which either
direction may be called.

Neither acts while a plugin of either driver runs. Ours holds `plugin.lock`, NVIDIA's holds `pu.lock` and
`cp.lock` only while it works on a claim, and both answer on their sockets. The locks are held over the
writes. NVIDIA's plugin refuses to start with our checkpoint, and ours with NVIDIA's, and neither overwrites
the other's.

CDI files are not touched. Both drivers give them the same names, so that the plugin which runs deletes them
when a claim ends.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path

import msgspec

from rackloom.claim.node.plugin import CheckpointEntry, NodeValue
from rackloom.claim.node.sockets import answering
from rackloom.claim.node.storage import (
    CheckpointContent,
    StillRunning,
    as_started,
    decode_checkpoint,
    encode_checkpoint,
    plugin_lock,
)
from rackloom.claim.node.takeover.claims import (
    ClaimMove,
    Fate,
    NvidiaInstallation,
    Release,
    adopted_daemons,
    give_back_claim,
    take_over_claim,
)
from rackloom.claim.node.takeover.kubelet_state import held_claims
from rackloom.claim.node.takeover.nvidia_checkpoint import (
    NvidiaClaim,
    decode_nvidia_checkpoint,
    encode_nvidia_checkpoint,
    is_nvidia_checkpoint,
)
from rackloom.core.cluster import names
from rackloom.errors import Refused
from rackloom.runtime.durable_files import PARTIAL, remove_durably, write_durably

CHECKPOINT = "checkpoint.json"
KEPT = "checkpoint.nvidia.json"
DRIVERS = (names.IMEX_DRIVER, names.GPU_DRIVER)
_NVIDIA_LOCKS = ("pu.lock", "cp.lock")


class NodePlaces(NodeValue, frozen=True, kw_only=True):
    """The paths of a node's files, and the boot that it is in."""

    plugins: Path
    """kubelet's plugins directory."""
    registry: Path
    """kubelet's plugins_registry directory."""
    cdi: Path
    kubelet_state: Path
    """kubelet's dra_manager_state."""
    boot_id: str
    dranet: Path = Path("/run/dranet/dranet.db")
    """DRANET's database."""
    nvidia: NvidiaInstallation = NvidiaInstallation(namespace="nvidia-dra-driver-gpu", has_module=True)


class Phase(StrEnum):
    """How far the takeover of a driver is."""

    NOTHING = "none"
    NVIDIA = "nvidia"
    TAKEN_OVER = "taken-over"
    OURS = "ours"
    DRANET = "dranet"


class DriverPlan(NodeValue, frozen=True, kw_only=True):
    """The actions for one driver. There are none if `writes` is empty."""

    driver: str
    phase: Phase
    claims: tuple[ClaimMove, ...] = ()
    notes: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    """Locks and sockets of a plugin on this node that must be stopped first."""
    writes: tuple[str, ...] = ()
    """Files that are written, in this order."""

    @property
    def blocked(self) -> tuple[ClaimMove, ...]:
        """Claims that keep the plan from being carried out."""
        return tuple(move for move in self.claims if move.fate is Fate.BLOCKED)


class _Write(NodeValue, frozen=True, kw_only=True):
    """`content` for a file, or None to delete it."""

    path: Path
    content: bytes | None


# Plans.


def plan_takeover(places: NodePlaces, driver: str) -> DriverPlan:
    """The plan of `apply`. Raises `Refused` if a file cannot be read."""
    return _with_running(places, _takeover(places, driver)[0])


def plan_way_back(places: NodePlaces, driver: str, release: Release | None = None) -> DriverPlan:
    """The plan of `back`. Raises `Refused` if a file cannot be read."""
    return _with_running(places, _way_back(places, driver, release)[0])


def _with_running(places: NodePlaces, plan: DriverPlan) -> DriverPlan:
    return msgspec.structs.replace(plan, running=tuple(_running(places, plan.driver)) if plan.writes else ())


def _takeover(places: NodePlaces, driver: str) -> tuple[DriverPlan, tuple[_Write, ...]]:
    home = places.plugins / driver
    phase, found = _phase(home)
    if phase is not Phase.NVIDIA:
        return DriverPlan(driver=driver, phase=phase), ()
    path = home / CHECKPOINT
    checkpoint = decode_nvidia_checkpoint(found, path)
    held = held_claims(places.kubelet_state)
    known = None if held is None else {claim.ref.uid: claim.ref for claim in held}
    moves = [
        take_over_claim(driver, claim, known, places.nvidia) for _, claim in sorted(checkpoint.claims.items())
    ]
    entries = {entry.ref.uid: entry for _, entry in moves if entry is not None}
    content = CheckpointContent(boot_id=checkpoint.boot_id or places.boot_id, claims=entries)
    writes = (
        _Write(path=home / KEPT, content=found),
        _Write(path=path, content=encode_checkpoint(content)),
    )
    notes = _boot_notes(content.boot_id, places) or tuple(_cdi_notes(places.cdi, driver, entries.values()))
    notes += tuple(_daemon_notes(entries.values()))
    return _plan(driver, phase, [move for move, _ in moves], notes, writes), writes


def _way_back(
    places: NodePlaces, driver: str, release: Release | None
) -> tuple[DriverPlan, tuple[_Write, ...]]:
    home = places.plugins / driver
    phase, found = _phase(home)
    if phase is Phase.NVIDIA and (home / KEPT).exists():
        # The way back was cut off before its last write.
        writes: tuple[_Write, ...] = (_Write(path=home / KEPT, content=None),)
        return _plan(driver, phase, [], (), writes), writes
    if phase is not Phase.TAKEN_OVER:
        return DriverPlan(driver=driver, phase=phase), ()
    original = decode_nvidia_checkpoint((home / KEPT).read_bytes(), home / KEPT)
    content = decode_checkpoint(found, home / CHECKPOINT)
    entries = content.claims
    if content.boot_id != places.boot_id:
        entries = {uid: as_started(entry) for uid, entry in entries.items()}
    moves = [give_back_claim(driver, entry, original, release) for _, entry in sorted(entries.items())]
    claims: dict[str, NvidiaClaim] = {claim.uid: claim for _, claim in moves if claim is not None}
    restored = msgspec.structs.replace(
        original, boot_id=content.boot_id if original.boot_id else "", claims=claims
    )
    writes = (
        _Write(path=home / CHECKPOINT, content=encode_nvidia_checkpoint(restored)),
        _Write(path=home / KEPT, content=None),
    )
    notes: tuple[str, ...] = ()
    if content.boot_id != places.boot_id and original.boot_id:
        notes = ("the node has been rebooted since: NVIDIA's driver will forget all claims at its start",)
    return _plan(driver, phase, [move for move, _ in moves], notes, writes), writes


def _plan(
    driver: str,
    phase: Phase,
    claims: Sequence[ClaimMove],
    notes: tuple[str, ...],
    writes: Sequence[_Write],
) -> DriverPlan:
    return DriverPlan(
        driver=driver,
        phase=phase,
        claims=tuple(claims),
        notes=notes,
        writes=tuple(f"{'delete' if write.content is None else 'write'} {write.path}" for write in writes),
    )


def _phase(home: Path) -> tuple[Phase, bytes]:
    path = home / CHECKPOINT
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return Phase.NOTHING, b""
    if is_nvidia_checkpoint(found):
        return Phase.NVIDIA, found
    # Raises for a file that is of neither driver.
    decode_checkpoint(found, path)
    return Phase.TAKEN_OVER if (home / KEPT).exists() else Phase.OURS, found


def _boot_notes(boot_id: str, places: NodePlaces) -> tuple[str, ...]:
    if boot_id == places.boot_id:
        return ()
    return ("it is of an earlier boot: its claims count as started, and are prepared anew or undone",)


def _daemon_notes(entries: Iterable[CheckpointEntry]) -> Iterator[str]:
    for entry in entries:
        for daemon in adopted_daemons(entry):
            yield (
                f"claim {entry.ref} uses MPS: when it ends the GPU plugin deletes Deployment"
                f" {daemon.namespace}/{daemon.deployment}, and needs the right to"
            )


def _cdi_notes(cdi: Path, driver: str, entries: Iterable[CheckpointEntry]) -> Iterator[str]:
    vendor = f"k8s.{driver}"
    for entry in entries:
        ids = (cdi_id for device in entry.devices for cdi_id in device.cdi_ids)
        named = any(cdi_id.startswith(f"{vendor}/claim=") for cdi_id in ids)
        file = cdi / f"{vendor}-claim_{entry.ref.uid}.yaml"
        if named and not file.exists():
            yield f"claim {entry.ref.uid} has no CDI file {file}: it is prepared anew at kubelet's next call"


# Carrying plans out.


def apply_takeover(places: NodePlaces, drivers: Sequence[str]) -> tuple[DriverPlan, ...]:
    """Take `drivers` over. Returns the plans that were carried out.

    Before the first write it raises `StillRunning` while a plugin runs, and `Refused` for a blocked claim.
    """
    with ExitStack() as stack:
        for driver in drivers:
            stack.enter_context(_stopped(places, driver))
        return _carry_out([_takeover(places, driver) for driver in drivers])


def give_back(
    places: NodePlaces, drivers: Sequence[str], release: Release | None = None
) -> tuple[DriverPlan, ...]:
    """Give `drivers` back to NVIDIA's. Returns the plans that were carried out.

    Raises `Refused` before the first write if a plugin runs, a claim is blocked, or a driver has nothing
    to go back to.
    """
    with ExitStack() as stack:
        for driver in drivers:
            stack.enter_context(_stopped(places, driver))
        plans = [_way_back(places, driver, release) for driver in drivers]
        for plan, _ in plans:
            if plan.phase is Phase.OURS:
                path = places.plugins / plan.driver / CHECKPOINT
                raise Refused(
                    f"{path} was never taken over: there is nothing to go back to",
                    nearest_fix="name the one that was by --driver, or drain the node and move the file away",
                )
        return _carry_out(plans)


def _carry_out(plans: Sequence[tuple[DriverPlan, tuple[_Write, ...]]]) -> tuple[DriverPlan, ...]:
    for plan, _ in plans:
        for move in plan.blocked:
            raise Refused(
                f"claim {move.claim or move.uid} of {plan.driver} cannot be moved: {move.why}",
                nearest_fix=f"{move.fix}; nothing was changed",
            )
    for _, writes in plans:
        for write in writes:
            if write.content is None:
                remove_durably(write.path)
            else:
                write_durably(write.path, write.content)
    return tuple(plan for plan, _ in plans)


@contextmanager
def _stopped(places: NodePlaces, driver: str) -> Iterator[None]:
    """No plugin of either driver runs while the context is entered. Raises `StillRunning` if one does."""
    home = places.plugins / driver
    if not home.is_dir():
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(plugin_lock(home, driver))
        for name in _NVIDIA_LOCKS:
            stack.enter_context(_existing_lock(home / name, driver))
        for what in answering(home, places.registry, driver):
            raise StillRunning(
                f"a plugin of {driver} runs on this node: {what}",
                nearest_fix="stop it (the DaemonSet of either driver must not run here), then call again",
            )
        for partial in home.glob(f".checkpoint*{PARTIAL}"):
            remove_durably(partial)
        yield


@contextmanager
def _existing_lock(path: Path, driver: str) -> Iterator[None]:
    """Hold the lock `path`, if there is such a file."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise StillRunning(
            f"a plugin of {driver} works on a claim (it holds {path})",
            nearest_fix="stop it, then call again",
        ) from error
    finally:
        os.close(handle)


def _running(places: NodePlaces, driver: str) -> Iterator[str]:
    """The reasons for which `_stopped` would refuse. Nothing is made, and no lock outlasts the check."""
    for name in ("plugin.lock", *_NVIDIA_LOCKS):
        path = places.plugins / driver / name
        if is_locked(path, driver):
            yield f"a plugin holds {path}"
    yield from answering(places.plugins / driver, places.registry, driver)


def is_locked(path: Path, driver: str) -> bool:
    """Whether a process holds the lock `path`."""
    try:
        with _existing_lock(path, driver):
            return False
    except StillRunning:
        return True
