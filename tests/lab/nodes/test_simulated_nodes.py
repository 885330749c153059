"""Simulated nodes in virtual time: pods start, fail to start, end and go as under a kubelet."""

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackloom.claim.kube.api import NotFound
from rackloom.core.cluster.objects import EVENT, LEASE, NODE, POD, RESOURCE_CLAIM, Object, is_pod_ready
from rackloom.errors import Refused, Retry
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.kubelets import (
    HEARTBEAT_SECONDS,
    LEASE_NAMESPACE,
    LEASE_SECONDS,
    NodeSpec,
    SimulatedKubelets,
)
from rackloom.lab.nodes.pods import ContainerRuntime, IdleContainers
from rackloom.lab.virtual import event_loop

SPACE = "default"
A_WHILE = 5.0
"""Virtual seconds in which a kubelet has done everything that it can do at once."""


@dataclass
class Plugins:
    """Records its calls, and refuses while the test requires it."""

    refusal: Exception | None = None
    calls: list[str] = field(default_factory=list)
    takes: float = 0.0
    """Seconds of each call."""

    async def prepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        await self._note("prepare", claims)

    async def unprepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        await self._note("unprepare", claims)

    async def _note(self, what: str, claims: Sequence[Object]) -> None:
        self.calls += [f"{what} {claim['metadata']['name']}" for claim in claims]
        await asyncio.sleep(self.takes)
        if self.refusal is not None:
            raise self.refusal


class EndWith:
    """Containers that end at once."""

    def __init__(self, code: int) -> None:
        self._code = code

    async def run(self, node: str, pod: Object, ready: Callable[[], Awaitable[None]]) -> int:
        return self._code


