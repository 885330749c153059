"""Gated pods on a simulated cluster: all go to one clique, in any order and whichever process dies."""

import asyncio
import random

import pytest
from tests.claim.cluster.admission.gate_site import pod, site

from rackloom.claim.cluster.admission.gates import TOO_EARLY_REASON
from rackloom.claim.kube.api import Rejected
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import EVENT, POD
from rackloom.core.cluster.pods import CHANNEL_CONDITION, TEMPLATE_GATE, WATCHED_LABEL
from rackloom.lab.virtual import event_loop


@pytest.mark.slow
@pytest.mark.parametrize("order", ["pods first", "half before", "domain before template", "pods last"])
@pytest.mark.parametrize("seed", range(5))
def test_in_any_order_all_pods_come_to_one_clique(order, seed):
    async def run():
        async with site(12) as found:
            first, second = [f"a{n}" for n in range(3)], [f"b{n}" for n in range(3)]
            if order in ("pods first", "half before"):
                await found.create_pods(*first)
            domain = await found.create_domain()
            if order == "domain before template":
                await found.create_pods(*first)
            await found.create_template(domain)
            if order == "pods last":
                await asyncio.sleep(1)
                await found.create_pods(*first)
            await found.create_pods(*second)
            async with asyncio.timeout(60):
                while len(await found.cliques()) < 6:
                    await asyncio.sleep(0.1)
            assert len(set(await found.cliques())) == 1
            assert all(not pod["spec"].get("schedulingGates") for pod in await found.pods())

    event_loop.run_simulation(seed, run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_gatekeeper_that_dies_again_and_again_leaves_no_pod_behind_and_none_apart(seed):
    async def run():
        async with site(12, alive=False) as found:
            dying = asyncio.create_task(found.die_often(random.Random(seed)))
            await found.create_pods(*(f"a{n}" for n in range(3)))
            await found.create_template(await found.create_domain())
            await found.create_pods(*(f"b{n}" for n in range(3)))
            async with asyncio.timeout(300):
                while len(await found.cliques()) < 6:
                    await asyncio.sleep(0.1)
            dying.cancel()
            assert len(set(await found.cliques())) == 1

    event_loop.run_simulation(seed, run)


def test_in_channel_mode_early_pods_stay_and_are_told_and_later_ones_share_the_claim():
    async def run():
        async with site(2) as found:
            await found.create_pods("early")
            domain = await found.create_domain({names.ISOLATION_LABEL: "channel"})
            await found.create_template(domain)
            await found.create_pods("late")
            await asyncio.sleep(5)
            early, late = await found.pods()
            assert early["spec"]["schedulingGates"] == [{"name": TEMPLATE_GATE}]
            (event,) = (await found.user.list(EVENT, "team")).items
            assert (event["reason"], event["involvedObject"]["name"]) == (TOO_EARLY_REASON, "early")
            reported = {condition["type"]: condition for condition in early["status"]["conditions"]}[
                CHANNEL_CONDITION
            ]
            assert (reported["status"], reported["reason"]) == ("False", TOO_EARLY_REASON)
            assert "delete the pod and create it again" in reported["message"]
            (claim,) = late["spec"]["resourceClaims"]
            assert claim["resourceClaimName"] == names.shared_claim_name(domain.uid)
            assert not late["spec"].get("schedulingGates")

    event_loop.run_simulation(3, run)


def test_a_pod_that_cannot_be_read_holds_up_no_other():
    """A later Kubernetes may know more than this program, such as another operator of tolerations."""

    async def run():
        async with site(4) as found:
            odd = pod("odd", labels={WATCHED_LABEL: "true"}, tolerations=[{"key": "z", "operator": "Near"}])
            admission, found.kube.admission[:] = list(found.kube.admission), []
            await found.user.create(POD, odd)
            found.kube.admission[:] = admission
            await found.create_pods("a", "b")
            await found.create_template(await found.create_domain())
            async with asyncio.timeout(60):
                while len(await found.cliques()) < 2:
                    await asyncio.sleep(0.1)

    event_loop.run_simulation(1, run)


def test_a_pod_that_may_not_be_changed_holds_up_no_other_and_is_tried_again():
    async def run():
        async with site(4) as found:
            forbidden = True

            async def policy(review):
                name = review.object["metadata"]["name"] if review.object else ""
                if forbidden and review.operation == "UPDATE" and review.kind == POD and name == "b":
                    raise Rejected(403, "Forbidden", "not this one")

            found.kube.admission.append(policy)
            await found.create_pods("a", "b", "c", "d")
            await found.create_template(await found.create_domain())
            async with asyncio.timeout(60):
                while len(await found.cliques()) < 2:
                    await asyncio.sleep(0.1)
            forbidden = False
            async with asyncio.timeout(120):
                while any(pod["spec"].get("schedulingGates") for pod in await found.pods()):
                    await asyncio.sleep(0.1)

    event_loop.run_simulation(1, run)
