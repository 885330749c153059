"""Steps in which the leader of a domain's switch controllers moves to another address.

NMX-C runs on several switch trays of a domain, and one of them leads. When another one takes over, it
answers at its own address, and an operator registers that address with the site. The former leader may
come back with the state that it remembers (two controllers then claim one domain) or learn that it no
longer leads.

`heal` ends every former leadership and registers each leader of which the site was not told.
"""

import asyncio
from collections.abc import Iterable

from rackloom.lab.scenario.model import NmxcAction, NotObserved
from rackloom.lab.scenario.stage import FabricTruth, Json, SiteControl
from rackloom.lab.scenario.tenants import RETRY_SECONDS


class SwitchLeaderMoves(NmxcAction, frozen=True, kw_only=True, tag="switch-leader-moves"):
    """The controller on another switch tray of a rack leads, at its own address; the old one is silent."""

    rack: int = 1


class SwitchOldLeaderReturns(NmxcAction, frozen=True, kw_only=True, tag="switch-old-leader-returns"):
    """The controller that led a rack before its leader moved leads where it did again, with what it knew."""

    rack: int = 1


class SwitchOldLeaderYields(NmxcAction, frozen=True, kw_only=True, tag="switch-old-leader-yields"):
    """It has learned that another one leads, and lists no GPU any more."""

    rack: int = 1


class SwitchStandbyRegistered(NmxcAction, frozen=True, kw_only=True, tag="switch-standby-registered"):
    """An operator registers who would lead a rack next, too; before it leads it lists no GPU."""

    rack: int = 1


class SwitchLeaderRegistered(NmxcAction, frozen=True, kw_only=True, tag="switch-leader-registered"):
    """An operator tells the site at which address the leader of a rack answers now."""

    rack: int = 1


ENDPOINT_PATH = "nvlink-nmxc-endpoint"
FIRST_FAILURE_STATUS = 300
"""The first status that is no success."""


class LeaderMoves:
    """Moves leaders, and registers where they are; `heal` registers those of which the site was not told."""

    def __init__(self, site: SiteControl, ground: FabricTruth) -> None:
        self._site = site
        self._ground = ground
        self._serials = {
            number: sorted({gpu.chassis_serial for gpu in switch.fabric.gpus.values()})
            for number, switch in enumerate(ground.switches, 1)
        }
        self._moved: set[int] = set()
        """Racks whose leader is not where their chassis are registered."""
        self._left: set[int] = set()
        """Racks where somebody led before."""
        self._with_standby: set[int] = set()
        """Racks whose next leader is registered, or was before it led."""

    async def move(self, step: SwitchLeaderMoves) -> str:
        """Without a word to the site."""
        switch = self._ground.rack(step.rack)
        before = switch.url
        await switch.move()
        self._moved.add(step.rack)
        self._left.add(step.rack)
        return f"the leader of rack {step.rack} went from {before} to {switch.url}"

    async def return_old(self, step: SwitchOldLeaderReturns) -> str:
        """Two lead now, and one of them has missed what came since."""
        if step.rack not in self._left:
            raise NotObserved(
                f"the leader of rack {step.rack} did not move: write a switch-leader-moves step before"
            )
        url = await self._ground.rack(step.rack).old_leader_returns()
        return f"who led rack {step.rack} before leads again at {url}, and has missed what came since"

    async def yield_old(self, step: SwitchOldLeaderYields) -> str:
        """One leads again."""
        await self._ground.rack(step.rack).old_leader_yields()
        return f"who led rack {step.rack} before lists no GPU any more"

    async def register_standby(self, step: SwitchStandbyRegistered) -> str:
        """As the controller of a switch tray, which has a serial of its own."""
        url = await self._ground.rack(step.rack).stand_by()
        serial = f"{self._serials[step.rack][0]}-standby"
        if step.rack in self._with_standby:
            await self._ask("PATCH", f"{ENDPOINT_PATH}/{serial}", {"endpoint": url})
        else:
            await self._ask("POST", ENDPOINT_PATH, {"chassisSerial": serial, "endpoint": url})
            self._with_standby.add(step.rack)
        return f"the standby of rack {step.rack} at {url} is registered too"

    async def register_leader(self, step: SwitchLeaderRegistered) -> str:
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
                await self._ask(
                    "PATCH", f"{ENDPOINT_PATH}/{serial}", {"endpoint": self._ground.rack(rack).url}
                )
            self._moved.discard(rack)

    async def _ask(self, method: str, path: str, body: Json) -> None:
        """As the operator, until there is an answer. Not seen where that is a refusal."""
        answer = await self._site.operate(method, path, body)
        if answer is None:
            await asyncio.sleep(RETRY_SECONDS)
            return await self._ask(method, path, body)
        if answer.status >= FIRST_FAILURE_STATUS:
            raise NotObserved(f"{method} {path}: {answer.status} {answer.body}")
        return None
