"""Times as Kubernetes writes them."""

from datetime import UTC, datetime


def whole_time(seconds: float) -> str:
    """metav1.Time of seconds since 1970: whole seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(time: str) -> float | None:
    """Seconds since 1970 of an RFC 3339 time; None for anything else."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


def micro_time(seconds: float) -> str:
    """metav1.MicroTime of seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
