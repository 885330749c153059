"""Workloads that wait for a check of ours: admitted with a plan, told to wait, or refused for good."""

import json

from tests.claim.cluster.kueue.kueue_site import CHECK, TEAM, KueueSite, run

from rackloom.core.domains import names
from rackloom.core.kubernetes.objects import ADMISSION_CHECK, POD, has_condition
from rackloom.core.kueue.workloads import PLAN_ANNOTATION, WORKLOAD_LABEL

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
        assert update["labels"] == {WORKLOAD_LABEL: workload["metadata"]["uid"]}
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

        async def all_run():
            pods = (await site.user.list(POD, TEAM)).items
            return len(pods) == 4 and all(pod["spec"].get("nodeName") for pod in pods)

        await site.until(all_run)
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
