"""Events: recorded once, counted after that."""

import asyncio

from rackloom.claim.kube.api import COMBINED, EventRecorder, KubeApi
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, EVENT, EventNotice, Object
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop
from rackloom.lab.virtual.event_loop import loop_wall_time


async def domain(api: KubeApi) -> Object:
    return await api.create(COMPUTE_DOMAIN, {"metadata": {"name": "d", "namespace": "default"}})


def recorder(kube: FakeKube) -> EventRecorder:
    return EventRecorder(DirectApi(kube, "rackloom"), "compute-domain-controller", "pod-1", loop_wall_time)


async def recorded(api: KubeApi) -> list[tuple[str, str, int]]:
    return [(e["reason"], e["message"], e["count"]) for e in (await api.list(EVENT, "default")).items]


def test_an_event_names_its_object_and_its_source() -> None:
    async def run() -> None:
        kube = FakeKube()
        api = DirectApi(kube, "test")
        made = await domain(api)
        await recorder(kube).record(made, EventNotice(True, "NameTaken", "the template exists already"))
        (event,) = (await api.list(EVENT, "default")).items
        assert event["involvedObject"]["uid"] == made["metadata"]["uid"]
        assert (event["involvedObject"]["kind"], event["type"]) == ("ComputeDomain", "Warning")
        assert event["source"] == {"component": "compute-domain-controller", "host": "pod-1"}
        assert event["firstTimestamp"] == event["lastTimestamp"] == "2026-01-01T00:00:00Z"

    event_loop.run_simulation(0, run)


def test_repetitions_are_counted_not_written() -> None:
    async def run() -> None:
        kube = FakeKube()
        api, events = DirectApi(kube, "test"), recorder(kube)
        made = await domain(api)
        for _ in range(601):
            await events.record(made, EventNotice(True, "NotReady", "no node has joined"))
            await asyncio.sleep(1)
        assert await recorded(api) == [("NotReady", "no node has joined", 601)]
        assert kube.writes("rackloom") == 11

    event_loop.run_simulation(0, run)


def test_many_messages_of_one_reason_are_combined() -> None:
    async def run() -> None:
        kube = FakeKube()
        api, events = DirectApi(kube, "test"), recorder(kube)
        made = await domain(api)
        for number in range(50):
            await events.record(made, EventNotice(True, "NotReady", f"attempt {number} failed"))
        found = await recorded(api)
        assert len(found) == 11
        assert sum(message.startswith(COMBINED) for _, message, _ in found) == 1

    event_loop.run_simulation(0, run)


def test_an_event_that_has_run_out_is_written_anew() -> None:
    async def run() -> None:
        kube = FakeKube()
        api, events = DirectApi(kube, "test"), recorder(kube)
        made = await domain(api)
        await events.record(made, EventNotice(False, "Ready", "all nodes are ready"))
        (event,) = (await api.list(EVENT, "default")).items
        await api.delete(EVENT, event["metadata"]["name"], "default")
        await asyncio.sleep(3600)
        await events.record(made, EventNotice(False, "Ready", "all nodes are ready"))
        assert await recorded(api) == [("Ready", "all nodes are ready", 2)]

    event_loop.run_simulation(0, run)


def test_an_event_that_cannot_be_written_fails_nobody() -> None:
    async def run() -> None:
        kube = FakeKube()
        api, events = DirectApi(kube, "test"), recorder(kube)
        made = await domain(api)
        kube.faults.add(RequestFault(user="rackloom", resource="events", code=503))
        await events.record(made, EventNotice(True, "NotReady", "no node has joined"))
        kube.faults.clear()
        await asyncio.sleep(61)
        await events.record(made, EventNotice(True, "NotReady", "no node has joined"))
        assert await recorded(api) == [("NotReady", "no node has joined", 2)]

    event_loop.run_simulation(0, run)
