"""What a service may add to the reconciler; the reconciler alone needs none of it."""

from collections.abc import Callable

import msgspec
import sqlalchemy as sa

from rackloom.carve.plan.values import Observation
from rackloom.carve.reconcile.meter import Meter, Silent
from rackloom.carve.reconcile.slots import Slots
from rackloom.carve.site import fabric_book
from rackloom.carve.site.disputes import Dispute

Record = Callable[[sa.Connection, str, Observation, float], Dispute | None]
"""Of the endpoint's id, the observation and the time."""


class Hooks(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults do what a reconciler without hooks does."""

    record: Record = fabric_book.record_observation
    """Writes an observation into the records, in one transaction; returns the dispute its domain is in."""
    meter: Meter = Silent()
    acts: bool = True
    """False: domains are read, and nothing is done to them."""
    slots: Slots | None = None
    """Bounds how many domains are worked on at once; None: no bound."""


NONE = Hooks()
"""The reconciler by itself."""
