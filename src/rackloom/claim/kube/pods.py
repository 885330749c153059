"""What a Pod says, for whoever asks no more of it than this."""

from collections.abc import Iterator

from rackloom.claim.kube.api import Object


def phase(pod: Object) -> str:
    """Its phase; Pending where no kubelet has written one."""
    return str((pod.get("status") or {}).get("phase", "Pending"))


def has_ended(pod: Object) -> bool:
    """Whether it runs no more and never will."""
    return phase(pod) in ("Succeeded", "Failed")


def is_ready(pod: Object) -> bool:
    """Whether its Ready condition holds."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def claim_names(pod: Object) -> Iterator[str]:
    """The ResourceClaims of a pod, in its namespace, as far as they have been made.

    A claim that is made from a template is named in the pod's status, and so is the one that the scheduler
    makes for extended resources (KEP-5004). A template without requests needs none.
    """
    status = pod.get("status") or {}
    made = {one["name"]: one for one in status.get("resourceClaimStatuses") or ()}
    for wanted in pod["spec"].get("resourceClaims") or ():
        name = wanted.get("resourceClaimName") or made.get(wanted["name"], {}).get("resourceClaimName")
        if name:
            yield name
    extended = (status.get("extendedResourceClaimStatus") or {}).get("resourceClaimName")
    if extended:
        yield extended
