"""Which gated pods may go, and where: decided from what is there, and carried out on a simulated cluster."""

import asyncio
import random
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.cluster.admission.desk import AdmissionSettings, Desk
from rackloom.claim.cluster.admission.gatekeeper import TOO_EARLY, Gatekeeper
from rackloom.claim.cluster.admission.gates import Opening, TooEarly, steps
from rackloom.claim.cluster.admission.groups import Group
from rackloom.claim.cluster.admission.marks import CHANNEL_CONDITION, CHANNEL_LABEL, GANG_LABEL, GATE
from rackloom.claim.cluster.admission.reviews import Request, Resource
from rackloom.claim.cluster.admission.shapes import Pod, read
from rackloom.claim.cluster.admission.surroundings import Known
from rackloom.claim.cluster.admission.templates import Channel, Template
from rackloom.claim.cluster.manifests import workload_template
from rackloom.claim.cluster.settings import DaemonSettings, Settings
from rackloom.claim.domain import names
from rackloom.claim.domain.isolation import Isolation
from rackloom.claim.domain.objects import compute_domain
from rackloom.claim.kube.api import KubeError, Rejected
from rackloom.claim.kube.events import Recorder
from rackloom.claim.kube.kinds import (
    COMPUTE_DOMAIN,
    DEVICE_CLASS,
    EVENT,
    NODE,
    POD,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
)
from rackloom.twin import simloop
from rackloom.twin.kube import DirectApi, FakeKube
from rackloom.twin.kube.controllers import PodClaims, Scheduler
from rackloom.twin.kube.patches import json_patch
from rackloom.twin.kube.times import loop_time

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
HERE = Template(True, Channel("uid-1"))
SETTINGS = Settings(daemon=DaemonSettings(image="i"))


def pod(name, *, gated=True, template="imex", labels=None, **spec):
    gates = [{"name": "other"}, {"name": GATE}] if gated else []
    meta = {"name": name, "namespace": "team", "uid": f"uid-{name}", "labels": labels or {}}
    claims = [{"name": "channel", "resourceClaimTemplateName": template}]
    container = {"name": "main", "resources": {"claims": [{"name": "channel"}]}}
    return {
        "metadata": meta,
        "spec": {"containers": [container], "schedulingGates": gates, "resourceClaims": claims, **spec},
    }


def decided(pods, templates, clique=None):
    """What happens to a group of pods of which the gated ones are looked at."""
    values = tuple(read(one, Pod) for one in pods)
    gated = tuple(one for one in values if one.gate_index is not None)
    groups = {name: Group(values, clique) for name, one in templates.items() if one.channel}
    return steps(gated, templates, groups)


def opened(pods, found):
    """The pods of the openings, after their patches."""
    by_name = {one["metadata"]["name"]: one for one in pods}
    patches = [one.patch("team") for one in found if isinstance(one, Opening)]
    return {one.name: json_patch(by_name[one.name], one.patch) for one in patches}


def near(obj):
    return [
        rule
        for term in obj["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
        for rule in term.get("matchExpressions", [])
    ]


def test_a_gate_stays_while_a_template_is_missing():
    assert decided([pod("a")], {"imex": Template()}) == ()


def test_a_template_of_others_just_opens():
    done = opened([pod("a")], decided([pod("a")], {"imex": Template(True)}))
    assert done["a"]["spec"] == {**pod("a")["spec"], "schedulingGates": [{"name": "other"}]}


def test_one_pod_goes_first_into_any_clique():
    pods = [pod("b"), pod("a")]
    done = opened(pods, decided(pods, {"imex": HERE}))
    assert list(done) == ["a"]
    assert near(done["a"]) == [{"key": names.GPU_CLIQUE_LABEL, "operator": "Exists"}]
    assert done["a"]["metadata"]["labels"][CHANNEL_LABEL] == "imex"


def test_the_others_wait_for_it_and_follow():
    pods = [pod("a", gated=False), pod("b"), pod("c")]
    assert decided(pods, {"imex": HERE}) == ()
    placed = [pod("a", gated=False, nodeName="n1"), *pods[1:]]
    done = opened(placed, decided(placed, {"imex": HERE}, "u.1"))
    assert sorted(done) == ["b", "c"]
    assert near(done["b"]) == [{"key": names.GPU_CLIQUE_LABEL, "operator": "In", "values": ["u.1"]}]


def test_every_alternative_of_the_users_own_node_affinity_is_tightened():
    zone = {"key": "zone", "operator": "Exists"}
    terms = [{"matchExpressions": [zone]}, {"matchFields": [zone]}, {}]
    own = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}
    pods = [pod("a", affinity=own)]
    done = opened(pods, decided(pods, {"imex": HERE}))
    rule = {"key": names.GPU_CLIQUE_LABEL, "operator": "Exists"}
    assert near(done["a"]) == [zone, rule, rule]


