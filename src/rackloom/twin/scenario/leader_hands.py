"""What happens to the elected one of Rackloom's controllers in a scenario, and who is seen to lead."""

from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.kinds import LEASE
from rackloom.twin.scenario import cluster_values as values
from rackloom.twin.scenario.cluster_stage import Candidates
from rackloom.twin.scenario.site_expectations import ExpectInvariants
from rackloom.twin.scenario.stage import NotSeen
from rackloom.twin.scenario.values import End

WHERE = ("rackloom-controller", "rackloom-system")
"""Name and namespace of the Lease."""


class LeaderHands:
    """Ends the leader, parts it from the API server, and looks who leads. `api` asks as a user does."""

    def __init__(self, candidates: Candidates, api: KubeApi) -> None:
        self._candidates = candidates
        self._api = api
        self._seen: str | None = None
        """Who led when a `leader` step last looked."""
        self._before: dict[int, str | None] = {}
        """By step, who led when the one before it last looked: a step looks again and again."""

    async def kill(self, step: values.LeaderKilled) -> str:
        """Without a last word: the Lease stays its own."""
        who = _somebody(await self._candidates.kill_leader(step.down))
        return f"{who}, which led, ended; it stands for election again after {step.down:g} s"

    async def cut_off(self, _: values.LeaderCutOff) -> str:
        """Alive, and deaf."""
        return f"{_somebody(self._candidates.cut_off_leader())}, which led, is cut off from the API server"

    async def connect(self, _: values.LeaderConnected) -> str:
        """It hears what came meanwhile."""
        self._candidates.connect()
        return "all replicas reach the API server"

    async def leader(self, step: values.ExpectLeader) -> str:
        """Who leads, whom the Lease names, and whether two ever did."""
        self._require_one_at_a_time()
        before = self._before.setdefault(id(step), self._seen)
        who = _somebody(self._candidates.leader)
        named = (await self._api.get(LEASE, *WHERE))["spec"].get("holderIdentity")
        if who != named:
            raise NotSeen(f"{who} leads, the Lease names {named}")
        if step.changed and (before is None or who == before):
            raise NotSeen(f"{who} still leads" if before else "no step before saw who led")
        self._seen = who
        return f"{who} leads, as the Lease says" + (f"; before, {before} did" if step.changed else "")

    async def one_at_a_time(self, _: ExpectInvariants | End) -> str:
        """Since the start."""
        self._require_one_at_a_time()
        return "never did two of Rackloom's controllers lead at once"

    def _require_one_at_a_time(self) -> None:
        if self._candidates.overlaps:
            raise NotSeen(self._candidates.overlaps[0])


def _somebody(who: str | None) -> str:
    if who is None:
        raise NotSeen("nobody leads")
    return who
