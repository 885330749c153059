"""What the controllers' process does while it leads: it controls ComputeDomains and gangs."""

import asyncio
import random
import time
from collections.abc import Callable

from rackloom.claim.cluster.controller import Controller
from rackloom.claim.cluster.gang.controller import GangController
from rackloom.claim.cluster.gang.meter import GangMeter
from rackloom.claim.cluster.gang.planner import PlacePlanner
from rackloom.claim.cluster.settings import Settings
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.events import Recorder

LEASE = "rackloom-controller"
"""Name of the Lease that says who leads, and of the process in events and at the API server."""


class Leadership:
    """Runs the controllers for each term in which this process leads."""

    def __init__(
        self,
        api: KubeApi,
        settings: Settings,
        identity: str,
        wall: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._wall = wall
        self._rng = rng or random.Random()  # noqa: S311 (jitter)
        self._api = api
        self._settings = settings
        self._identity = identity
        self.controller: Controller | None = None
        """The one at work; None while another process leads."""
        self.gangs: GangController | None = None
        self.meter = GangMeter()

    async def lead(self) -> None:
        """Control until cancelled. A new term starts from a new look at the cluster."""
        recorder = Recorder(self._api, LEASE, self._identity, self._wall)
        wall, rng = self._wall, self._rng
        self.controller = Controller(self._api, self._settings, recorder, wall, rng)
        self.gangs = GangController(
            self._api, PlacePlanner(), recorder, wall, rng, self._settings.gangs, self.meter
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.controller.run())
                tasks.create_task(self.gangs.run())
        finally:
            self.controller = self.gangs = None
