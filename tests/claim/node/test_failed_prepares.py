"""After a failed prepare: pods start when the cause has cleared, not at the next resync of their kubelet.

The plugins' framework is real, the kubelet is as slow as the real one, and time is virtual.
"""

import asyncio
import errno
import random
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.claim.node.conftest import DRIVER, NODE_NAME, NodeKit, allocation

from rackloom.claim.node import requests
from rackloom.claim.node.plugin import PrepareState
from rackloom.claim.node.requests import RETRY_ANNOTATION, STOPPED_SECONDS
from rackloom.claim.node.run import PluginProcess
from rackloom.claim.node.tasks import beside, run_background, to_the_end
from rackloom.core.cluster.claims import ClaimRef
from rackloom.core.cluster.objects import EVENT, POD, RESOURCE_CLAIM, Object
from rackloom.errors import Refused, Retry
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.nodes.dra_manager import DraManager, PodClaim
from rackloom.lab.nodes.kubelets import NodeSpec, SimulatedKubelets
from rackloom.lab.virtual import event_loop
from rackloom.lab.virtual.process import Process

SPACE = "default"
MOST_WAIT = 10.0
"""Seconds that a pod may wait after a failure that has cleared."""
CALL = 44.0
"""The most seconds that a call of kubelet is held."""
NOT_YET = Retry("not yet", after=0.0)


class Node:
    """One node whose plugin comes and goes while its kubelet stays."""

    def __init__(self, kit: NodeKit, seed: int) -> None:
        self.kit = kit
        self.toys = kit.toys
        self.running: PluginProcess | None = None
        self.resynced: list[str] = []
        """Pods that only the resync of kubelet started."""
        self._now = asyncio.get_running_loop().time
        kubelet = DirectApi(kit.kube, "kubelet")
        self.kubelets = SimulatedKubelets(
            kubelet,
            self._now,
            random.Random(seed),
            devices=DraManager(lambda node: self),
            on_resync=lambda pod: self.resynced.append(pod["metadata"]["name"]),
        )

    @property
    def drivers(self) -> Sequence[str]:
        return (DRIVER,) if self.running else ()

    async def prepare(self, claims: Sequence[PodClaim]) -> None:
        await self._call("prepare", claims)

    async def unprepare(self, claims: Sequence[PodClaim]) -> None:
        await self._call("unprepare", claims)

    async def _call(self, what: str, claims: Sequence[PodClaim]) -> None:
        if self.running is None:
            raise Retry(f"DRA driver {DRIVER} is not registered", after=0.0)
        answers = await getattr(self.running.requests, what)([claim.ref for claim in claims])
        if errors := [answer.error for answer in answers.values() if answer.error]:
            raise Retry("; ".join(errors), after=0.0)

    @asynccontextmanager
    async def plugin(self) -> AsyncIterator[PluginProcess]:
        """The plugin while it is registered, like `running()` but without sockets."""
        self.kit.places.home(DRIVER).mkdir(parents=True, exist_ok=True)
        host = msgspec.structs.replace(self.kit.host(), wall=self._now)
        self.running = plugin_process = PluginProcess(self.toys, self.kit.api, host)
        plugin_process.pods.wake()
        try:
            async with run_background(*plugin_process.work()):
                # Pods that are made from here on did not wait for the registration.
                await asyncio.sleep(0.5)
                yield plugin_process
        finally:
            self.running = None
            await plugin_process.requests.close()

    async def claim(self, name: str = "c", *devices: str) -> ClaimRef:
        status = {**allocation(*(devices or ("toy-0",))), "reservedFor": []}
        meta = (await self.kit.allocated(name, status))["metadata"]
        return ClaimRef(namespace=SPACE, name=name, uid=meta["uid"])

    async def pod(self, name: str = "p", claim: str = "c", node: str = NODE_NAME) -> None:
        """A pod on this node that uses a claim, with the reservation for it."""
        api = self.kit.api
        spec = {
            "nodeName": node,
            "containers": [{"name": "main", "image": "none"}],
            "resourceClaims": [{"name": "toy", "resourceClaimName": claim}],
        }
        pod = await api.create(POD, {"metadata": {"name": name, "namespace": SPACE}, "spec": spec})
        found = await api.get(RESOURCE_CLAIM, claim, SPACE)
        user = {"resource": "pods", "name": name, "uid": pod["metadata"]["uid"]}
        status = {**found["status"], "reservedFor": [*(found["status"].get("reservedFor") or ()), user]}
        await api.replace(RESOURCE_CLAIM, {**found, "status": status}, subresource="status")

    async def read(self, name: str = "p") -> Object:
        return await self.kit.api.get(POD, name, SPACE)

    async def runs(self, name: str = "p") -> bool:
        return (await self.read(name)).get("status", {}).get("phase") == "Running"

    async def annotation(self, name: str = "p") -> str:
        return str((await self.read(name))["metadata"].get("annotations", {}).get(RETRY_ANNOTATION, ""))

    async def starts(self, *names: str) -> None:
        """Each pod runs within `MOST_WAIT`."""
        deadline = self._now() + MOST_WAIT
        for name in names or ("p",):
            while not await self.runs(name):
                assert self._now() < deadline, f"{name} does not run after {MOST_WAIT} s"
                await asyncio.sleep(0.25)


