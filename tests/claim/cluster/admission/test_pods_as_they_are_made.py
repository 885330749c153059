"""The webhook's treatment of new pods: it lets them be, gates them, or waits for their ComputeDomain."""

import asyncio
import random

from tests.claim.cluster.admission.gate_site import pod, site

from rackloom.claim.cluster.admission.reviews import ReviewedResource, ReviewRequest
from rackloom.claim.cluster.admission.webhook import AdmissionCache, AdmissionReviewer, AdmissionSettings
from rackloom.claim.kube.api import KubeError
from rackloom.core.cluster import names
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.cluster.objects import POD
from rackloom.lab.virtual import event_loop


class Deaf:
    """An API server that is not reached."""

    async def get(self, *_):
        raise KubeError(0, "Unreachable", "the API server was not reached")


def test_in_channel_mode_the_pods_of_a_controller_wait_for_the_compute_domain_of_the_same_file():
    async def run():
        async with site(2, isolation=ImexIsolation.CHANNEL) as found:
            creating = asyncio.create_task(found.create_pods("a", "b", owner="job"))
            await asyncio.sleep(0.3)
            domain = await found.create_domain()
            await creating
            shared = names.shared_claim_name(domain.uid)
            for obj in await found.pods():
                assert obj["spec"]["resourceClaims"] == [{"name": "channel", "resourceClaimName": shared}]
                assert not obj["spec"].get("schedulingGates")

    event_loop.run_simulation(1, run)


def test_the_own_namespace_and_kube_system_are_left_alone():
    async def run():
        async with site(1) as found:
            for namespace in ("rackloom-system", "kube-system"):
                obj = pod("p", gated=False)
                obj["metadata"]["namespace"] = namespace
                made = await found.user.create(POD, obj)
                # The API server itself sets how long the pod stays on a node that is unwell.
                assert {**made["spec"], "tolerations": None} == {**obj["spec"], "tolerations": None}

    event_loop.run_simulation(0, run)


def test_a_pod_is_not_let_in_unseen_while_the_api_server_does_not_answer():
    async def run():
        known = AdmissionCache(Deaf(), ImexIsolation.DOMAIN, random.Random(1))
        obj = pod("p", gated=False)
        asked = ReviewRequest(
            uid="u",
            operation="CREATE",
            resource=ReviewedResource("", "v1", "pods"),
            namespace="team",
            object=obj,
        )
        verdict = await AdmissionReviewer(known, AdmissionSettings()).mutate_pods(asked)
        assert not verdict.allowed
        assert verdict.code == 503
        assert "try again" in verdict.message

    event_loop.run_simulation(0, run)
