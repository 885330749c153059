"""Small values that several record kinds share."""

from collections.abc import Callable
from enum import StrEnum
from typing import Generic, TypeAlias, TypeVar

import msgspec

T_co = TypeVar("T_co", covariant=True)

Ids: TypeAlias = Callable[[], str]
"""Makes a new uuid string; passed in, so that a simulation can be replayed."""


class Changed(msgspec.Struct, Generic[T_co], frozen=True):
    """The result of a change of intent, and the NVLink domains whose reconciler should hear of it."""

    value: T_co
    domains: frozenset[str]


RELEASED = "released"
"""Owner of a found partition that an operator gave up: no logical partition has this id, so the planner takes
it apart."""


class Status(StrEnum):
    """States of REST objects; each kind of object uses a part of them."""

    PENDING = "Pending"
    PROVISIONING = "Provisioning"
    CONFIGURING = "Configuring"
    READY = "Ready"
    REGISTERED = "Registered"
    DELETING = "Deleting"
    TERMINATING = "Terminating"
    TERMINATED = "Terminated"
    REPAIRING = "Repairing"
    ERROR = "Error"
    UNKNOWN = "Unknown"


class InterfaceWish(msgspec.Struct, frozen=True):
    """One GPU of an instance (0-based, module id minus 1) and the logical partition it shall join."""

    logical_partition_id: str
    device_instance: int