Story = Callable[[Node], Awaitable[Any]]


def play(story: Story, seed: int = 1) -> Any:
    async def run(kit: NodeKit) -> Any:
        node = Node(kit, seed)
        await node.kubelets.register(NodeSpec(NODE_NAME))
        async with beside(node.kubelets.run()):
            return await story(node)

    with tempfile.TemporaryDirectory(prefix="rl") as root:
        return event_loop.run_simulation(seed, lambda: run(NodeKit(Path(root))))


@given(seed=st.integers(0, 10_000), lasts=st.floats(0.0, 300.0))
@settings(max_examples=15)
def test_a_pod_starts_soon_after_the_cause_has_cleared(seed: int, lasts: float) -> None:
    async def story(node: Node) -> None:
        node.toys.trouble["c"] = NOT_YET
        await node.claim()
        async with node.plugin():
            await node.pod()
            await asyncio.sleep(lasts)
            node.toys.trouble.clear()
            await node.starts()

    play(story, seed)


def test_a_pod_whose_claim_is_prepared_at_once_is_left_alone() -> None:
    async def story(node: Node) -> None:
        await node.claim()
        async with node.plugin():
            await node.pod()
            await node.starts()
            await asyncio.sleep(300.0)
            assert await node.annotation() == ""
            assert len(node.toys.prepared) == 1

    play(story)


def test_the_annotation_says_when_and_for_which_driver() -> None:
    async def story(node: Node) -> None:
        node.toys.trouble["c"] = NOT_YET
        await node.claim()
        async with node.plugin():
            await node.pod()
            await asyncio.sleep(CALL + 6.0)
            node.toys.trouble.clear()
            await node.starts()
            assert re.fullmatch(r"1970-01-01T00:00:5\d\.\d{6}Z toy\.example\.com", await node.annotation())

    play(story)


def test_a_device_that_another_pod_had_is_used_when_that_has_gone() -> None:
    async def story(node: Node) -> None:
        await node.claim("one")
        await node.claim("two")
        async with node.plugin():
            await node.pod("first", "one")
            await node.starts("first")
            await node.pod("second", "two")
            await asyncio.sleep(2 * CALL)
            await node.kit.api.delete(POD, "first", SPACE)
            await node.starts("second")

    play(story)


@given(seed=st.integers(0, 10_000), lasts=st.floats(0.0, 200.0))
@settings(max_examples=10)
def test_a_pod_that_came_before_the_plugin_was_registered(seed: int, lasts: float) -> None:
    async def story(node: Node) -> None:
        await node.claim()
        await node.pod()
        await asyncio.sleep(lasts)
        async with node.plugin():
            await node.starts()

    play(story, seed)


@given(seed=st.integers(0, 10_000), ends=st.floats(0.0, 200.0))
@settings(max_examples=10)
def test_a_plugin_that_is_replaced_goes_on_where_the_last_one_was(seed: int, ends: float) -> None:
    async def story(node: Node) -> None:
        node.toys.trouble["c"] = NOT_YET
        await node.claim()
        async with node.plugin():
            await node.pod()
            await asyncio.sleep(ends)
        await asyncio.sleep(5.0)
        async with node.plugin():
            await asyncio.sleep(CALL + 1.0)
            node.toys.trouble.clear()
            await node.starts()

    play(story, seed)


