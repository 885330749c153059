"""Our AdmissionCheck on a real Kueue: a job starts with a plan, waits for room, or is refused.

deploy/kubernetes/kueue is installed, and the controller has the rights and the policies that it brings.
"""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.installed import SETTINGS, as_account
from tests.cluster.renderings.applied import CLIQUE, apply, landed, spread
from tests.cluster.renderings.conftest import AddRack
from tests.cluster.renderings.jobs import GPU, occupy
from tests.cluster.renderings.kueue_at_work import kueue_at_work
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi, NotFound, Rejected
from rackloom.core.cluster.names import CHANNEL_CLASS
from rackloom.core.cluster.objects import (
    ADMISSION_CHECK,
    JOB,
    POD,
    RESOURCE_CLAIM_TEMPLATE,
    WORKLOAD,
    Object,
    has_condition,
)
from rackloom.core.kueue.plans import CONTROLLER_NAME, PLAN_ANNOTATION

pytestmark = pytest.mark.anyio
RACK = 4
CHANNELS = "rackloom.dev/channels"
VERSION = "kueue.x-k8s.io/v1beta2"
CONFIG: Object = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "namespace": "kueue-system",
    "integrations": {"frameworks": ["batch/job"]},
    "resources": {"deviceClassMappings": [{"name": CHANNELS, "deviceClassNames": [CHANNEL_CLASS]}]},
}


@pytest.fixture
async def kueue(
    operators: Path, cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes
) -> AsyncIterator[None]:
    """Kueue with our overlay and our controller at work."""
    await add_nodes(1)  # for the overlay's pods
    async with kueue_at_work(operators, CONFIG, cluster, api, SETTINGS):
        yield


def queue(namespace: str, **quotas: int) -> list[Object]:
    """An administrator's objects: our check, and a queue that uses it."""

    def made(kind: str, name: str, spec: Object, **more: str) -> Object:
        return {"apiVersion": VERSION, "kind": kind, "metadata": {"name": name, **more}, "spec": spec}

    room = {GPU: 999, "cpu": 9999, CHANNELS: 999} | quotas
    listed = [{"name": name, "nominalQuota": str(quota)} for name, quota in room.items()]
    group = {"coveredResources": list(room), "flavors": [{"name": "trays", "resources": listed}]}
    checks = {"admissionChecks": [{"name": "placement"}]}
    spec = {"namespaceSelector": {}, "resourceGroups": [group], "admissionChecksStrategy": checks}
    return [
        made("ResourceFlavor", "trays", {"nodeLabels": {"kubernetes.io/os": "linux"}}),
        made("AdmissionCheck", "placement", {"controllerName": CONTROLLER_NAME}),
        made("ClusterQueue", "checked", spec),
        made("LocalQueue", "default", {"clusterQueue": "checked"}, namespace=namespace),
    ]


def job(namespace: str, name: str, members: int, template: str | None = None) -> Object:
    """A Job with a tray for each member."""
    limits = {GPU: "4", "cpu": "8"}
    container: Object = {"name": "main", "image": "none", "resources": {"limits": limits}}
    spec: Object = {"restartPolicy": "Never", "containers": [container]}
    if template is not None:
        container["resources"]["claims"] = [{"name": "channel"}]
        spec["resourceClaims"] = [{"name": "channel", "resourceClaimTemplateName": template}]
    labels = {"kueue.x-k8s.io/queue-name": "default"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {
            "suspend": True,
            "parallelism": members,
            "completions": members,
            "completionMode": "Indexed",
            "template": {"spec": spec},
        },
    }


async def workload_of(api: KubeApi, namespace: str, name: str) -> Object:
    """The workload that Kueue made of a Job. Empty before."""
    for obj in (await api.list(WORKLOAD, namespace)).items:
        if any(owner["name"] == name for owner in obj["metadata"].get("ownerReferences") or ()):
            return obj
    return {}


async def is_admitted(api: KubeApi, namespace: str, name: str) -> bool:
    return has_condition(await workload_of(api, namespace, name), "Admitted")


async def reported(api: KubeApi, namespace: str, name: str) -> str:
    """All messages in the conditions and checks of the workload of a Job."""
    status = (await workload_of(api, namespace, name)).get("status") or {}
    entries = (*(status.get("conditions") or ()), *(status.get("admissionChecks") or ()))
    return "; ".join(entry.get("message") or "" for entry in entries)


async def until_reported(api: KubeApi, namespace: str, name: str, words: str) -> str:
    """The messages of a workload, once they have these words."""

    async def is_reported() -> str:
        text = await reported(api, namespace, name)
        return text if words in text else ""

    try:
        return await until(is_reported, f"the workload of {name} says {words!r}")
    except AssertionError as error:
        error.add_note(str(await workload_of(api, namespace, name)))
        raise


async def until_admitted(api: KubeApi, namespace: str, name: str) -> None:
    try:
        await until(lambda: is_admitted(api, namespace, name), f"{name} is admitted")
    except AssertionError as error:
        error.add_note(str(await workload_of(api, namespace, name)))
        raise


