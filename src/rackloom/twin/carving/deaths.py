"""One scripted story, and the service killed at any one point of it.

A point is the moment before or after a write to the records, or before or after a call to a controller.
"""

import asyncio
from collections.abc import Awaitable, Callable

from rackloom.twin.carving.run import Plan, Result, Run, play
from rackloom.twin.carving.tenants import Broken, Tenant

ATTEMPTS = 20
STORY = Plan(pause=None, operator=None, replicas=1, seconds=0.0, racks=1, trays=3)


class Story(Run):
    """Two tenants come, join GPUs, move them, and partly leave; the process dies at point `death`."""

    def __init__(self, death: int | None) -> None:
        super().__init__(seed=1, plan=STORY)
        self.death = death

    async def act(self) -> None:
        """The script, after which everything must settle."""
        self.plane.next_fuse = self.death
        for tenant in self.tenants:
            await tenant.settle_in()
        red, blue = self.tenants
        for tenant in (red, blue):
            await _until(tenant, "partitions", tenant.create_partition)
            await _until(tenant, "vpcs", tenant.create_vpc)
            await _until(tenant, "instances", tenant.create_instance)
            await self.pause(2)
        await red.rewire_instance()
        await self.pause(2)
        await red.release_instance()
        await self.pause(2)
        await blue.create_instance()
        await blue.rewire_instance()
        await self.pause(2)


def story(death: int | None) -> Result:
    """Play the story; None: nobody dies."""
    return play(Story(death))


def points_of() -> int:
    """How many points of death the story has before everything has settled."""
    whole = Story(None)
    result = play(whole)
    if result.broken:
        raise AssertionError(result.broken)
    return whole.points_in_act


async def _until(tenant: Tenant, kind: str, action: Callable[[], Awaitable[None]]) -> None:
    """Repeat what was lost with the connection."""
    for _ in range(ATTEMPTS):
        await action()
        if tenant.book.live(tenant.org, kind):
            return
        await asyncio.sleep(1)
    raise Broken(f"L1 {tenant.org} has none of {kind} after {ATTEMPTS} attempts")
