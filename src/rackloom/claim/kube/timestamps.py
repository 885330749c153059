"""Times as Kubernetes writes them."""

from datetime import UTC, datetime


def whole_time(seconds: float) -> str:
    """metav1.Time of seconds since 1970: whole seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_time(seconds: float) -> str:
    """metav1.MicroTime of seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
