"""Workloads that wait for our check: admitted with a plan, put off, or refused for good."""

import asyncio
import json

import pytest
from tests.claim.cluster.gangs.gang_site import Mortal
from tests.claim.cluster.kueue.kueue_site import CHECK, TEAM, KueueSite, run

from rackloom.claim.kube.api import KubeError
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import ADMISSION_CHECK, POD, WORKLOAD, has_condition
from rackloom.core.kueue.plans import KUEUE_WORKLOAD_LABEL, PLAN_ANNOTATION
from rackloom.lab.kube.direct import DirectApi

CLIQUE = names.GPU_CLIQUE_LABEL


def test_a_workload_that_fits_is_ready_with_its_plan():
    async def story():
        site = KueueSite(racks=2, trays=4)
        await site.begin()
        await site.occupy("r0-t0")
        site.start()
        site.run_kueue()
        await site.add_check()
        await site.submit("train", 4)

        await site.until(lambda: site.is_admitted("train"))

        check = await site.check("train")
        assert check["state"] == "Ready"
        assert check["message"].startswith("planned: 4 members on 4 trays of clique u.r1")
        (update,) = check["podSetUpdates"]
        assert update["nodeSelector"] == {CLIQUE: "u.r1"}
        workload = await site.workload("train")
        assert update["labels"] == {KUEUE_WORKLOAD_LABEL: workload["metadata"]["uid"]}
        planned = json.loads(update["annotations"][PLAN_ANNOTATION])
        assert planned["trays"] == {f"r1-t{tray}": 1 for tray in range(4)}
        assert has_condition(await site.user.get(ADMISSION_CHECK, CHECK), "Active")
        await site.end()

    run(story)


def test_a_workload_that_does_not_fit_now_waits_and_comes_in_later():
    async def story():
        site = KueueSite(racks=1, trays=4)
        await site.begin()
        await site.occupy("r0-t0")
        site.start()
        kueue = site.run_kueue()
        await site.add_check()
        await site.submit("train", 4)

        async def is_evicted():
            return has_condition(await site.workload("train"), "Evicted")

        await site.until(is_evicted)
        assert not await site.is_admitted("train")
        (message,) = kueue.messages["train"]
        assert message.startswith("it does not fit now: team/train asks for 4")
        assert "another job" in message
        assert "busy" not in message

        await site.free("r0-t0")
        await site.until(lambda: site.is_admitted("train"))
        await site.end()

    run(story)


def test_what_can_never_fit_is_rejected():
    async def story():
        site = KueueSite(racks=2, trays=4)
        await site.begin()
        site.start()
        kueue = site.run_kueue()
        await site.add_check()
        await site.submit("huge", 5)

        async def is_deactivated():
            return (await site.workload("huge"))["spec"]["active"] is False

        await site.until(is_deactivated)
        (message,) = kueue.messages["huge"]
        assert message.startswith("it can never fit: team/huge asks for 5")
        await site.end()

    run(story)


def test_two_at_once_never_get_the_same_room():
    async def story():
        site = KueueSite(racks=1, trays=4)
        await site.begin()
        site.start()
        site.run_kueue()
        await site.add_check()
        for name in ("a", "b"):
            await site.submit(name, 3)

        async def one_is_in():
            return [await site.is_admitted(name) for name in ("a", "b")].count(True) == 1

        await site.until(one_is_in)
        # The plan of the other is not in use by any pod, and a new process reads it from the workload.
        await site.kill()
        site.start()
        for _ in range(20):
            await site.until(one_is_in)
        await site.end()

    run(story)


def test_pods_take_over_what_the_plan_holds():
    async def story():
        site = KueueSite(racks=1, trays=4)
        await site.begin()
        site.start()
        site.run_kueue(makes_pods=True)
        await site.add_check()
        await site.submit("a", 2)
        await site.until(lambda: site.is_admitted("a"))
        await site.submit("b", 2)
        await site.until(lambda: site.is_admitted("b"))

        await site.until(lambda: _is_bound(site, 4))
        await site.end()

    run(story)