def test_pods_with_a_rule_of_their_own_go_at_once():
    own = {"podAffinity": {REQUIRED: [{"topologyKey": names.GPU_CLIQUE_LABEL}]}}
    pods = [pod(name, affinity=own) for name in "ab"]
    done = opened(pods, decided(pods, {"imex": HERE}))
    assert [one["spec"]["affinity"] for one in done.values()] == [own, own]


def test_pods_without_one_follow_those_that_have():
    own = {"podAffinity": {REQUIRED: [{"topologyKey": names.GPU_CLIQUE_LABEL}]}}
    pods = [pod("a"), pod("led", affinity=own)]
    assert list(opened(pods, decided(pods, {"imex": HERE}))) == ["led"]


def test_a_gang_is_not_held():
    pods = [pod(name, labels={GANG_LABEL: "g"}) for name in "ab"]
    done = opened(pods, decided(pods, {"imex": HERE}))
    assert all("affinity" not in one["spec"] for one in done.values())
    assert len(done) == 2


def test_in_channel_mode_an_early_pod_is_told_what_to_do():
    (told,) = decided([pod("a")], {"imex": Template(True, Channel("u", is_shared=True))})
    assert isinstance(told, TooEarly)
    assert "create it again" in told.message


def member(name):
    own = {"podAffinity": {REQUIRED: [{"topologyKey": names.GPU_CLIQUE_LABEL}]}}
    return st.builds(
        lambda gated, node, led: pod(
            name,
            gated=gated and not node,
            **({"nodeName": "n1"} if node else {}),
            **({"affinity": own} if led else {}),
        ),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    )


@given(st.tuples(*(member(name) for name in "abc")), st.booleans())
def test_never_two_pods_without_a_rule_are_on_their_way_to_cliques_nobody_knows(pods, in_clique):
    clique = "u.1" if in_clique and any(one["spec"].get("nodeName") for one in pods) else None
    done = opened(pods, decided(pods, {"imex": HERE}, clique))
    after = [done.get(one["metadata"]["name"], one) for one in pods]
    loose = [
        one["metadata"]["name"]
        for one in after
        if "podAffinity" not in one["spec"].get("affinity", {})
        and len(one["spec"]["schedulingGates"]) < 2
        and not one["spec"].get("nodeName")
    ]
    started = [name for name in loose if name in done]
    if clique is None:
        assert not started or loose == started[:1]
    else:
        assert all(near(done[name])[0]["operator"] == "In" for name in started)
    waiting = [one for one in after if len(one["spec"]["schedulingGates"]) == 2]
    moving = [one for one in after if one not in waiting and not one["spec"].get("nodeName")]
    assert not waiting or moving, "somebody is on the way, so the others will be let in"


class Deaf:
    """An API server that is not reached."""

    async def get(self, *_):
        raise KubeError(0, "Unreachable", "the API server was not reached")


