"""The twin's controllers end at their own steps, come back, and may be two. Labels may come late."""

import asyncio

import pytest

from rackloom.core.cluster.objects import NODE
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.scenario.controllers import RESTART_SECONDS, ControllerProcess
from rackloom.lab.scenario.feature_discovery import DISCOVERY_USER, FeatureDiscovery
from rackloom.lab.virtual import event_loop


def run(story):
    return event_loop.run_simulation(3, lambda: story(FakeKube(seed=5)))


async def counting(api):
    """A controller that makes one node after the other, from where the cluster stands."""
    while True:
        number = len((await api.list(NODE)).items)
        await api.create(NODE, {"metadata": {"name": f"node-{number}"}})
        await asyncio.sleep(1)


async def made(kube):
    return len((await DirectApi(kube, "user").list(NODE)).items)


@pytest.mark.parametrize(("point", "done"), [(1, 0), (2, 1), (3, 1), (4, 2)])
def test_a_life_ends_before_its_write_or_after_it(point, done):
    async def story(kube):
        ours = ControllerProcess(counting, DirectApi(kube, "controller"))
        ours.die(point, 1)
        work = asyncio.create_task(ours.run())
        await asyncio.sleep((point - 1) // 2 + 0.5)
        assert (ours.ended, await made(kube)) == (1, done)
        await asyncio.sleep(RESTART_SECONDS + 5)
        assert (ours.ended, await made(kube) > done) == (1, True)
        work.cancel()

    run(story)


def test_lives_end_one_after_the_other_and_each_goes_on_where_the_cluster_stands():
    async def story(kube):
        ours = ControllerProcess(counting, DirectApi(kube, "controller"))
        ours.die(2, 7)
        work = asyncio.create_task(ours.run())
        await asyncio.sleep(7 * RESTART_SECONDS - 0.1)
        assert (ours.ended, await made(kube)) == (7, 7)
        work.cancel()

    run(story)


def test_a_second_works_on_while_the_first_is_dead_and_ends_when_it_is_told_to():
    async def story(kube):
        ours = ControllerProcess(counting, DirectApi(kube, "controller"))
        work = asyncio.create_task(ours.run())
        await asyncio.sleep(0.5)
        await ours.kill(down=1000)
        ours.double()
        await asyncio.sleep(9.7)
        assert await made(kube) == 11
        await ours.single()
        await asyncio.sleep(10)
        assert await made(kube) == 11
        work.cancel()

    run(story)


def test_what_ends_by_itself_is_told():
    async def broken(api):
        raise ValueError("a bug")

    async def story(kube):
        await ControllerProcess(broken, DirectApi(kube, "controller")).run()

    with pytest.raises(ExceptionGroup) as raised:
        run(story)
    assert raised.value.subgroup(ValueError) is not None


def test_controllers_that_return_are_a_defect():
    async def short(api):
        await asyncio.sleep(5)

    async def story(kube):
        await ControllerProcess(short, DirectApi(kube, "controller")).run()

    with pytest.raises(ExceptionGroup) as raised:
        run(story)
    assert raised.value.subgroup(RuntimeError) is not None


def test_labels_come_late_in_their_order_and_also_after_a_server_that_did_not_answer():
    async def story(kube):
        user, discovery = DirectApi(kube, "user"), FeatureDiscovery(kube)

        async def write(value):
            await discovery.patch(NODE, "n", None, {"metadata": {"labels": {"clique": value}}})

        async def label():
            return (await user.get(NODE, "n"))["metadata"].get("labels", {}).get("clique")

        await user.create(NODE, {"metadata": {"name": "n"}})
        await write("first")
        assert await label() == "first"
        discovery.lag = 60.0
        await write("second")
        await asyncio.sleep(30)
        await write("third")
        assert await label() == "first"
        await asyncio.sleep(31)
        assert await label() == "second"
        kube.faults.add(RequestFault(user=DISCOVERY_USER))
        await asyncio.sleep(60)
        assert await label() == "second"
        kube.faults.clear()
        await asyncio.sleep(2)
        assert await label() == "third"

    run(story)
