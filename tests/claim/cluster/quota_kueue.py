"""Kueue 0.19's handling of Workloads that others make, over the objects of a fake cluster.

As strict as the real one: `check_changes` refuses what Kueue's webhook and schema refuse, and quota is free
only once the owner of an evicted Workload has cleared its admission, or the Workload is gone.
"""

from typing import Any

from rackloom.core.cluster.objects import Object, has_condition
from rackloom.core.domains.quota import DOMAINS_RESOURCE, SPARES_RESOURCE


def conditions_of(obj: Object) -> dict[str, Object]:
    return {found["type"]: found for found in (obj.get("status") or {}).get("conditions") or ()}


def with_conditions(obj: Object, now: str, **changed: tuple[str, str, str]) -> Object:
    """The Workload with these conditions, each a status, a reason and a message."""
    fresh = [
        {"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": now}
        for type_, (status, reason, message) in changed.items()
    ]
    kept = [found for type_, found in conditions_of(obj).items() if type_ not in changed]
    return {**obj, "status": {**(obj.get("status") or {}), "conditions": kept + fresh}}


def requests_of(obj: Object) -> dict[str, int]:
    (pod_set,) = obj["spec"]["podSets"]
    assert pod_set["count"] == 1, pod_set
    (container,) = pod_set["template"]["spec"]["containers"]
    requests = dict(container["resources"]["requests"])
    assert requests.pop("cpu") == requests.pop("memory") == "0", "a LimitRange would add its defaults"
    return {name: int(amount) for name, amount in requests.items()}


class QuotaKueue:
    """Decides about Workloads, one after the other. `quota` is given by resource."""

    def __init__(self, **quota: int) -> None:
        self.quota = {DOMAINS_RESOURCE: quota.get("domains", 9), SPARES_RESOURCE: quota.get("spares", 9)}

    def check_changes(self, before: Object, after: Object) -> None:
        """Fail on a change by others that Kueue's webhook or schema refuses."""
        if has_condition(before, "QuotaReserved"):
            assert before["spec"] == after["spec"], "podSets and queueName are immutable with quota"
        had, has = ((obj.get("status") or {}).get("admission") for obj in (before, after))
        assert has in (had, None), "an admission is removed and never changed"
        assert has == had or has_condition(before, "Evicted"), (
            "quota is taken from nobody who was not evicted"
        )
        is_reserved = has_condition(after, "QuotaReserved")
        assert is_reserved == (has is not None), "the condition and the admission go together"
        assert is_reserved or not has_condition(after, "Admitted"), "nothing is admitted without quota"
        assert conditions_of(before).keys() <= conditions_of(after).keys(), "no condition is lost"

    def decided(self, obj: Object, others: list[Object], now: str) -> Object:
        """The Workload as Kueue has it next."""
        assert obj["metadata"]["ownerReferences"], "it would be orphaned"
        if has_condition(obj, "Finished") or has_condition(obj, "QuotaReserved"):
            return obj
        conditions = conditions_of(obj)
        if obj["spec"].get("active") is False or conditions.get("Requeued", {}).get("status") == "False":
            return obj
        for name, amount in requests_of(obj).items():
            used = sum(
                requests_of(other).get(name, 0) for other in others if has_condition(other, "QuotaReserved")
            )
            if used + amount > self.quota[name]:
                why = f"couldn't assign flavors to pod set main: insufficient quota for {name}"
                return with_conditions(obj, now, QuotaReserved=("False", "Pending", why))
        admitted = with_conditions(
            obj,
            now,
            QuotaReserved=("True", "QuotaReserved", "Quota reserved in ClusterQueue all"),
            Admitted=("True", "Admitted", "The workload is admitted"),
            **({"Evicted": ("False", "QuotaReserved", "Previously")} if "Evicted" in conditions else {}),
        )
        assignment: Any = {"name": "main", "count": 1, "flavors": dict.fromkeys(requests_of(obj), "fabric")}
        admission = {"clusterQueue": "all", "podSetAssignments": [assignment]}
        return {**admitted, "status": {**admitted["status"], "admission": admission}}

    def evicted(
        self, obj: Object, now: str, reason: str = "Preempted", message: str = "a better one came"
    ) -> Object:
        """The Workload as Kueue has it when it wants its quota back."""
        assert has_condition(obj, "QuotaReserved")
        return with_conditions(obj, now, Evicted=("True", reason, message))
