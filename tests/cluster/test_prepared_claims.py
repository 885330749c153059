"""A simulated kubelet prepares a pod's claims before it runs, reports failures, and unprepares them."""

from collections.abc import Sequence

import pytest
from tests.cluster.conftest import AddNodes
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import DEVICE_CLASS, EVENT, POD, RESOURCE_CLAIM, RESOURCE_SLICE, Object
from rackloom.errors import Retry

pytestmark = pytest.mark.anyio
DRIVER = "devices.example.com"
WHY = "the channel of the domain is not ready"


class FailOnce:
    """Records its calls. The first one of `prepare` fails."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.claims: list[str] = []

    async def prepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        self.calls.append("prepare")
        self.claims = [claim["metadata"]["name"] for claim in claims]
        if len(self.calls) == 1:
            raise Retry(WHY, after=1.0)

    async def unprepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        assert [claim["metadata"]["name"] for claim in claims] == self.claims
        self.calls.append("unprepare")


@pytest.fixture
def devices() -> FailOnce:
    return FailOnce()


async def test_a_failure_is_an_event_and_a_deleted_pod_lets_go(
    api: KubeApi, add_nodes: AddNodes, namespace: str, devices: FailOnce
) -> None:
    (node,) = await add_nodes(1)
    await _publish_one_device(api, node)
    await api.create(RESOURCE_CLAIM, _claim(namespace))
    await api.create(POD, _pod(namespace))

    async def running() -> bool:
        return (await api.get(POD, "user", namespace))["status"]["phase"] == "Running"

    await until(running, "the pod runs")
    assert devices.calls == ["prepare", "prepare"]
    assert devices.claims == ["wanted"]
    events = (await api.list(EVENT, namespace, fields="reason=FailedPrepareDynamicResources")).items
    assert [event["message"] for event in events] == [WHY]

    await api.delete(POD, "user", namespace)

    async def free() -> bool:
        return "allocation" not in (await api.get(RESOURCE_CLAIM, "wanted", namespace))["status"]

    await until(free, "the claim of a pod that is gone is free")
    assert devices.calls == ["prepare", "prepare", "unprepare"]
    await api.delete(RESOURCE_SLICE, f"{node}-slice")
    await api.delete(DEVICE_CLASS, DRIVER)


async def _publish_one_device(api: KubeApi, node: str) -> None:
    selector = {"cel": {"expression": f"device.driver == '{DRIVER}'"}}
    await api.create(DEVICE_CLASS, {"metadata": {"name": DRIVER}, "spec": {"selectors": [selector]}})
    spec = {
        "driver": DRIVER,
        "nodeName": node,
        "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "one"}],
    }
    await api.create(RESOURCE_SLICE, {"metadata": {"name": f"{node}-slice"}, "spec": spec})


def _claim(namespace: str) -> Object:
    request = {"name": "one", "exactly": {"deviceClassName": DRIVER}}
    return {
        "metadata": {"name": "wanted", "namespace": namespace},
        "spec": {"devices": {"requests": [request]}},
    }


def _pod(namespace: str) -> Object:
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "devices"}]}}
    claims = [{"name": "devices", "resourceClaimName": "wanted"}]
    return {
        "metadata": {"name": "user", "namespace": namespace},
        "spec": {"containers": [container], "resourceClaims": claims},
    }
