"""What a pod template asks of its node, as far as placement goes."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading.counts import count_of
from rackloom.claim.place.reading.neighbours import Apart, apart_of
from rackloom.claim.place.reading.node_rules import NodeRule, check_rule, node_rule
from rackloom.errors import Refused

Json = Mapping[str, Any]
NEVER = "Never"
"""The preemptionPolicy of pods that wait, whatever their priority."""
Effect = Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"]


class Toleration(msgspec.Struct, frozen=True, rename="camel"):
    """As in core/v1. One that compares numbers (`Lt` and `Gt`, alpha there) covers nothing here."""

    key: str = ""
    operator: Literal["", "Equal", "Exists", "Lt", "Gt"] = "Equal"
    value: str = ""
    effect: Effect = ""

    def covers(self, taint: Json) -> bool:
        """Whether a pod with it may stay."""
        if self.effect and self.effect != taint.get("effect"):
            return False
        if self.operator == "Exists":
            return not self.key or self.key == taint.get("key")
        is_equal = self.operator in ("", "Equal")
        return is_equal and self.key == taint.get("key") and self.value == (taint.get("value") or "")


class _Claimed(msgspec.Struct, frozen=True, rename="camel"):
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class PodNeed(msgspec.Struct, frozen=True, kw_only=True):
    """A member's request."""

    gpus: int
    """Counted GPUs: limits of its containers."""
    templates: tuple[str, ...]
    """ResourceClaimTemplates of which it gets a claim each."""
    claims: tuple[str, ...]
    """ResourceClaims that it names."""
    rule: NodeRule
    apart: tuple[Apart, ...]
    tolerations: tuple[Toleration, ...]
    priority: int
    priority_class: str
    preempts: bool
    """Its preemptionPolicy is not Never; that of its class may be."""

    @property
    def takes_devices(self) -> bool:
        """It has GPUs or a claim."""
        return bool(self.gpus or self.templates or self.claims)

    def may_use_what(self, other: "PodNeed") -> bool:
        """Whether both may go to the same nodes."""
        return self.rule == other.rule and self.tolerations == other.tolerations


def pod_need(template: Json, labels: Labels) -> PodNeed:
    """What the pods of a template (or a pod) ask for. Raises Refused for a count or a rule that is none.

    Raises msgspec.ValidationError for a field of another type than core/v1 has it.
    """
    spec = template.get("spec") or {}
    rule = node_rule(spec)
    check_rule(rule)
    named = msgspec.convert(spec.get("resourceClaims") or (), tuple[_Claimed, ...])
    return PodNeed(
        gpus=gpus_of(spec, labels),
        templates=tuple(
            one.resource_claim_template_name for one in named if one.resource_claim_template_name
        ),
        claims=tuple(one.resource_claim_name for one in named if one.resource_claim_name),
        rule=rule,
        apart=apart_of(spec, labels.host),
        tolerations=msgspec.convert(spec.get("tolerations") or (), tuple[Toleration, ...]),
        priority=msgspec.convert(spec.get("priority") or 0, int),
        priority_class=msgspec.convert(spec.get("priorityClassName") or "", str),
        preempts=spec.get("preemptionPolicy") != NEVER,
    )


def gpus_of(spec: Json, labels: Labels) -> int:
    """GPUs that the containers are limited to; init containers run before them and share theirs."""
    together = sum(_limit(one, labels) for one in spec.get("containers") or ())
    return max([together, *(_limit(one, labels) for one in spec.get("initContainers") or ())])


def taints_kept_off(node: Json, tolerations: tuple[Toleration, ...]) -> Iterator[str]:
    """Taints of a node that keep a pod off, as `key=value`."""
    for taint in (node.get("spec") or {}).get("taints") or ():
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not any(
            one.covers(taint) for one in tolerations
        ):
            value = taint.get("value")
            yield f"{taint.get('key')}={value}" if value else str(taint.get("key"))


def _limit(container: Json, labels: Labels) -> int:
    resources = container.get("resources") or {}
    value = (resources.get("limits") or {}).get(
        labels.gpu, (resources.get("requests") or {}).get(labels.gpu, 0)
    )
    try:
        return count_of(value)
    except ValueError as error:
        reason = f"container {container.get('name')}: {labels.gpu} is {value!r}"
        raise Refused(reason, nearest_fix="set it to a whole number") from error