def test_nothing_happens_until_kueue_is_installed():
    async def story():
        site = KueueSite(racks=1, trays=4, serves_kueue=False)
        await site.begin()
        site.start()
        await site.until(lambda: _after(100))
        site.install_kueue()
        site.run_kueue()
        await site.add_check()
        await site.submit("train", 4)
        await site.until(lambda: site.is_admitted("train"))
        await site.end()

    calls = 0

    async def _after(count):
        nonlocal calls
        calls += 1
        return calls > count

    run(story)


def test_the_urgent_one_is_planned_first():
    async def story():
        site = KueueSite(racks=1, trays=4)
        await site.begin()
        site.run_kueue()
        await site.submit("low", 3)
        await site.submit("high", 3, priority=100)
        await site.until(lambda: site.is_in("low", "Pending"))
        await site.until(lambda: site.is_in("high", "Pending"))
        await site.add_check()
        site.start()
        await site.until(lambda: site.is_admitted("high"))
        assert not await site.is_admitted("low")
        await site.end()

    run(story)


def test_checks_of_other_controllers_are_left_alone():
    async def story():
        site = KueueSite(racks=1, trays=4)
        await site.begin()
        await site.add_check(controllerName="example.com/other")
        site.start()
        site.run_kueue()
        await site.submit("train", 4)
        await site.until(lambda: site.is_in("train", "Pending"))
        before = site.kube.writes("controller")
        await asyncio.sleep(60)
        assert await site.is_in("train", "Pending")
        assert "status" not in await site.user.get(ADMISSION_CHECK, CHECK)
        assert site.kube.writes("controller") == before == 0
        await site.end()

    run(story)


def test_nothing_is_ready_while_the_cluster_cannot_be_read():
    async def story():
        site = KueueSite(racks=1, trays=4)
        await site.begin()
        await site.add_check()
        site.run_kueue()
        api = Blind(site.kube, "controller")
        site.start(api)
        await site.submit("train", 4)
        await site.until(lambda: site.is_in("train", "Pending"))
        await asyncio.sleep(120)
        assert await site.is_in("train", "Pending")
        api.is_blind = False
        await site.until(lambda: site.is_admitted("train"))
        await site.end()

    run(story)


class Blind(DirectApi):
    """Pods cannot be listed, so any plan would be a guess."""

    is_blind = True

    async def list(self, kind, namespace=None, *, labels="", fields=""):
        if kind == POD and self.is_blind:
            raise KubeError(503, "Unavailable", "no leader")
        return await super().list(kind, namespace, labels=labels, fields=fields)


def test_a_workload_that_changes_meanwhile_is_decided_again():
    async def story():
        site = KueueSite(racks=1, trays=4)
        await site.begin()
        await site.add_check()
        site.run_kueue()
        api = Meddling(site.kube, "controller")
        site.start(api)
        await site.submit("train", 4)
        await site.until(lambda: site.is_admitted("train"))
        assert api.conflicts > 0
        await site.end()

    run(story)


class Meddling(DirectApi):
    """Another client changes a workload between each first read and write of it."""

    conflicts = 0

    async def apply(self, kind, obj, *, manager, force=False, subresource=""):
        if kind == WORKLOAD and self.conflicts < 3:
            self.conflicts += 1
            note = {"metadata": {"annotations": {"note": str(self.conflicts)}}}
            await self.patch(kind, obj["metadata"]["name"], obj["metadata"]["namespace"], note)
        return await super().apply(kind, obj, manager=manager, force=force, subresource=subresource)


@pytest.mark.parametrize("last", range(1, 6))
def test_a_new_controller_goes_on_where_one_has_died(last):
    async def story():
        site = KueueSite(racks=1, trays=4)
        await site.begin()
        await site.add_check()
        site.run_kueue(makes_pods=True)
        site.start(Mortal(site.kube, "controller", last))
        for name in ("a", "b", "c"):
            await site.submit(name, 2)
        for _ in range(30):
            await asyncio.sleep(1)
            await site.kill()
            site.start()

        async def two_are_in():
            return [await site.is_admitted(name) for name in "abc"].count(True) == 2

        await site.until(two_are_in)
        await site.until(lambda: _is_bound(site, 4))
        await site.end()

    run(story)


async def _is_bound(site, count):
    pods = (await site.user.list(POD, TEAM)).items
    return len(pods) == count and all(pod["spec"].get("nodeName") for pod in pods)