@dataclass
class Cluster:
    kube: FakeKube
    api: DirectApi
    plugins: Plugins
    kubelets: SimulatedKubelets
    task: asyncio.Task[None]

    async def pod(self, name: str = "p") -> Object:
        return await self.api.get(POD, name, SPACE)

    async def phase(self, name: str = "p") -> str:
        return str((await self.pod(name))["status"].get("phase"))

    async def kill(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


@asynccontextmanager
async def one_node(containers: ContainerRuntime | None = None, seed: int = 1) -> AsyncIterator[Cluster]:
    kube = FakeKube(namespaces=(SPACE, LEASE_NAMESPACE), seed=seed)
    api, plugins = DirectApi(kube, "test"), Plugins()
    async with play(kube, api, plugins, containers or IdleContainers(), seed) as cluster:
        yield cluster


@asynccontextmanager
async def play(
    kube: FakeKube, api: DirectApi, plugins: Plugins, containers: ContainerRuntime, seed: int = 1
) -> AsyncIterator[Cluster]:
    loop, rng = asyncio.get_running_loop(), random.Random(seed)
    kubelets = SimulatedKubelets(
        DirectApi(kube, "kubelet"), loop.time, rng, devices=plugins, containers=containers
    )
    await kubelets.register(NodeSpec("n"))
    task = asyncio.create_task(kubelets.run())
    yield Cluster(kube, api, plugins, kubelets, task)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def in_virtual_time(scenario: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @functools.wraps(scenario)
    def test() -> None:
        async def run() -> None:
            await scenario()

        event_loop.run_simulation(1, run)

    return test


async def bind_pod(cluster: Cluster, *claims: str, name: str = "p") -> None:
    """A pod that the scheduler bound, with claims that are reserved for it."""
    spec = {
        "nodeName": "n",
        "containers": [{"name": "main", "image": "none"}],
        "resourceClaims": [{"name": claim, "resourceClaimName": claim} for claim in claims],
    }
    pod = await cluster.api.create(POD, {"metadata": {"name": name, "namespace": SPACE}, "spec": spec})
    user = {"resource": "pods", "name": name, "uid": pod["metadata"]["uid"]}
    for claim in claims:
        await cluster.api.create(
            RESOURCE_CLAIM, {"metadata": {"name": claim, "namespace": SPACE}, "spec": {}}
        )
        reserved = {"status": {"reservedFor": [user]}}
        await cluster.api.patch(RESOURCE_CLAIM, claim, SPACE, reserved, subresource="status")


@in_virtual_time
async def test_a_bound_pod_runs_and_is_ready() -> None:
    async with one_node() as cluster:
        await bind_pod(cluster)
        await asyncio.sleep(A_WHILE)
        status = (await cluster.pod())["status"]
        assert (status["phase"], status["podIP"]) == ("Running", "10.0.0.1")
        assert is_pod_ready(await cluster.pod())


@in_virtual_time
async def test_containers_take_their_time() -> None:
    async with one_node(IdleContainers(start_s=3 * A_WHILE)) as cluster:
        await bind_pod(cluster)
        await asyncio.sleep(A_WHILE)
        assert await cluster.phase() == "Running"
        assert {status["ready"] for status in (await cluster.pod())["status"]["containerStatuses"]} == {False}
        await asyncio.sleep(3 * A_WHILE)
        assert {status["ready"] for status in (await cluster.pod())["status"]["containerStatuses"]} == {True}


@pytest.mark.parametrize(("code", "phase"), [(0, "Succeeded"), (3, "Failed")])
def test_a_pod_ends_as_its_containers_do(code: int, phase: str) -> None:
    async def run() -> None:
        async with one_node(EndWith(code)) as cluster:
            await bind_pod(cluster, "c")
            await asyncio.sleep(A_WHILE)
            assert await cluster.phase() == phase
            assert cluster.plugins.calls == ["prepare c", "unprepare c"]

    event_loop.run_simulation(1, run)


@given(seed=st.integers(0, 10_000), error=st.sampled_from([Retry("not yet", after=1.0), Refused("never")]))
@settings(max_examples=20)
def test_after_a_failed_prepare_a_pod_waits_for_its_resync(seed: int, error: Exception) -> None:
    """It waits 60 s, times 1 to 1.5 (SyncPod returns no error), even if the plugin is back sooner."""

    async def run() -> None:
        async with one_node(seed=seed) as cluster:
            cluster.plugins.refusal = error
            await bind_pod(cluster, "c")
            await asyncio.sleep(A_WHILE)
            cluster.plugins.refusal = None
            await asyncio.sleep(60.0 - 2 * A_WHILE)
            assert cluster.plugins.calls == ["prepare c"]
            assert await cluster.phase() != "Running"
            (event,) = (await cluster.api.list(EVENT, SPACE)).items
            assert (event["reason"], event["message"]) == ("FailedPrepareDynamicResources", str(error))
            await asyncio.sleep(30.0 + 2 * A_WHILE)
            assert cluster.plugins.calls == ["prepare c", "prepare c"]
            assert await cluster.phase() == "Running"

    event_loop.run_simulation(seed, run)


CHANGES: list[tuple[Object, str, bool]] = [
    ({"metadata": {"annotations": {"a": "b"}}}, "", True),
    ({"metadata": {"labels": {"a": "b"}}}, "", True),
    ({"spec": {"activeDeadlineSeconds": 9000}}, "", True),
    ({"metadata": {"finalizers": ["example.com/keep"]}}, "", False),
    ({"status": {"conditions": [{"type": "Mine", "status": "True"}]}}, "status", False),
]
"""Changes of a pod, and whether a kubelet syncs it for each (podsDifferSemantically)."""


@pytest.mark.parametrize(("change", "subresource", "syncs"), CHANGES)
def test_what_syncs_a_pod_whose_claims_were_not_prepared(
    change: Object, subresource: str, syncs: bool
) -> None:
    async def run() -> None:
        async with one_node() as cluster:
            cluster.plugins.refusal = Retry("not yet", after=1.0)
            await bind_pod(cluster, "c")
            await asyncio.sleep(A_WHILE)
            cluster.plugins.refusal = None
            await cluster.api.patch(POD, "p", SPACE, change, subresource=subresource)
            await asyncio.sleep(A_WHILE)
            assert (await cluster.phase() == "Running") is syncs

    event_loop.run_simulation(1, run)


@in_virtual_time
async def test_a_change_during_a_sync_brings_another_sync_after_it() -> None:
    async with one_node() as cluster:
        cluster.plugins.takes, cluster.plugins.refusal = 2 * A_WHILE, Retry("not yet", after=1.0)
        await bind_pod(cluster, "c")
        await asyncio.sleep(A_WHILE)
        await cluster.api.patch(POD, "p", SPACE, {"metadata": {"annotations": {"a": "b"}}})
        await asyncio.sleep(2 * A_WHILE)
        assert cluster.plugins.calls == ["prepare c"] * 2


@in_virtual_time
async def test_after_a_failed_unprepare_a_kubelet_backs_off() -> None:
    async with one_node() as cluster:
        await bind_pod(cluster, "c")
        await asyncio.sleep(A_WHILE)
        cluster.plugins.refusal = Retry("in use", after=1.0)
        await cluster.api.delete(POD, "p", SPACE)
        await asyncio.sleep(9.0)
        assert cluster.plugins.calls.count("unprepare c") == 1
        await asyncio.sleep(7.0)
        assert cluster.plugins.calls.count("unprepare c") == 2


@in_virtual_time
async def test_a_claim_of_another_pod_is_not_prepared() -> None:
    async with one_node() as cluster:
        await bind_pod(cluster, "c")
        other = {"resource": "pods", "name": "q", "uid": "other"}
        await cluster.api.patch(
            RESOURCE_CLAIM, "c", SPACE, {"status": {"reservedFor": [other]}}, subresource="status"
        )
        await asyncio.sleep(A_WHILE)
        assert cluster.plugins.calls == []
        (event,) = (await cluster.api.list(EVENT, SPACE)).items
        assert event["message"] == "resource claim c is not reserved for this pod"


@in_virtual_time
async def test_a_deleted_pod_goes_when_its_claims_are_given_back() -> None:
    async with one_node() as cluster:
        await bind_pod(cluster, "c")
        await asyncio.sleep(A_WHILE)
        cluster.plugins.refusal = Retry("in use", after=1.0)
        await cluster.api.delete(POD, "p", SPACE)
        await asyncio.sleep(A_WHILE)
        assert (await cluster.pod())["metadata"]["deletionTimestamp"]
        cluster.plugins.refusal = None
        await asyncio.sleep(15.0 + A_WHILE)
        with pytest.raises(NotFound):
            await cluster.pod()


@in_virtual_time
async def test_a_pod_that_is_deleted_by_force_gives_back_too() -> None:
    async with one_node() as cluster:
        await bind_pod(cluster, "c")
        await asyncio.sleep(A_WHILE)
        await cluster.api.delete(POD, "p", SPACE, grace_seconds=0)
        await asyncio.sleep(A_WHILE)
        assert cluster.plugins.calls == ["prepare c", "unprepare c"]


@in_virtual_time
async def test_a_restarted_kubelet_takes_its_pods_over() -> None:
    async with one_node() as cluster:
        await bind_pod(cluster, "c")
        await asyncio.sleep(A_WHILE)
        await cluster.kill()
        await cluster.api.delete(POD, "p", SPACE)
        assert cluster.plugins.calls == ["prepare c"]
        async with play(cluster.kube, cluster.api, cluster.plugins, IdleContainers()):
            await asyncio.sleep(A_WHILE)
            with pytest.raises(NotFound):
                await cluster.pod()
        assert cluster.plugins.calls[-1] == "unprepare c"


@in_virtual_time
async def test_pods_keep_their_addresses_when_kubelets_restart() -> None:
    async with one_node() as cluster:
        await bind_pod(cluster, name="p")
        await asyncio.sleep(A_WHILE)
        await cluster.kill()
        async with play(cluster.kube, cluster.api, cluster.plugins, IdleContainers()):
            await asyncio.sleep(A_WHILE)
            await bind_pod(cluster, name="q")
            await asyncio.sleep(A_WHILE)
            addresses = [(await cluster.pod(name))["status"]["podIP"] for name in ("p", "q")]
            assert addresses == ["10.0.0.1", "10.0.0.2"]


@in_virtual_time
async def test_a_lost_node_is_silent_until_it_is_back() -> None:
    async with one_node() as cluster:
        await bind_pod(cluster)
        await asyncio.sleep(A_WHILE)
        await cluster.kubelets.lose("n")
        before = await cluster.api.get(LEASE, "n", LEASE_NAMESPACE)
        await cluster.api.delete(POD, "p", SPACE)
        await asyncio.sleep(60.0)
        assert await cluster.api.get(LEASE, "n", LEASE_NAMESPACE) == before
        assert (await cluster.pod())["metadata"]["deletionTimestamp"]

        await cluster.kubelets.register(NodeSpec("n", boot_id="2"))
        await asyncio.sleep(60.0)
        node = await cluster.api.get(NODE, "n")
        assert node["status"]["nodeInfo"]["bootID"] == "2"
        assert await cluster.api.get(LEASE, "n", LEASE_NAMESPACE) != before
        with pytest.raises(NotFound):
            await cluster.pod()


@in_virtual_time
async def test_a_node_that_is_back_gives_back_what_pods_had_that_went_meanwhile() -> None:
    """A kubelet records the claims that it prepared, and checks once a minute whether their pods are gone."""
    async with one_node() as cluster:
        for name in ("gone", "there"):
            await bind_pod(cluster, f"c-{name}", name=name)
        await asyncio.sleep(A_WHILE)
        await cluster.kubelets.lose("n")
        await cluster.api.delete(POD, "gone", SPACE, grace_seconds=0)
        await cluster.api.delete(RESOURCE_CLAIM, "c-gone", SPACE)
        await asyncio.sleep(A_WHILE)
        await cluster.kubelets.register(NodeSpec("n", boot_id="2"))
        await asyncio.sleep(A_WHILE)
        assert "unprepare c-gone" not in cluster.plugins.calls
        await asyncio.sleep(60.0)
        assert cluster.plugins.calls.count("unprepare c-gone") == 1
        assert "unprepare c-there" not in cluster.plugins.calls


@in_virtual_time
async def test_what_happened_behind_a_broken_watch_is_seen() -> None:
    async with one_node() as cluster:
        await bind_pod(cluster, "c")
        await asyncio.sleep(A_WHILE)
        cluster.kube.faults.add(RequestFault(user="kubelet"))
        cluster.kube.store.hang_up()
        await cluster.api.delete(POD, "p", SPACE, grace_seconds=0)
        cluster.kube.store.compact()
        await asyncio.sleep(A_WHILE)
        assert cluster.plugins.calls == ["prepare c"]
        cluster.kube.faults.clear()
        await asyncio.sleep(A_WHILE)
        assert cluster.plugins.calls == ["prepare c", "unprepare c"]


@in_virtual_time
async def test_a_node_that_could_not_renew_its_lease_reports_again() -> None:
    async with one_node() as cluster:
        cluster.kube.faults.add(RequestFault(user="kubelet"))
        await asyncio.sleep(2 * LEASE_SECONDS)
        unknown = [{"type": "Ready", "status": "Unknown"}]
        await cluster.api.patch(NODE, "n", None, {"status": {"conditions": unknown}}, subresource="status")
        cluster.kube.faults.clear()
        await asyncio.sleep(2 * HEARTBEAT_SECONDS)
        (ready,) = (await cluster.api.get(NODE, "n"))["status"]["conditions"]
        assert ready["status"] == "True"


@in_virtual_time
async def test_a_pod_that_was_taken_for_lost_says_that_it_is_ready() -> None:
    async with one_node() as cluster:
        await bind_pod(cluster)
        await asyncio.sleep(A_WHILE)
        lost = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
        await cluster.api.patch(POD, "p", SPACE, lost, subresource="status")
        await asyncio.sleep(A_WHILE)
        assert is_pod_ready(await cluster.pod())


@in_virtual_time
async def test_a_pod_that_a_finalizer_keeps_has_had_its_life() -> None:
    async with one_node() as cluster:
        await bind_pod(cluster, "c")
        await cluster.api.patch(POD, "p", SPACE, {"metadata": {"finalizers": ["example.com/keep"]}})
        await asyncio.sleep(A_WHILE)
        await cluster.api.delete(POD, "p", SPACE)
        await asyncio.sleep(A_WHILE)
        await cluster.api.patch(POD, "p", SPACE, {"metadata": {"labels": {"still": "here"}}})
        await asyncio.sleep(A_WHILE)
        assert cluster.plugins.calls == ["prepare c", "unprepare c"]
        await cluster.api.patch(POD, "p", SPACE, {"metadata": {"finalizers": None}})
        with pytest.raises(NotFound):
            await cluster.pod()


@in_virtual_time
async def test_a_node_that_is_lost_before_its_first_heartbeat_has_a_lease_that_runs_out() -> None:
    kube = FakeKube(namespaces=(SPACE, LEASE_NAMESPACE))
    api = DirectApi(kube, "test")
    kubelets = SimulatedKubelets(
        DirectApi(kube, "kubelet"), asyncio.get_running_loop().time, random.Random(1)
    )
    await kubelets.register(NodeSpec("n"))
    await kubelets.lose("n")
    assert (await api.get(LEASE, "n", LEASE_NAMESPACE))["spec"]["holderIdentity"] == "n"


@pytest.mark.slow
@given(seed=st.integers(0, 10_000), lost=st.sampled_from(["request", "reply"]))
@settings(max_examples=20)
def test_an_api_server_that_fails_delays_pods_and_loses_none(
    seed: int, lost: Literal["request", "reply"]
) -> None:
    async def run() -> None:
        async with one_node(seed=seed) as cluster:
            cluster.kube.faults.add(RequestFault(rate=0.3, user="kubelet", lost=lost))
            await bind_pod(cluster, "c")
            # Each failed request for its claims costs a pod a resync.
            await asyncio.sleep(20 * 90.0)
            assert await cluster.phase() == "Running"
            await cluster.api.delete(POD, "p", SPACE)
            await asyncio.sleep(20 * A_WHILE)
            with pytest.raises(NotFound):
                await cluster.pod()
            assert cluster.plugins.calls[-1] == "unprepare c"

    event_loop.run_simulation(seed, run)
