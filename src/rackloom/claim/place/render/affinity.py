"""For kube-scheduler as it is: the chosen trays by node affinity, one clique by pod affinity.

Pod affinity alone lets the first pod pick a clique that is too small; with the trays named, it cannot.
"""

from collections.abc import Iterator

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading.jobs import Team
from rackloom.claim.place.render.edit import Draft, Object, inside
from rackloom.claim.place.render.names import as_label
from rackloom.claim.place.search.blocks import blocks_of
from rackloom.claim.place.values import Gang, Plan
from rackloom.errors import Refused

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def with_affinity(draft: Draft, gang: Gang, plan: Plan, labels: Labels) -> None:
    """Pin every pod template to the trays of its group, and those with devices to one clique.

    Raises Refused where pods of one template have to be in more than one.
    """
    _check_templates(draft, gang, plan)
    name = as_label(gang.name)
    serious = {group.name for group in gang.groups if not group.is_helper}
    pin_to_trays(draft, plan, labels)
    for team, _, template in draft.templates():
        draft.mark(template, "labels", {labels.job: name})
        if team.name in serious and len(plan.cliques) == 1:
            _keep_together(template, name, labels)


def pin_to_trays(draft: Draft, plan: Plan, labels: Labels) -> None:
    """Let every pod template use the trays of its groups only."""
    for team, member, template in draft.templates():
        _pin(template, _trays(draft, plan, team, member), labels)


def _check_templates(draft: Draft, gang: Gang, plan: Plan) -> None:
    """Trays of two cliques in one template would let a replica, or a segment, straddle both."""
    if len(plan.cliques) == 1 or draft.job.kind == "Pod":
        return
    for count in _blocks_by_template(draft, gang):
        if count > 1:
            what = f"segments of {gang.segment}" if gang.segment else "replicas"
            others = "lws" if draft.job.kind == "LeaderWorkerSet" else "kueue or slurm"
            raise Refused(
                f"{gang.name}: {count} {what} have one pod template and {len(plan.cliques)} cliques, and node"
                " affinity cannot tell which pod goes where: one could straddle two cliques",
                nearest_fix=f"use --render {others}",
            )


def _blocks_by_template(draft: Draft, gang: Gang) -> Iterator[int]:
    """How many blocks the pods of each template are in."""
    serious = [team for team in draft.job.teams if team.need.takes_devices]
    for template in dict.fromkeys(team.template for team in serious):
        alike = {team.name for team in serious if team.template == template}
        yield sum(any(part.group.name in alike for part in block) for block in blocks_of(gang))


def _trays(draft: Draft, plan: Plan, team: Team, member: int) -> list[str]:
    """Of all groups that have the template; of pods, the tray of this one."""
    if draft.job.kind == "Pod":
        return [seat.tray for seat in plan.seats if (seat.group, seat.member) == (team.name, member)]
    same = {one.name for one in draft.job.teams if one.template == team.template}
    return list(dict.fromkeys(seat.tray for seat in plan.seats if seat.group in same))


def _pin(template: Object, trays: list[str], labels: Labels) -> None:
    """Terms are alternatives, so each gets the requirement."""
    node = inside(template, "spec", "affinity", "nodeAffinity", _REQUIRED)
    rule = {"key": labels.host, "operator": "In", "values": trays}
    terms = node.get("nodeSelectorTerms") or [{}]
    node["nodeSelectorTerms"] = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), rule]} for term in terms
    ]


def _keep_together(template: Object, name: str, labels: Labels) -> None:
    """The selector is this job alone: a broader one glues two runs to one rack."""
    pods = inside(template, "spec", "affinity", "podAffinity")
    others = [rule for rule in pods.get(_REQUIRED) or () if rule.get("topologyKey") != labels.clique]
    selector = {"matchLabels": {labels.job: name}}
    pods[_REQUIRED] = [*others, {"topologyKey": labels.clique, "labelSelector": selector}]
