"""Quota of ComputeDomains and of spare nodes on a real Kueue, with the rights of deploy/kubernetes/kueue."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.installed import SETTINGS, as_account
from tests.cluster.renderings.applied import apply
from tests.cluster.renderings.kueue_at_work import kueue_at_work
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi, NotFound, Rejected
from rackloom.core.cluster.domain_objects import read_compute_domain_status
from rackloom.core.cluster.names import IMEX_DRIVER
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    WORKLOAD,
    Object,
    has_condition,
)
from rackloom.core.domains.quota import (
    DOMAINS_RESOURCE,
    QUEUE_LABEL,
    SPARES_ANNOTATION,
    SPARES_RESOURCE,
    workload_name,
)
from rackloom.core.domains.settings import QuotaMode
from rackloom.core.kueue.plans import CONTROLLER_NAME

pytestmark = pytest.mark.anyio
VERSION = "kueue.x-k8s.io/v1beta2"
CONFIG: Object = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "namespace": "kueue-system",
    "integrations": {"frameworks": ["batch/job"]},
    # A Workload that is never reported ready would be evicted.
    "waitForPodsReady": {"timeout": "5s", "recoveryTimeout": "5s"},
}


@pytest.fixture
async def kueue(
    operators: Path, cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes
) -> AsyncIterator[None]:
    """Kueue and our controller at work. ComputeDomains with the label of a queue need quota."""
    await add_nodes(1)  # for the pods of the overlay
    settings = msgspec.structs.replace(SETTINGS, quota=QuotaMode.LABELLED)
    async with kueue_at_work(operators, CONFIG, cluster, api, settings):
        yield


def queue(namespace: str, domains: int, spares: int, name: str = "default", **spec: Any) -> list[Object]:
    """An administrator's objects: a queue with quota of ComputeDomains and of spare nodes."""

    def made(kind: str, name: str, spec: Object, **more: str) -> Object:
        return {"apiVersion": VERSION, "kind": kind, "metadata": {"name": name, **more}, "spec": spec}

    room = {DOMAINS_RESOURCE: domains, SPARES_RESOURCE: spares}
    listed = [{"name": resource, "nominalQuota": str(quota)} for resource, quota in room.items()]
    group = {"coveredResources": list(room), "flavors": [{"name": "fabric", "resources": listed}]}
    cluster_queue = {"namespaceSelector": {}, "resourceGroups": [group], **spec}
    return [
        made("ResourceFlavor", "fabric", {}),
        made("ClusterQueue", f"{namespace}-{name}", cluster_queue),
        made("LocalQueue", name, {"clusterQueue": f"{namespace}-{name}"}, namespace=namespace),
    ]