async def test_a_job_that_fits_starts_where_it_was_planned(
    kueue: None, cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str
) -> None:
    split, whole = await add_rack(RACK), await add_rack(RACK)
    await occupy(api, namespace, split, 1)
    apply(cluster, queue(namespace))
    apply(cluster, [job(namespace, "rack", RACK)])

    await until_admitted(api, namespace, "rack")
    assert f"planned: {RACK} members on {RACK} trays of clique {whole}" in await reported(
        api, namespace, "rack"
    )
    pods = await landed(api, namespace, RACK)
    assert await spread(api, pods) == {(whole,): RACK}
    for pod in pods:
        assert pod["spec"]["nodeSelector"][CLIQUE] == whole
        assert PLAN_ANNOTATION in pod["metadata"]["annotations"]
    assert has_condition(await api.get(ADMISSION_CHECK, "placement"), "Active")


async def test_the_controller_may_decide_pending_checks_and_change_nothing_else(
    kueue: None, cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str
) -> None:
    await add_rack(RACK)
    apply(cluster, queue(namespace))
    apply(cluster, [job(namespace, "rack", RACK)])
    await until_admitted(api, namespace, "rack")
    workload = await workload_of(api, namespace, "rack")
    name, status = workload["metadata"]["name"], workload["status"]
    retried = [{**check, "state": "Retry"} for check in status["admissionChecks"]]
    async with as_account(api, cluster, "rackloom-controller") as own:
        for change, why in (
            ({"admissionChecks": retried}, "decides checks that are pending"),
            ({"conditions": []}, "changes nothing of a workload beside its checks"),
            ({"admission": None}, "changes nothing of a workload beside its checks"),
        ):
            with pytest.raises(Rejected, match=why):
                await own.patch(WORKLOAD, name, namespace, {"status": change}, subresource="status")
        with pytest.raises(Rejected, match="of a ComputeDomain without quota, and nothing else"):
            await own.patch(WORKLOAD, name, namespace, {"spec": {"active": False}})


async def test_a_job_that_does_not_fit_now_waits_and_starts_once_there_is_room(
    kueue: None, cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str
) -> None:
    rack = await add_rack(RACK)
    await occupy(api, namespace, rack, 1)
    apply(cluster, queue(namespace))
    apply(cluster, [job(namespace, "rack", RACK)])

    text = await until_reported(api, namespace, "rack", "it does not fit now")
    assert f"asks for {RACK} " in text
    assert not await is_admitted(api, namespace, "rack")

    for pod in (await api.list(POD, namespace)).items:
        await api.delete(POD, pod["metadata"]["name"], namespace, grace_seconds=0)
    await until_admitted(api, namespace, "rack")
    assert await spread(api, await landed(api, namespace, RACK)) == {(rack,): RACK}


async def test_a_job_that_is_larger_than_any_rack_is_rejected(
    kueue: None, cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str
) -> None:
    await add_rack(RACK)
    await add_rack(RACK)
    apply(cluster, queue(namespace))
    apply(cluster, [job(namespace, "huge", RACK + 1)])

    await until_reported(api, namespace, "huge", "it can never fit")

    async def is_deactivated() -> bool:
        return (await workload_of(api, namespace, "huge"))["spec"].get("active") is False

    await until(is_deactivated, "the workload is deactivated")
    assert not (await api.list(POD, namespace)).items


async def test_two_jobs_at_once_never_get_the_same_room(
    kueue: None, cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str
) -> None:
    await add_rack(RACK)
    apply(cluster, queue(namespace))
    apply(cluster, [job(namespace, name, RACK - 1) for name in ("first", "second")])

    async def admitted() -> list[str]:
        return [name for name in ("first", "second") if await is_admitted(api, namespace, name)]

    await until(admitted, "one of them is admitted")
    (winner,) = await admitted()
    (loser,) = {"first", "second"} - {winner}
    await until_reported(api, namespace, loser, "it does not fit now")
    assert await admitted() == [winner]

    await api.delete(JOB, winner, namespace, propagation="Background")
    await until_admitted(api, namespace, loser)


async def test_the_channels_of_compute_domains_have_a_quota(
    kueue: None, cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str
) -> None:
    await add_rack(2 * RACK)
    apply(cluster, queue(namespace, **{CHANNELS: RACK}))
    for name in ("first", "second"):
        channel = {"channel": {"resourceClaimTemplate": {"name": f"{name}-channel"}}}
        domain = {
            "apiVersion": "resource.nvidia.com/v1beta1",
            "kind": "ComputeDomain",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"numNodes": 0, **channel},
        }
        apply(cluster, [domain])
        await until(partial(_exists, api, namespace, f"{name}-channel"), "the template is there")
    apply(cluster, [job(namespace, "first", RACK, "first-channel")])
    await until_admitted(api, namespace, "first")
    assert f"planned: {RACK} members on {RACK} trays" in await reported(api, namespace, "first")

    apply(cluster, [job(namespace, "second", RACK, "second-channel")])

    async def is_counted() -> bool:
        status = (await workload_of(api, namespace, "second")).get("status") or {}
        found = status.get("resourceRequests") or ()
        return [entry["resources"].get(CHANNELS) for entry in found] == [str(RACK)]

    await until(is_counted, "the channels of the second job are counted")
    assert not has_condition(await workload_of(api, namespace, "second"), "QuotaReserved")
    apply(cluster, queue(namespace, **{CHANNELS: 2 * RACK}))
    await until_admitted(api, namespace, "second")


async def _exists(api: KubeApi, namespace: str, template: str) -> bool:
    try:
        await api.get(RESOURCE_CLAIM_TEMPLATE, template, namespace)
    except NotFound:
        return False
    return True