@pytest.mark.slow
@given(seed=st.integers(0, 10_000), lasts=st.floats(1.0, 300.0))
@settings(max_examples=10)
def test_a_pod_that_came_while_the_api_server_was_away(seed: int, lasts: float) -> None:
    async def story(node: Node) -> None:
        await node.claim()
        async with node.plugin() as plugin:
            await plugin.publisher.published.wait()
            await node.pod()
            node.kit.kube.faults.add(RequestFault(user="kubelet", resource="resourceclaims"))
            node.kit.kube.faults.add(RequestFault(user="plugin", resource="resourceslices"))
            node.kit.kube.store.hang_up()
            await asyncio.sleep(lasts)
            node.kit.kube.faults.clear()
            await node.starts()

    play(story, seed)


def test_all_pods_of_a_claim_start() -> None:
    """The second one's call succeeds while the first one's pod waits for its resync."""

    async def story(node: Node) -> None:
        node.toys.trouble["c"] = NOT_YET
        await node.claim()
        async with node.plugin():
            await node.pod("a")
            await asyncio.sleep(30.0)
            await node.pod("b")
            await asyncio.sleep(20.0)
            node.toys.trouble.clear()
            await node.starts("a", "b")

    play(story)


def test_an_error_that_nobody_thought_of_is_tried_again() -> None:
    async def story(node: Node) -> None:
        node.toys.trouble["c"] = OSError(errno.ENOSPC, "No space left on device")
        await node.claim()
        async with node.plugin():
            await node.pod()
            await asyncio.sleep(20.0)
            assert len(node.toys.prepared) > 3
            node.toys.trouble.clear()
            await node.starts()

    play(story)


@given(seed=st.integers(0, 10_000), lasts=st.floats(0.0, 300.0))
@settings(max_examples=15)
def test_a_pod_whose_claim_was_refused_starts_soon_after_that_has_changed(seed: int, lasts: float) -> None:
    async def story(node: Node) -> None:
        node.toys.trouble["c"] = Refused("not with this label")
        await node.claim()
        async with node.plugin():
            await node.pod()
            await asyncio.sleep(lasts)
            node.toys.trouble.clear()
            await node.starts()

    play(story, seed)


@pytest.mark.parametrize(("claims", "most"), [(1, 2 + 60 / requests.REFUSED_PAUSE), (100, 100 + 60 / 0.25)])
def test_what_is_refused_is_tried_seldom(claims: int, most: float) -> None:
    async def story(node: Node) -> None:
        refs = [await node.claim(f"c{number}", f"toy-{number}") for number in range(claims)]
        node.toys.trouble = {ref.name: Refused("never") for ref in refs}
        async with node.plugin() as plugin:
            await plugin.requests.prepare(refs, 1.0)
            await asyncio.sleep(60.0)
            assert claims < len(node.toys.prepared) <= most

    play(story)


def test_refused_claims_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_REFUSED", 2)

    async def story(node: Node) -> None:
        refs = [await node.claim(f"c{number}", f"toy-{number}") for number in range(4)]
        node.toys.trouble = {ref.name: Refused("never") for ref in refs[:3]} | {"c3": NOT_YET}
        async with node.plugin() as plugin:
            await plugin.requests.prepare(refs, 1.0)
            node.toys.trouble.clear()
            await asyncio.sleep(MOST_WAIT)
            ready = {entry.ref.name for entry in plugin.checkpoint.claims.values() if entry.devices}
            assert "c3" in ready
            assert len(ready - {"c3"}) == 2

    play(story)


