"""Leaders of switch controllers that move to another address, and operators who tell the site of it."""

import asyncio
from collections.abc import Iterable

from rackloom.twin.scenario import site_actions as actions
from rackloom.twin.scenario.ground import Ground
from rackloom.twin.scenario.stage import Json, NotSeen, Site
from rackloom.twin.scenario.tenants import ASK_AGAIN

ENDPOINT = "nvlink-nmxc-endpoint"
REFUSED = 300
"""The first status that is no success."""


class SwitchLeaders:
    """Moves leaders, and registers where they are; `heal` registers those of which the site was not told."""

    def __init__(self, site: Site, ground: Ground) -> None:
        self._site = site
        self._ground = ground
        self._serials = {
            number: sorted({gpu.chassis_serial for gpu in one.fabric.gpus.values()})
            for number, one in enumerate(ground.switches, 1)
        }
        self._moved: set[int] = set()
        """Racks whose leader is not where their chassis are registered."""
        self._left: set[int] = set()
        """Racks where somebody led before."""
        self._with_standby: set[int] = set()
        """Racks whose next leader is registered, or was before it led."""

    async def move(self, step: actions.SwitchLeaderMoves) -> str:
        """Without a word to the site."""
        switch = self._ground.rack(step.rack)
        before = switch.url
        await switch.move()
        self._moved.add(step.rack)
        self._left.add(step.rack)
        return f"the leader of rack {step.rack} went from {before} to {switch.url}"

    async def return_old(self, step: actions.SwitchOldLeaderReturns) -> str:
        """Two lead now, and one of them has missed what came since."""
        if step.rack not in self._left:
            raise NotSeen(
                f"the leader of rack {step.rack} did not move: write a switch-leader-moves step before"
            )
        url = await self._ground.rack(step.rack).old_leader_returns()
        return f"who led rack {step.rack} before leads again at {url}, and has missed what came since"

    async def yield_old(self, step: actions.SwitchOldLeaderYields) -> str:
        """One leads again."""
        await self._ground.rack(step.rack).old_leader_yields()
        return f"who led rack {step.rack} before lists no GPU any more"

    async def register_standby(self, step: actions.SwitchStandbyRegistered) -> str:
        """As the controller of a switch tray, which has a serial of its own."""
        url = await self._ground.rack(step.rack).stand_by()
        serial = f"{self._serials[step.rack][0]}-standby"
        if step.rack in self._with_standby:
            await self._ask("PATCH", f"{ENDPOINT}/{serial}", {"endpoint": url})
        else:
            await self._ask("POST", ENDPOINT, {"chassisSerial": serial, "endpoint": url})
            self._with_standby.add(step.rack)
        return f"the standby of rack {step.rack} at {url} is registered too"

    async def register_leader(self, step: actions.SwitchLeaderRegistered) -> str:
        """In the place of the address that was known."""
        url = self._ground.rack(step.rack).url
        await self._tell([step.rack])
        return f"the leader of rack {step.rack} is registered at {url}"

    async def heal(self) -> None:
        """Nobody leads who was succeeded, and the site knows where every leader is."""
        for rack in sorted(self._left):
            await self._ground.rack(rack).old_leader_yields()
        await self._tell(sorted(self._moved))

    async def _tell(self, racks: Iterable[int]) -> None:
        for rack in racks:
            for serial in self._serials[rack]:
                await self._ask("PATCH", f"{ENDPOINT}/{serial}", {"endpoint": self._ground.rack(rack).url})
            self._moved.discard(rack)

    async def _ask(self, method: str, path: str, body: Json) -> None:
        """As the operator, until there is an answer. Not seen where that is a refusal."""
        answer = await self._site.operate(method, path, body)
        if answer is None:
            await asyncio.sleep(ASK_AGAIN)
            return await self._ask(method, path, body)
        if answer.status >= REFUSED:
            raise NotSeen(f"{method} {path}: {answer.status} {answer.body}")
        return None
