"""Edit the pod templates of a job: names, node affinity and pod affinity for kube-scheduler.

`ManifestDraft` is a deep copy of the job's objects. `render_affinity` pins every pod template to the
trays of its groups by node affinity, and keeps the members with devices in one clique by pod affinity on
a label of this job alone. Pod affinity alone lets the first pod pick a clique that is too small, which node
affinity prevents. A broader selector would tie two runs to one rack. Terms of a node affinity are
alternatives, so each gets the requirement.

Raises Refused if one template serves several replicas or segments in several cliques, because node
affinity of a template cannot send each pod to its own clique.

Label values and object names have at most 63 characters. Longer names, and names that are no DNS-1123
label, are shortened and get a hash, so that names that begin alike stay apart.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from rackloom.core.cluster.jobs import Job, JobGroup
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.pods import REQUIRED
from rackloom.core.cluster.trays import Gang, GangPlan
from rackloom.core.cluster.workload_kinds import value_at
from rackloom.core.place.search.gang_needs import colocation_groups
from rackloom.errors import Refused

JsonObject = dict[str, Any]


class ManifestDraft:
    """A copy of the objects of a job, which a renderer changes."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.objects: list[JsonObject] = [deepcopy(obj) for obj in job.objects]

    @property
    def main(self) -> JsonObject:
        """The object itself, or the first of several pods."""
        return self.objects[0]

    def templates(self) -> Iterator[tuple[JobGroup, int, JsonObject]]:
        """Each pod template with its group, or each pod with its group and member number."""
        if self.job.kind != "Pod":
            listed: set[tuple[str | int, ...]] = set()
            for group in self.job.groups:
                if group.spec_key != "spec":
                    raise Refused(
                        f"{self.job.name}: a {self.job.kind} has pod specs without pod templates, which are"
                        " not written to",
                        nearest_fix="use the plan without --render, and its own topology constraint",
                    )
                if group.template not in listed:
                    listed.add(group.template)
                    yield group, 0, value_at(self.main, group.template)
            return
        alike = len(self.job.groups) == 1
        for number, pod in enumerate(self.objects):
            yield self.job.groups[0 if alike else number], number if alike else 0, pod

    def add(self, template: JsonObject, kind: str, values: Mapping[str, str]) -> None:
        """Add `labels` or `annotations`."""
        metadata = mapping_at(template, "metadata")
        metadata[kind] = {**(metadata.get(kind) or {}), **values}


def mapping_at(value: JsonObject, *path: str) -> JsonObject:
    """The mapping at a path. It is created if it is absent."""
    for key in path:
        if value.get(key) is None:
            value[key] = {}
        value = value[key]
    return value


# Names within the limits of labels and objects.


_MAX_LABEL_CHARACTERS = 63
"""Characters of a label's value."""
_HASH_CHARACTERS = 8
"""Characters of the hash, which distinguishes names that begin alike."""
_NOT_IN_DNS_LABEL = re.compile(r"[^a-z0-9-]")
"""Characters that a DNS-1123 label does not allow. Object names allow some dots too."""


def gang_object_name(name: str) -> str:
    """The name of a gang, without its namespace, as the name of an object that a label may hold."""
    own = _bare_name(name)
    value = _as_dns_label(own)
    return own if own and value == own and len(own) <= _MAX_LABEL_CHARACTERS else _with_hash(value, own)


def group_object_name(name: str, group: str) -> str:
    """The same for one group of several. `a-b` of gang `run` and `b` of gang `run-a` differ by the hash."""
    own = _bare_name(name)
    return _with_hash(_as_dns_label(f"{own}-{group}"), f"{own}/{group}")


def _bare_name(name: str) -> str:
    return name.rpartition("/")[2]


def _as_dns_label(name: str) -> str:
    return _NOT_IN_DNS_LABEL.sub("-", name.lower()).strip("-")


def _with_hash(value: str, name: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_CHARACTERS]
    kept = value[: _MAX_LABEL_CHARACTERS - _HASH_CHARACTERS - 1].rstrip("-")
    return f"{kept}-{digest}" if kept else digest


# Node affinity and pod affinity.


def render_affinity(draft: ManifestDraft, gang: Gang, plan: GangPlan, labels: SchedulerLabels) -> None:
    """Pin every pod template to the trays of its group, and those with devices to one clique.

    Raises Refused if pods of one template have to be in more than one clique.
    """
    _check_templates(draft, gang, plan)
    # The value of a label has no slash, and 63 characters at most.
    name = gang.name.replace("/", ".")
    name = name if len(name) <= _MAX_LABEL_CHARACTERS else _with_hash(name, gang.name)
    with_devices = {group.name for group in gang.device_groups}
    pin_to_trays(draft, plan, labels)
    for group, _, template in draft.templates():
        draft.add(template, "labels", {labels.job: name})
        if group.name not in with_devices or len(plan.cliques) > 1:
            continue
        # The selector is of this job alone: a broader one would tie two runs to one rack.
        pods = mapping_at(template, "spec", "affinity", "podAffinity")
        others = [rule for rule in pods.get(REQUIRED) or () if rule.get("topologyKey") != labels.clique]
        term = {"topologyKey": labels.clique, "labelSelector": {"matchLabels": {labels.job: name}}}
        pods[REQUIRED] = [*others, term]


def pin_to_trays(draft: ManifestDraft, plan: GangPlan, labels: SchedulerLabels) -> None:
    """Let every pod template use the trays of its groups only."""
    for group, member, template in draft.templates():
        # A pod has its own tray. A template has the trays of all groups that use it.
        if draft.job.kind == "Pod":
            trays = [at.tray for at in plan.seats if (at.group, at.member) == (group.name, member)]
        else:
            same = {other.name for other in draft.job.groups if other.template == group.template}
            trays = list(dict.fromkeys(seat.tray for seat in plan.seats if seat.group in same))
        # Terms are alternatives, so each gets the requirement.
        node = mapping_at(template, "spec", "affinity", "nodeAffinity", REQUIRED)
        rule = {"key": labels.host, "operator": "In", "values": trays}
        terms = node.get("nodeSelectorTerms") or [{}]
        node["nodeSelectorTerms"] = [
            {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), rule]} for term in terms
        ]


def _check_templates(draft: ManifestDraft, gang: Gang, plan: GangPlan) -> None:
    """Trays of two cliques in one template would let a replica, or a segment, straddle both."""
    if len(plan.cliques) == 1 or draft.job.kind == "Pod":
        return
    with_devices = [group for group in draft.job.groups if group.need.takes_devices]
    for template in dict.fromkeys(group.template for group in with_devices):
        # How many colocation groups the pods of this template are in.
        alike = {group.name for group in with_devices if group.template == template}
        count = sum(any(part.group.name in alike for part in block) for block in colocation_groups(gang))
        if count > 1:
            what = f"segments of {gang.segment}" if gang.segment else "replicas"
            others = "lws" if draft.job.kind == "LeaderWorkerSet" else "kueue or slurm"
            raise Refused(
                f"{gang.name}: {count} {what} have one pod template and {len(plan.cliques)} cliques, and node"
                " affinity cannot tell which pod goes where: one could straddle two cliques",
                nearest_fix=f"use --render {others}",
            )
