"""Holding the pods of a gang until all of them are there and placed."""

import msgspec

from rackloom.claim.cluster.admission.marks import GANG_LABEL
from rackloom.claim.cluster.admission.reviews import PatchOp, Verdict
from rackloom.claim.cluster.admission.shapes import Named, Pod
from rackloom.claim.cluster.gang import marks
from rackloom.claim.cluster.gang.wishes import EXAMPLE, check_name, group_of, read_wish
from rackloom.errors import Refused


def hold(pod: Pod) -> tuple[Pod, Verdict]:
    """The pod as it is then, and what becomes of it. Doing it twice changes nothing more.

    A pod that nobody could ever place is denied. One that says no size belongs to somebody else's gang.
    """
    if not pod.is_of_a_gang or pod.is_bound:
        return pod, Verdict()
    if marks.SIZE_ANNOTATION not in pod.annotations:
        return pod, Verdict(
            warnings=(f"the pod's gang has no size, so nobody waits for it: {EXAMPLE}",),
            rules=(("gang", "warned"),),
        )
    try:
        _check(pod)
    except Refused as refused:
        return pod, Verdict(
            allowed=False, message=f"the pod can be in no gang: {refused}", rules=(("gang", "denied"),)
        )
    return _gated(pod)


def _check(pod: Pod) -> None:
    check_name(pod.labels[GANG_LABEL])
    wish, group = read_wish(pod.annotations), group_of(pod.labels)
    if not wish.has(group):
        groups = " or ".join(name for name, _ in wish.sizes)
        raise Refused(
            f"its group is {group!r}, and {marks.SIZE_ANNOTATION} has none of that name",
            nearest_fix=f"set label {marks.GROUP_LABEL} to {groups}",
        )


def _gated(pod: Pod) -> tuple[Pod, Verdict]:
    gates = pod.spec.scheduling_gates
    if any(one.name == marks.GATE for one in gates or ()):
        return pod, Verdict()
    gate = {"name": marks.GATE}
    patch: PatchOp = {"op": "add", "path": "/spec/schedulingGates/-", "value": gate}
    if gates is None:
        patch = {"op": "add", "path": "/spec/schedulingGates", "value": [gate]}
    held = msgspec.structs.replace(pod.spec, scheduling_gates=(*(gates or ()), Named(name=marks.GATE)))
    return msgspec.structs.replace(pod, spec=held), Verdict(patch=(patch,), rules=(("gang", "changed"),))