def domain(namespace: str, name: str, queue: str | None = "default", spares: int = 0) -> Object:
    meta: Object = {"name": name, "namespace": namespace}
    if queue is not None:
        meta["labels"] = {QUEUE_LABEL: queue}
    if spares:
        meta["annotations"] = {SPARES_ANNOTATION: str(spares)}
    spec = {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": f"{name}-channel"}}}
    return {
        "apiVersion": COMPUTE_DOMAIN.api_version,
        "kind": COMPUTE_DOMAIN.kind,
        "metadata": meta,
        "spec": spec,
    }


class Team:
    """The ComputeDomains of a namespace."""

    def __init__(self, api: KubeApi, namespace: str) -> None:
        self.api, self.namespace = api, namespace

    async def workload(self, name: str) -> Object:
        uid = (await self.api.get(COMPUTE_DOMAIN, name, self.namespace))["metadata"]["uid"]
        return await self.api.get(WORKLOAD, workload_name(uid), self.namespace)

    async def has_template(self, name: str) -> bool:
        try:
            await self.api.get(RESOURCE_CLAIM_TEMPLATE, f"{name}-channel", self.namespace)
        except NotFound:
            return False
        return True

    async def message(self, name: str, type_: str = "QuotaReserved") -> str:
        obj = await self.api.get(COMPUTE_DOMAIN, name, self.namespace)
        condition = read_compute_domain_status(obj).condition(type_)
        return "" if condition is None else f"{condition.status} {condition.reason}: {condition.message}"

    async def until_starts(self, name: str) -> None:
        await self._until(name, lambda: self.has_template(name), f"{name} has its claim template")

    async def until_says(self, name: str, words: str) -> None:
        async def is_reported() -> bool:
            return words in await self.message(name)

        await self._until(name, is_reported, f"{name} says {words!r}")

    async def _until(self, name: str, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        try:
            await until(holds, what)
        except AssertionError as error:
            error.add_note(await self.message(name))
            error.add_note(str(await self.workload(name)))
            raise


@pytest.fixture
def team(kueue: None, api: KubeApi, namespace: str) -> Team:
    return Team(api, namespace)


async def test_a_domain_beyond_the_quota_waits_until_another_is_gone(
    team: Team, cluster: ControlPlane, api: KubeApi, namespace: str
) -> None:
    apply(cluster, queue(namespace, domains=1, spares=3))
    apply(cluster, [domain(namespace, "first", spares=2)])
    await team.until_starts("first")
    await team.until_says("first", "True Admitted: it has quota in queue default, spare nodes: 2")

    apply(cluster, [domain(namespace, "second"), domain(namespace, "free", queue=None)])
    await team.until_starts("free")
    await team.until_says(
        "second", "False WaitingForQuota: waits for quota in queue default: couldn't assign"
    )
    assert DOMAINS_RESOURCE in await team.message("second")
    assert (await team.message("second", "Ready")).startswith("False WaitingForQuota")
    assert not await team.has_template("second")

    await api.delete(COMPUTE_DOMAIN, "first", namespace)
    await team.until_starts("second")


async def test_spare_nodes_have_a_quota_of_their_own(
    team: Team, cluster: ControlPlane, api: KubeApi, namespace: str
) -> None:
    # Our check has nothing to plan for them.
    check: Object = {"apiVersion": VERSION, "kind": "AdmissionCheck", "metadata": {"name": "placement"}}
    check["spec"] = {"controllerName": CONTROLLER_NAME}
    checks = {"admissionChecks": [{"name": "placement"}]}
    apply(cluster, [check, *queue(namespace, domains=9, spares=3, admissionChecksStrategy=checks)])
    apply(cluster, [domain(namespace, "first", spares=2)])
    await team.until_starts("first")
    apply(cluster, [domain(namespace, "second", spares=2)])
    await team.until_says("second", SPARES_RESOURCE)
    assert not await team.has_template("second")

    # Before it has quota, it may request less. Afterwards its Workload stays as it is.
    apply(cluster, [domain(namespace, "second", spares=1)])
    await team.until_starts("second")
    apply(cluster, [domain(namespace, "second", spares=3)])
    await team.until_says("second", "spare nodes: 1")


async def test_nobody_gets_out_of_the_count_by_the_label(
    team: Team, cluster: ControlPlane, api: KubeApi, namespace: str
) -> None:
    apply(cluster, [*queue(namespace, domains=1, spares=0), *queue(namespace, 1, 0, name="other")])
    apply(cluster, [domain(namespace, "first")])
    await team.until_starts("first")
    for label in ("other", None):
        patch = {"metadata": {"labels": {QUEUE_LABEL: label}}}
        await api.patch(COMPUTE_DOMAIN, "first", namespace, patch)
        apply(cluster, [domain(namespace, "second")])
        await team.until_says("second", "waits for quota in queue default")
        await asyncio.sleep(2)
        assert (await team.workload("first"))["spec"]["queueName"] == "default"
        assert not await team.has_template("second")
    # One that waits may change its queue.
    await api.patch(COMPUTE_DOMAIN, "second", namespace, {"metadata": {"labels": {QUEUE_LABEL: "other"}}})
    await team.until_starts("second")


async def test_an_evicted_domain_is_taken_apart_and_waits_anew(
    team: Team, cluster: ControlPlane, api: KubeApi, namespace: str
) -> None:
    apply(cluster, queue(namespace, domains=1, spares=0))
    apply(cluster, [domain(namespace, "first")])
    await team.until_starts("first")
    apply(cluster, queue(namespace, domains=1, spares=0, stopPolicy="HoldAndDrain"))

    async def is_free() -> bool:
        return not has_condition(await team.workload("first"), "QuotaReserved")

    await until(is_free, "the quota is given back")
    assert not await team.has_template("first")
    assert "admission" not in (await team.workload("first"))["status"]
    await team.until_says("first", "waits for quota in queue default")
    apply(cluster, queue(namespace, domains=1, spares=0, stopPolicy="None"))
    await team.until_starts("first")


async def test_a_queue_takes_back_from_its_cohort_what_is_its_own(
    team: Team, cluster: ControlPlane, namespace: str
) -> None:
    cohort = {"cohortName": namespace, "preemption": {"reclaimWithinCohort": "Any"}}
    apply(cluster, queue(namespace, domains=0, spares=0, name="borrows", **cohort))
    apply(cluster, queue(namespace, domains=1, spares=0, name="owns", **cohort))
    apply(cluster, [domain(namespace, "guest", queue="borrows")])
    await team.until_starts("guest")
    apply(cluster, [domain(namespace, "owner", queue="owns")])
    await team.until_starts("owner")
    assert not await team.has_template("guest")
    await team.until_says("guest", "waits for quota in queue borrows")


async def test_an_evicted_domain_takes_nothing_from_a_pod(
    team: Team, cluster: ControlPlane, api: KubeApi, namespace: str
) -> None:
    apply(cluster, queue(namespace, domains=1, spares=0))
    apply(cluster, [domain(namespace, "first")])
    await team.until_starts("first")
    await hold_channel(team, "first")
    apply(cluster, queue(namespace, domains=1, spares=0, stopPolicy="HoldAndDrain"))
    await team.until_says("first", f"it keeps what it has until pods {namespace}/worker end")
    await asyncio.sleep(3)
    assert await team.has_template("first")
    assert has_condition(await team.workload("first"), "QuotaReserved")

    await api.delete(POD, "worker", namespace, grace_seconds=0)

    async def is_free() -> bool:
        return not has_condition(await team.workload("first"), "QuotaReserved")

    await until(is_free, "the quota is given back")
    assert not await team.has_template("first")


async def hold_channel(team: Team, name: str) -> None:
    """A pod that never runs holds a channel, as after its allocation."""
    api, namespace = team.api, team.namespace
    spec = {
        "containers": [{"name": "main", "image": "none", "resources": {"claims": [{"name": "channel"}]}}],
        "resourceClaims": [{"name": "channel", "resourceClaimName": "worker-channel"}],
        "schedulingGates": [{"name": "tests.rackloom.dev/never"}],
    }
    pod = await api.create(POD, {"metadata": {"name": "worker", "namespace": namespace}, "spec": spec})
    template = await api.get(RESOURCE_CLAIM_TEMPLATE, f"{name}-channel", namespace)
    meta = {"name": "worker-channel", "namespace": namespace}
    await api.create(RESOURCE_CLAIM, {"metadata": meta, "spec": template["spec"]["spec"]})
    result = {"request": "channel", "driver": IMEX_DRIVER, "pool": "tray", "device": "channel-0"}
    holder = {"resource": "pods", "name": "worker", "uid": pod["metadata"]["uid"]}
    status = {"allocation": {"devices": {"results": [result]}}, "reservedFor": [holder]}
    await api.patch(RESOURCE_CLAIM, "worker-channel", namespace, {"status": status}, subresource="status")


async def test_a_deactivated_domain_says_so(
    team: Team, cluster: ControlPlane, api: KubeApi, namespace: str
) -> None:
    apply(cluster, queue(namespace, domains=1, spares=0))
    apply(cluster, [domain(namespace, "first")])
    await team.until_starts("first")
    name = (await team.workload("first"))["metadata"]["name"]
    await api.patch(WORKLOAD, name, namespace, {"spec": {"active": False}})
    await team.until_says("first", f"spec.active of Workload {name} is false")
    await api.patch(WORKLOAD, name, namespace, {"spec": {"active": True}})
    await team.until_starts("first")


async def test_kueue_keeps_a_domain_that_has_no_pods(
    team: Team, cluster: ControlPlane, api: KubeApi, namespace: str
) -> None:
    """Neither its timeout for pods nor the defaults of a namespace apply to it."""
    item = {"type": "Container", "defaultRequest": {"cpu": "1", "memory": "1Gi"}, "default": {"cpu": "2"}}
    meta = {"name": "defaults", "namespace": namespace}
    ranges = {"apiVersion": "v1", "kind": "LimitRange", "metadata": meta, "spec": {"limits": [item]}}
    apply(cluster, [ranges, *queue(namespace, domains=1, spares=0)])
    apply(cluster, [domain(namespace, "first")])
    await team.until_starts("first")
    await asyncio.sleep(8)
    assert has_condition(await team.workload("first"), "Admitted")
    assert not has_condition(await team.workload("first"), "Evicted")


async def test_the_controller_cannot_give_quota(
    team: Team, cluster: ControlPlane, api: KubeApi, namespace: str
) -> None:
    apply(cluster, queue(namespace, domains=1, spares=0))
    apply(cluster, [domain(namespace, "first"), domain(namespace, "second")])
    await until(lambda: _is_any(team, ("first", "second")), "one of them starts")
    loser = "second" if await team.has_template("first") else "first"
    winner = "first" if loser == "second" else "second"
    waiting, running = await team.workload(loser), await team.workload(winner)
    name = waiting["metadata"]["name"]
    reserved = [{**entry, "status": "True"} for entry in waiting["status"]["conditions"]]
    async with as_account(api, cluster, "rackloom-controller") as own:
        for status in ({"conditions": reserved}, {"admission": running["status"]["admission"]}):
            with pytest.raises(Rejected, match="never takes any"):
                await own.patch(WORKLOAD, name, namespace, {"status": status}, subresource="status")
        with pytest.raises(Rejected, match="queue and the requests"):
            await own.patch(WORKLOAD, name, namespace, {"spec": {"priority": 9}})
        with pytest.raises(Rejected, match="no metadata"):
            await own.patch(WORKLOAD, name, namespace, {"metadata": {"ownerReferences": None}})
        stray = {"metadata": {"name": "stray", "namespace": namespace}, "spec": waiting["spec"]}
        with pytest.raises(Rejected, match="ComputeDomains only"):
            await own.create(WORKLOAD, stray)


async def _is_any(team: Team, names: tuple[str, ...]) -> bool:
    return any([await team.has_template(name) for name in names])