def test_what_cannot_be_cut_off_delays_no_answer_and_overlaps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(node: Node) -> None:
        ref, last = await node.claim(), await node.claim("c2", "toy-1")
        now = asyncio.get_running_loop().time
        running: list[str] = []

        def slowly(what: str, work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            async def thread(*args: Any) -> Any:
                running.append(what)
                assert running == [what], "attempts overlap"
                await asyncio.sleep(5.0)
                running.remove(what)
                return await work(*args)

            return lambda *args: to_the_end(thread(*args))

        monkeypatch.setattr(node.toys, "prepare", slowly("prepare", node.toys.prepare))
        monkeypatch.setattr(node.toys, "unprepare", slowly("unprepare", node.toys.unprepare))
        async with node.plugin() as plugin:
            began = now()
            answer = (await plugin.requests.prepare([ref], 1.0))[ref.uid]
            assert requests.NO_ATTEMPT_ENDED in answer.error
            assert now() - began == pytest.approx(1.0)
            assert (await plugin.requests.unprepare([ref]))[ref.uid].error == ""
            assert now() - began >= 10.0
            assert plugin.checkpoint.claims[ref.uid].aborted_at is not None
            await plugin.requests.prepare([last], 1.0)
            assert running == ["prepare"]
        assert running == [], "the plugin has ended before its attempts"
        # gRPC cancels calls that are under way after that.
        assert (await plugin.requests.prepare([last], 1.0))[last.uid].error == "the plugin is ending"
        await asyncio.sleep(10.0)
        assert running == []

    play(story)


def test_a_call_that_comes_after_the_claim_was_given_back_is_not_repeated() -> None:
    """After the claim's mark has expired, nothing would give back the result of a repetition."""

    async def story(node: Node) -> None:
        node.toys.trouble["c"] = NOT_YET
        ref = await node.claim()
        async with node.plugin() as plugin:
            await plugin.requests.prepare([ref], 1.0)
            node.toys.trouble.clear()
            await plugin.requests.unprepare([ref])
            answers = await plugin.requests.prepare([ref], 1.0)
            assert "stale prepare" in answers[ref.uid].error
            await asyncio.sleep(300.0)
            assert all(not entry.devices for entry in plugin.checkpoint.claims.values())

    play(story)


def test_a_pod_that_goes_ends_the_retries() -> None:
    async def story(node: Node) -> None:
        node.toys.trouble["c"] = NOT_YET
        ref = await node.claim()
        async with node.plugin() as plugin:
            await node.pod()
            await asyncio.sleep(CALL + 5.0)
            del node.toys.trouble["c"]
            await node.kit.api.delete(POD, "p", SPACE)
            before = len(node.toys.prepared)
            await asyncio.sleep(100.0)
            assert len(node.toys.prepared) == before
            assert plugin.checkpoint.claims[ref.uid].state is PrepareState.ABORTED

    play(story)


def test_a_claim_that_is_gone_ends_the_retries() -> None:
    async def story(node: Node) -> None:
        node.toys.trouble["c"] = NOT_YET
        await node.claim()
        async with node.plugin() as plugin:
            (ref,) = [await node.claim("gone", "toy-1")]
            node.toys.trouble["gone"] = NOT_YET
            await plugin.requests.prepare([ref], 1.0)
            await node.kit.api.delete(RESOURCE_CLAIM, "gone", SPACE)
            await asyncio.sleep(CALL + 1.0)
            before = len(node.toys.prepared)
            await asyncio.sleep(100.0)
            assert len(node.toys.prepared) == before

    play(story)


def test_a_claim_that_kubelet_never_asks_for_again_is_given_up() -> None:
    async def story(node: Node) -> None:
        node.toys.trouble["c"] = NOT_YET
        ref = await node.claim()
        async with node.plugin() as plugin:
            await plugin.requests.prepare([ref], 1.0)
            await asyncio.sleep(requests.UNASKED_SECONDS + CALL)
            before = len(node.toys.prepared)
            await asyncio.sleep(100.0)
            assert len(node.toys.prepared) == before

    play(story)


def test_claims_beyond_the_limit_wait_for_kubelet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_CLAIMS", 2)

    async def story(node: Node) -> None:
        refs = [await node.claim(f"c{number}", f"toy-{number}") for number in range(3)]
        node.toys.trouble = dict.fromkeys(("c0", "c1", "c2"), NOT_YET)
        async with node.plugin() as plugin:
            await plugin.requests.prepare(refs, 1.0)
            node.toys.trouble.clear()
            await asyncio.sleep(MOST_WAIT)
            states = [plugin.checkpoint.claims[ref.uid].state for ref in refs]
            assert sorted(states) == [PrepareState.COMPLETED, PrepareState.COMPLETED, PrepareState.STARTED]

    play(story)


def test_a_call_that_kubelet_gave_up_goes_on() -> None:
    async def story(node: Node) -> None:
        node.toys.trouble["c"] = NOT_YET
        ref = await node.claim()
        async with node.plugin() as plugin:
            call = asyncio.create_task(plugin.requests.prepare([ref]))
            await asyncio.sleep(3.0)
            call.cancel()
            node.toys.trouble.clear()
            await asyncio.sleep(MOST_WAIT)
            assert plugin.checkpoint.claims[ref.uid].state is PrepareState.COMPLETED

    play(story)


@pytest.mark.parametrize("verb", ["list", "patch"])
def test_without_the_right_pods_wait_for_kubelet(verb: str) -> None:
    async def story(node: Node) -> None:
        forbidden = RequestFault(user="plugin", verb=verb, resource="pods", code=403, reason="Forbidden")
        node.kit.kube.faults.add(forbidden)
        node.toys.trouble["c"] = NOT_YET
        await node.claim()
        async with node.plugin():
            await node.pod()
            await asyncio.sleep(CALL + 3.0)
            node.toys.trouble.clear()
            await asyncio.sleep(90.0)
            assert await node.runs()
            assert node.resynced == ["p"]

    play(story)


def test_at_the_registration_only_pods_that_wait_for_this_driver_are_synced() -> None:
    async def story(node: Node) -> None:
        api = node.kit.api
        await node.claim("runs", "toy-0")
        await node.claim("waits", "toy-1")
        other = await node.kit.allocated("other", {**allocation("x", driver="other"), "reservedFor": []})
        async with node.plugin():
            await node.pod("runs", "runs")
            await node.starts("runs")
        for name in ("waits", "other"):
            await node.pod(name, name)
        await node.pod("elsewhere", "waits", node="node-b")
        bare = {"nodeName": NODE_NAME, "containers": [{"name": "main", "image": "none"}]}
        await api.create(POD, {"metadata": {"name": "bare", "namespace": SPACE}, "spec": bare})
        await asyncio.sleep(1.0)
        async with node.plugin():
            await node.starts("waits")
        names = ("runs", "waits", "other", "elsewhere", "bare")
        assert [name for name in names if await node.annotation(name)] == ["waits"]
        assert other["metadata"]["name"] == "other"

    play(story)


def test_a_plugin_that_was_stopped_has_kubelet_ask_again() -> None:
    """kubelet's call never reached it: the connection broke before it went on."""

    async def story(node: Node) -> None:
        await node.claim()
        life = Process("plugin")

        async def serve() -> None:
            async with node.plugin():
                await asyncio.Event().wait()

        task = life.spawn(serve())
        await asyncio.sleep(1.0)
        life.stop()
        node.running, plugin = None, node.running
        await node.pod()
        await asyncio.sleep(STOPPED_SECONDS + 5.0)
        node.running = plugin
        life.resume()
        await node.starts()
        assert node.resynced == []
        task.cancel()
        await asyncio.wait({task})

    play(story)


def test_after_a_reboot_pods_whose_status_is_old_are_synced() -> None:
    """kubelet calls before the plugin is there, and the pod's status still shows running containers."""

    async def story(node: Node) -> None:
        await node.claim()
        async with node.plugin():
            await node.pod()
            await node.starts()
        node.kit.boot_id = "boot-2"
        async with node.plugin():
            await asyncio.sleep(1.0)
            assert await node.annotation() != ""

    play(story)


def test_the_reason_is_on_the_pod_all_the_time() -> None:
    async def story(node: Node) -> None:
        node.toys.trouble["c"] = NOT_YET
        await node.claim()
        async with node.plugin():
            await node.pod()
            await asyncio.sleep(CALL + 3.0)
            (event,) = (await node.kit.api.list(EVENT, SPACE)).items
            assert event["message"] == "not yet"

    play(story)
