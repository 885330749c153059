"""S10: an object that was acknowledged is there until its deletion was acknowledged."""

from collections.abc import Iterator
from typing import Any


def lost_object(name: str, machine: str = "", shown: dict[str, Any] | None = None) -> Iterator[str]:
    """S10: an acknowledged object is there, an instance on the machine on which it was acknowledged."""
    if shown is None:
        yield f"{name} was acknowledged, and is gone"
    elif shown["machineId"] != machine:
        yield f"{name} moved from {machine} to {shown['machineId']}"
