"""What happens to Rackloom's controllers in a scenario."""

from rackloom.twin.scenario import cluster_values as values
from rackloom.twin.scenario.cluster_stage import ClusterStage
from rackloom.twin.scenario.stage import NotSeen


class ControllerHands:
    """Ends them, doubles them, confuses them."""

    def __init__(self, stage: ClusterStage) -> None:
        self._stage = stage

    async def kill(self, step: values.ControllersKilled) -> str:
        """And others in their place."""
        await self._stage.controllers.kill(step.down)
        return f"Rackloom's controllers ended, and others begin after {step.down:g} s"

    async def die(self, step: values.ControllersDie) -> str:
        """At a step of their own."""
        self._stage.controllers.die(step.point, step.lives)
        return f"{step.lives} lives of the controllers will end, each at its step {step.point}"

    async def ended(self, step: values.ExpectControllersEnded) -> str:
        """How many lives are over."""
        ended = self._stage.controllers.ended
        if ended != step.count:
            raise NotSeen(f"{ended} lives of the controllers have ended")
        return f"{ended} lives of the controllers have ended"

    async def double(self, _: values.ControllersDoubled) -> str:
        """Both believe that they lead."""
        self._stage.controllers.double()
        return "other controllers work beside the first"

    async def single(self, _: values.ControllersSingle) -> str:
        """One is left."""
        await self._stage.controllers.single()
        return "the other controllers ended"

    async def set_clock(self, step: values.ControllersClockSet) -> str:
        """What their machine believes."""
        self._stage.clock.skew += step.by
        return f"the clock of the controllers' machine is {self._stage.clock.skew:+g} s"

    async def heal(self) -> str:
        """One is left, knows the time, and reaches the API server."""
        self._stage.clock.skew = 0.0
        if self._stage.candidates is not None:
            self._stage.candidates.connect()
        await self._stage.controllers.single()
        return "one controller is at work"
