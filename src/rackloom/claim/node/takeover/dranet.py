"""DRANET on a node: its claims and files, and why it keeps its NICs while pods have them.

DRANET serves `dra.net` as our NIC plugin does, and keeps no file beside it. It has a database
(`/run/dranet/dranet.db`, or in memory alone) of the NICs that it moved into pods and of their earlier
settings on the host. The network namespaces of the pods are in its memory only. A driver that takes such a
NIC over could not bring it back under its name, with its addresses and routes. So nothing is taken over: pods
with its NICs end first, while DRANET runs, then it is stopped. After that there is nothing to take over, and
our plugin starts from the hardware. The way back is the same with the two exchanged.

kubelet's own state shows which claims have NICs here. Those of our checkpoint are ours, all others DRANET's.
"""

from collections.abc import Iterable

from rackloom.claim.node.plugin import PrepareState
from rackloom.claim.node.sockets import answering
from rackloom.claim.node.storage import StillRunning, decode_checkpoint
from rackloom.claim.node.takeover.claims import ClaimMove, Fate
from rackloom.claim.node.takeover.kubelet_state import HeldClaim, held_claims
from rackloom.claim.node.takeover.node_files import (
    CHECKPOINT,
    DriverPlan,
    NodePlaces,
    Phase,
    is_locked,
)
from rackloom.errors import Refused

DRANET = "dra.net"
_THEIRS = "DRANET moved its NIC into a pod, and what DRANET knows of the way back is not known here"
_OURS = "Rackloom moved its NIC into a pod, and DRANET does not know the way back"


def plan_dranet(places: NodePlaces, *, back: bool = False) -> DriverPlan:
    """The state of `dra.net`, and the claims that must end before it changes hands. Nothing is ever written.

    Raises `Refused` if our checkpoint cannot be read.
    """
    home = places.plugins / DRANET
    ours = _our_claims(places)
    held = [claim for claim in held_claims(places.kubelet_state) or () if DRANET in claim.devices]
    theirs = [claim for claim in held if claim.ref.uid not in ours]
    we_run = is_locked(home / "plugin.lock", DRANET)
    sockets = tuple(answering(home, places.registry, DRANET))
    if back:
        moves = tuple(_moves((claim for claim in held if claim.ref.uid in ours), _OURS))
        running = sockets if we_run else ()
    else:
        moves = tuple(_moves(theirs, _THEIRS))
        running = () if we_run else sockets
    there = bool(theirs or (sockets and not we_run) or places.dranet.exists())
    mine = we_run or bool(ours) or (home / CHECKPOINT).exists()
    phase = Phase.DRANET if there else Phase.OURS if mine else Phase.NOTHING
    return DriverPlan(
        driver=DRANET, phase=phase, claims=moves, notes=tuple(_notes(places, phase)), running=running
    )


def require_drained(places: NodePlaces, *, back: bool = False) -> DriverPlan:
    """The plan, if nothing is in its way. Raises `StillRunning` or `Refused`."""
    plan = plan_dranet(places, back=back)
    if plan.phase is not Phase.NOTHING and held_claims(places.kubelet_state) is None:
        raise Refused(
            f"kubelet's state {places.kubelet_state} cannot be read, and it says which NICs are in pods",
            nearest_fix="name the file by --kubelet-state",
        )
    # Pods end first: only the driver that moved a NIC brings it back.
    for move in plan.blocked:
        raise StillRunning(
            f"claim {move.claim} of {DRANET} cannot change hands: {move.why}", nearest_fix=move.fix
        )
    for what in plan.running:
        raise StillRunning(
            f"{'Rackloom' if back else 'DRANET'} still serves {DRANET} on this node: {what}",
            nearest_fix="stop its DaemonSet on this node, then call again",
        )
    return plan


def _our_claims(places: NodePlaces) -> frozenset[str]:
    path = places.plugins / DRANET / CHECKPOINT
    try:
        return frozenset(decode_checkpoint(path.read_bytes(), path).claims)
    except FileNotFoundError:
        return frozenset()


def _moves(claims: Iterable[HeldClaim], why: str) -> Iterable[ClaimMove]:
    for claim in sorted(claims, key=lambda claim: claim.ref.uid):
        yield ClaimMove(
            uid=claim.ref.uid,
            claim=str(claim.ref),
            state=PrepareState.COMPLETED,
            devices=claim.devices[DRANET],
            fate=Fate.BLOCKED,
            why=why,
            fix="end the pods that use it, and leave the driver running until they have ended",
        )


def _notes(places: NodePlaces, phase: Phase) -> Iterable[str]:
    if phase is Phase.NOTHING:
        return
    if held_claims(places.kubelet_state) is None:
        yield f"kubelet's state {places.kubelet_state} cannot be read: which NICs are in pods is not known"
    if places.dranet.exists():
        yield f"DRANET's database {places.dranet} is left as it is"
