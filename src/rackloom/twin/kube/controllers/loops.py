"""How a controller of the fake runs: woken by the store, one key at a time."""

import random
from collections.abc import Awaitable, Callable, Iterable

from rackloom.claim.kube.api import Kind, Object
from rackloom.claim.kube.queue import WorkQueue
from rackloom.twin.kube.store import Key, Store

WORKERS = 4
LONGEST_DELAY = 5.0
"""Seconds. Writes that failed come back soon: a simulation is short."""


async def work_on_changes(
    store: Store,
    first: Iterable[Key],
    keys_of: Callable[[Kind, Object], Iterable[Key]],
    do: Callable[[Key], Awaitable[None]],
    rng: random.Random,
) -> None:
    """Do the keys there are, and those that each change names, until cancelled."""
    queue: WorkQueue[Key] = WorkQueue(rng, longest=LONGEST_DELAY)

    def wake(kind: Kind, obj: Object) -> None:
        for key in keys_of(kind, obj):
            queue.add(key)

    for key in first:
        queue.add(key)
    store.listeners.append(wake)
    try:
        await queue.work(do, workers=WORKERS)
    finally:
        store.listeners.remove(wake)