class Site:
    """A fake cluster of two cliques with admission, its scheduler, and the gate controller."""

    def __init__(self, nodes, *, isolation=Isolation.DOMAIN):
        self.kube = FakeKube(namespaces=("team", "kube-system", "rackloom-system"), seed=1)
        self.kube.faults.delay(0.005)
        self.user = DirectApi(self.kube, "user")
        api = DirectApi(self.kube, "webhook")
        rng = random.Random(1)
        self.known = Known(api, isolation, rng)
        self.desk = Desk(self.known, AdmissionSettings(isolation=isolation))
        self.keeper = Gatekeeper(api, self.known, Recorder(api, "webhook", "w", loop_time), rng)
        self.kube.admission.append(self.admit)
        self.nodes = nodes

    async def admit(self, review):
        if review.kind != POD or review.operation != "CREATE":
            return None
        namespace = review.object["metadata"]["namespace"]
        resource = Resource("", "v1", "pods")
        asked = Request(
            uid="u", operation="CREATE", resource=resource, namespace=namespace, object=review.object
        )
        return json_patch(review.object, (await self.desk.mutate_pods(asked)).patch)

    async def begin(self):
        selector = {"cel": {"expression": f"device.driver == '{names.IMEX_DRIVER}'"}}
        await self.user.create(
            DEVICE_CLASS, {"metadata": {"name": names.CHANNEL_CLASS}, "spec": {"selectors": [selector]}}
        )
        for number in range(self.nodes):
            node = f"n{number}"
            labels = {names.GPU_CLIQUE_LABEL: f"u.{number % 2}"}
            room = {"allocatable": {"pods": "110"}}
            await self.user.create(NODE, {"metadata": {"name": node, "labels": labels}, "status": room})
            spec = {
                "driver": names.IMEX_DRIVER,
                "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "channel-0"}],
            }
            await self.user.create(RESOURCE_SLICE, {"metadata": {"name": node}, "spec": spec})

    async def create_pods(self, *pod_names, owner=None):
        for name in pod_names:
            obj = pod(name, gated=False)
            if owner:
                reference = {"apiVersion": "batch/v1", "kind": "Job", "name": owner, "uid": f"uid-{owner}"}
                obj["metadata"]["ownerReferences"] = [{**reference, "controller": True}]
            obj["spec"] = {key: value for key, value in obj["spec"].items() if key != "schedulingGates"}
            del obj["metadata"]["uid"]
            await self.user.create(POD, obj)

    async def die_often(self, rng):
        """One gatekeeper after the other; each lives for milliseconds and knows nothing of the last."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0.0, 0.03)):
                    await self.new_keeper().run()

    def new_keeper(self):
        api = DirectApi(self.kube, "webhook")
        keeper = Gatekeeper(api, self.known, Recorder(api, "webhook", "w", loop_time), random.Random(1))
        for pod in self.known.gated("team"):
            keeper.saw(self.known.at(POD, "team", pod.metadata.name))
        return keeper

    async def create_domain(self, labels=None):
        spec = {"channel": {"resourceClaimTemplate": {"name": "imex"}}}
        meta = {"name": "cd", "namespace": "team", "labels": labels or {}}
        made = await self.user.create(COMPUTE_DOMAIN, {"metadata": meta, "spec": spec})
        return compute_domain(made)

    async def create_template(self, domain):
        await self.user.create(RESOURCE_CLAIM_TEMPLATE, workload_template(domain, SETTINGS))

    async def pods(self):
        return (await self.user.list(POD, "team")).items

    async def cliques(self):
        labels = {
            one["metadata"]["name"]: one["metadata"]["labels"] for one in (await self.user.list(NODE)).items
        }
        bound = [one["spec"]["nodeName"] for one in await self.pods() if one["spec"].get("nodeName")]
        return [labels[node][names.GPU_CLIQUE_LABEL] for node in bound]


@asynccontextmanager
async def site(nodes, *, alive=True, **how):
    found = Site(nodes, **how)
    runs = [one.run() for one in found.known.informers]
    runs += [PodClaims(found.kube, random.Random(2)).run(), Scheduler(found.kube, random.Random(3)).run()]
    if alive:
        runs.append(found.keeper.run())
    tasks = [asyncio.create_task(one) for one in runs]
    await found.known.synced()
    await found.begin()
    try:
        yield found
    finally:
        for task in tasks:
            assert not task.done(), task.exception()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
            assert all(not one["spec"].get("schedulingGates") for one in await found.pods())

    simloop.run(seed, run)


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

    simloop.run(seed, run)


def test_in_channel_mode_early_pods_stay_and_are_told_and_later_ones_share_the_claim():
    async def run():
        async with site(2) as found:
            await found.create_pods("early")
            domain = await found.create_domain({names.ISOLATION_LABEL: "channel"})
            await found.create_template(domain)
            await found.create_pods("late")
            await asyncio.sleep(5)
            early, late = await found.pods()
            assert early["spec"]["schedulingGates"] == [{"name": GATE}]
            (event,) = (await found.user.list(EVENT, "team")).items
            assert (event["reason"], event["involvedObject"]["name"]) == (TOO_EARLY, "early")
            said = {one["type"]: one for one in early["status"]["conditions"]}[CHANNEL_CONDITION]
            assert (said["status"], said["reason"]) == ("False", TOO_EARLY)
            assert "delete the pod and create it again" in said["message"]
            (claim,) = late["spec"]["resourceClaims"]
            assert claim["resourceClaimName"] == names.shared_claim_name(domain.uid)
            assert not late["spec"].get("schedulingGates")

    simloop.run(3, run)


def test_in_channel_mode_the_pods_of_a_controller_wait_for_the_compute_domain_of_the_same_file():
    async def run():
        async with site(2, isolation=Isolation.CHANNEL) as found:
            creating = asyncio.create_task(found.create_pods("a", "b", owner="job"))
            await asyncio.sleep(0.3)
            domain = await found.create_domain()
            await creating
            shared = names.shared_claim_name(domain.uid)
            for one in await found.pods():
                assert one["spec"]["resourceClaims"] == [{"name": "channel", "resourceClaimName": shared}]
                assert not one["spec"].get("schedulingGates")

    simloop.run(1, run)


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
                while any(one["spec"].get("schedulingGates") for one in await found.pods()):
                    await asyncio.sleep(0.1)

    simloop.run(1, run)


def test_the_own_namespace_and_kube_system_are_left_alone():
    async def run():
        async with site(1) as found:
            for namespace in ("rackloom-system", "kube-system"):
                obj = pod("p", gated=False)
                obj["metadata"]["namespace"] = namespace
                made = await found.user.create(POD, obj)
                # The API server itself says how long the pod stays on a node that is unwell.
                assert {**made["spec"], "tolerations": None} == {**obj["spec"], "tolerations": None}

    simloop.run(0, run)


def test_a_pod_is_not_let_in_unseen_while_the_api_server_does_not_answer():
    async def run():
        known = Known(Deaf(), Isolation.DOMAIN, random.Random(1))
        obj = pod("p", gated=False)
        asked = Request(
            uid="u", operation="CREATE", resource=Resource("", "v1", "pods"), namespace="team", object=obj
        )
        verdict = await Desk(known, AdmissionSettings()).mutate_pods(asked)
        assert not verdict.allowed
        assert verdict.code == 503
        assert "try again" in verdict.message

    simloop.run(0, run)
