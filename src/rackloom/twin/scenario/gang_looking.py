"""What must be seen of a scenario's gangs: their records, their pods, the trays that are theirs."""

from collections import Counter, defaultdict

from rackloom.claim.cluster.admission.marks import GANG_LABEL
from rackloom.claim.cluster.gang import marks
from rackloom.claim.cluster.gang.conditions import PLACED
from rackloom.claim.cluster.gang.record import GangKey, Record, record_of
from rackloom.claim.cluster.gang.trays import node_view
from rackloom.claim.kube.api import Kind, NotFound, Object
from rackloom.claim.kube.kinds import GANG_PLAN, NODE
from rackloom.claim.place.values import Plan
from rackloom.twin.scenario import cluster_values as values
from rackloom.twin.scenario.cluster_ground import ClusterGround
from rackloom.twin.scenario.stage import NotSeen

Seats = dict[tuple[str, int], str]
"""Trays, by group and number in it."""


class GangLooking:
    """Eyes on gangs. Methods raise `KubeError`; each plan that is recorded is noted as it is written."""

    def __init__(self, ground: ClusterGround) -> None:
        self._ground = ground
        self._plans: dict[GangKey, list[Plan | None]] = defaultdict(lambda: [None])
        """Every plan of a gang one after the other; None: it had none."""
        self._known: dict[GangKey, Seats] = {}
        """What a `gang` step saw last."""
        self._before: dict[int, Seats | None] = {}
        """By step, what the one before it saw last."""
        ground.kube.store.listeners.append(self._note)

    async def gang(self, step: values.ExpectGang) -> str:
        """Record, pods and taints at one moment."""
        found = await self._record(step)
        if found.plan is None:
            placed = found.condition(PLACED)
            why = "nobody says why" if placed is None else placed.message
            raise NotSeen(f"no plan is recorded of {step.name}: {why}")
        plan, running = found.plan, await self._running(found, found.plan)
        told = f"{len(plan.seats)} seats and {len(plan.spares)} spares of {step.name}, {running} running"
        _require((len(plan.seats), len(plan.spares)) == (step.seats, step.spares), told)
        _require(step.running in (None, running), told)
        moved = self._moved(step, found.key, plan)
        written = sum(one is not None for one in self._plans[found.key])
        told = f"{told}; {moved} moved; {written} plans were recorded"
        _require(step.moved in (None, moved), told)
        _require(step.plans in (None, written), told)
        return told

    async def reserved(self, step: values.ExpectReserved) -> str:
        """Taints of nodes, whichever gang's."""
        reserved = sum(len(holders) > 0 for holders in (await self._holders()).values())
        told = f"{reserved} trays are reserved"
        _require(reserved == step.count, told)
        return told

    def _note(self, kind: Kind, obj: Object) -> None:
        if kind == GANG_PLAN:
            found = record_of(obj)
            if self._plans[found.key][-1] != found.plan:
                self._plans[found.key].append(found.plan)

    async def _record(self, step: values.ExpectGang) -> Record:
        try:
            return record_of(await self._ground.api.get(GANG_PLAN, step.name, step.namespace))
        except NotFound as missing:
            raise NotSeen(f"there is no GangPlan {step.name}") from missing

    async def _running(self, found: Record, plan: Plan) -> int:
        """Members on seats of theirs, whose trays are reserved for this gang alone."""
        holders = await self._holders()
        seats = Counter((one.group, one.tray) for one in plan.seats if holders.get(one.tray) == (found.uid,))
        pods = await self._ground.pods(found.key.namespace, f"{GANG_LABEL}={found.key.name}")
        return (seats & Counter(map(_seat_of, filter(self._runs, pods)))).total()

    def _runs(self, pod: Object) -> bool:
        is_off = pod["spec"].get("nodeName") in self._ground.nodes.off
        return pod["status"].get("phase") == "Running" and not is_off

    async def _holders(self) -> dict[str, tuple[str, ...]]:
        nodes = map(node_view, (await self._ground.api.list(NODE)).items)
        return {one.name: one.holders for one in nodes}

    def _moved(self, step: values.ExpectGang, key: GangKey, plan: Plan) -> int:
        now = {(one.group, one.member): one.tray for one in plan.seats}
        before = self._before.setdefault(id(step), self._known.get(key)) or now
        self._known[key] = now
        return sum(before.get(member) != tray for member, tray in now.items())


def _seat_of(pod: Object) -> tuple[str, str]:
    return pod["metadata"]["labels"].get(marks.GROUP_LABEL, marks.ONLY_GROUP), pod["spec"]["nodeName"]


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotSeen(otherwise)
