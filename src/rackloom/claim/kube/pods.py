"""What the status of a Pod says, for whoever asks no more of it than this."""

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
