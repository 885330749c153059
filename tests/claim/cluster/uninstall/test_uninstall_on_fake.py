"""The command on the fake API server: whole, half-way, wedged, interrupted, blocked, and beside others."""

import asyncio
import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.claim.cluster.uninstall.a_cluster import (
    CLIQUE,
    CLUSTER_ROLE,
    DAEMONS,
    DRIVER,
    NVIDIA,
    TEAM,
    US,
    Cluster,
    belongings,
    claim_of,
    domain_of,
    lease,
    on_a_cluster,
    plan_of,
    pod,
    programs,
    running,
    slice_of,
    strange,
    tainted,
    tray,
)

from rackloom.claim.cluster.uninstall.blockers import UninstallPhase
from rackloom.claim.cluster.uninstall.plan import build_uninstall_plan
from rackloom.claim.kube.api import NotFound, Rejected
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    CONFIG_MAP,
    CRD,
    DAEMON_SET,
    DEVICE_CLASS,
    JOB,
    MUTATING_WEBHOOK,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    Object,
    ResourceKind,
)
from rackloom.errors import Refused
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.virtual import event_loop

PLUGINS = ("node-imex", "node-gpu", "node-nic", "node-mps")
STATES = st.fixed_dictionaries(
    {
        "webhook": st.booleans(),
        "plugins": st.booleans(),
        "domains": st.integers(0, 2),
        "deleting": st.booleans(),
        "outlived": st.booleans(),
        "warm": st.booleans(),
        "plans": st.integers(0, 2),
        "stray taint": st.booleans(),
        "clique label": st.sampled_from([None, "rackloom-clique-label", "nfd-master"]),
        "wedged": st.booleans(),
        "gone": st.sets(st.integers(0, 69), max_size=30),
        "deaths": st.lists(st.integers(0, 12), max_size=6),
    }
)
"""The parts of an installation that exist, and the writes after which the command dies each time."""


def run(story: Any, seed: int = 1) -> Any:
    return event_loop.run_simulation(seed, lambda: on_a_cluster(story))


async def add_foreign_objects(cluster: Cluster) -> None:
    """Foreign objects, as similar to ours as possible."""
    label = {"app.kubernetes.io/part-of": "rackloom"}
    helm = {"meta.helm.sh/release-name": "nvidia"}
    selectors = {"selectors": [{"cel": {"expression": "device.driver == 'example.com'"}}]}
    for kind, obj in (
        (DEVICE_CLASS, strange("vfio.gpu.example.com", spec=selectors)),
        (CLUSTER_ROLE, strange("rackloom-auditors")),
        (CLUSTER_ROLE, strange("helmed", labels=label, annotations=helm)),
        (CONFIG_MAP, strange("notes", TEAM, labels=label)),
        (RESOURCE_CLAIM_TEMPLATE, strange("channel-of-mine", TEAM, spec={"spec": {}})),
        (MUTATING_WEBHOOK, strange("rackloom-webhook-of-mine", webhooks=[])),
        (NODE, strange("other", labels={names.GPU_CLIQUE_LABEL: CLIQUE}, spec={})),
        (
            POD,
            strange(
                "bystander", TEAM, spec={"containers": [{"name": "c", "image": "i"}], "nodeName": "other"}
            ),
        ),
    ):
        await cluster.put(kind, obj)


async def built(cluster: Cluster, state: dict[str, Any]) -> None:
    """An installation in a state, without a controller that runs."""
    await add_foreign_objects(cluster)
    await cluster.install("base", *(["webhook"] if state["webhook"] else []))
    await lease(cluster)
    await tray(cluster, "n0")
    if state["plugins"]:
        await programs(cluster, *PLUGINS)
        for driver in (names.IMEX_DRIVER, names.GPU_DRIVER, "dra.net"):
            await slice_of(cluster, driver, "n0", by=f"rackloom-{driver}")
    for number in range(state["domains"]):
        await domain_of(cluster, f"cd-{number}")
    if state["deleting"] and state["domains"]:
        await cluster.user.delete(COMPUTE_DOMAIN, "cd-0", TEAM)
    if state["outlived"]:
        await belongings(cluster, "5f0b6bb6-0000", TEAM, "orphan", node="n-orphan")
    if state["warm"]:
        await warm(cluster)
    for number in range(state["plans"]):
        await tray(cluster, f"tray-{number}")
        await plan_of(cluster, f"gang-{number}", f"tray-{number}", "n0")
    if state["stray taint"]:
        await tainted(cluster, "n0", "uid-of-a-plan-that-is-gone")
    if state["clique label"]:
        change = {"metadata": {"labels": {names.GPU_CLIQUE_LABEL: CLIQUE}}}
        await cluster.as_(state["clique label"]).patch(NODE, "n0", None, change)


async def warm(cluster: Cluster) -> None:
    mark = {names.WARM_CLIQUE_LABEL: CLIQUE}
    await domain_of(cluster, "channels", namespace=DAEMONS, **mark)
    await slice_of(cluster, names.IMEX_DRIVER, f"clique/{CLIQUE}", by="rackloom-controller", labels=mark)
    offered = {**mark, names.CHANNELS_READY_LABEL: CLIQUE}
    await cluster.as_("rackloom-controller").patch(NODE, "n0", None, {"metadata": {"labels": offered}})


async def wreck(cluster: Cluster, state: dict[str, Any]) -> None:
    """A user has deleted some of it by hand, or all with `kubectl delete -k deploy/kubernetes/base`."""
    installed = [
        (kind, obj)
        for kind in cluster.kube.schemas
        for obj in cluster.kube.store.all(kind)
        if (obj["metadata"].get("labels") or {}).get("app.kubernetes.io/part-of") == "rackloom"
        and "stranger" not in (obj["metadata"].get("annotations") or {})
    ]
    webhooks = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
    for number, (kind, obj) in enumerate(installed):
        by_hand = number in state["gone"]
        if by_hand or (state["wedged"] and kind.kind not in webhooks):
            await gone(cluster, kind, obj)


async def gone(cluster: Cluster, kind: ResourceKind, obj: Object) -> None:
    with contextlib.suppress(NotFound):
        await cluster.user.delete(kind, obj["metadata"]["name"], obj["metadata"].get("namespace"))


class Mortal:
    """A client whose process dies with its n-th write, which may have been carried out."""

    def __init__(self, api: Any, writes: int) -> None:
        self._api = api
        self._left = writes

    def __getattr__(self, verb: str) -> Any:
        call = getattr(self._api, verb)
        if verb not in ("patch", "delete"):
            return call

        async def counted(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise Died
            answer = await call(*arguments, **options)
            if self._left < 0:
                raise Died
            return answer

        return counted


class Died(Exception):
    pass


@pytest.mark.slow
@given(state=STATES)
@settings(max_examples=40)
def test_from_any_state_it_ends_with_nothing_of_ours_and_all_of_others(state: dict[str, Any]) -> None:
    """It may have died again and again, at any write. The judge of the cluster watches each write."""

    async def story(cluster: Cluster) -> None:
        await built(cluster, state)
        before = cluster.foreign_objects()
        await wreck(cluster, state)
        for writes in state["deaths"]:
            try:
                await cluster.uninstall(Mortal(cluster.as_(US), writes))
            except Died:
                continue
        outcome = await cluster.uninstall()
        assert outcome.rest.steps == (), outcome
        left = set(cluster.ours())
        assert left == set(), left
        assert cluster.foreign_objects() == before
        label = (await cluster.user.get(NODE, "n0"))["metadata"]["labels"].get(names.GPU_CLIQUE_LABEL)
        assert label == (CLIQUE if state["clique label"] == "nfd-master" else None)
        assert (await cluster.uninstall()).done == ()

    run(story)


@pytest.mark.slow
@given(state=STATES, seed=st.integers(0, 1000))
@settings(max_examples=10)
def test_answers_that_are_lost_change_nothing(state: dict[str, Any], seed: int) -> None:
    async def story(cluster: Cluster) -> None:
        await built(cluster, state)
        before = cluster.foreign_objects()
        cluster.kube.faults.add(RequestFault(rate=0.02, user=US, code=503))
        cluster.kube.faults.add(RequestFault(rate=0.02, user=US, lost="reply"))
        outcome = await cluster.uninstall(still_seconds=600)
        assert outcome.rest.steps == (), outcome
        assert cluster.ours() == []
        assert cluster.foreign_objects() == before

    run(story, seed)


def test_steps_are_in_order_and_each_is_reported_when_nothing_of_it_is_left() -> None:
    everything = {
        "webhook": True, "plugins": True, "domains": 1, "deleting": False, "outlived": True, "warm": True,
        "plans": 1, "stray taint": True, "clique label": "rackloom-clique-label",
    }  # fmt: skip

    async def story(cluster: Cluster) -> None:
        await built(cluster, everything)
        await programs(cluster, "webhook")
        planned = [step.phase for step in build_uninstall_plan(await cluster.look()).steps]
        assert planned == list(UninstallPhase)
        outcome = await cluster.uninstall()
        assert [step.phase for step in outcome.done] == list(UninstallPhase)
        assert not cluster.ours()

    run(story)


def test_a_plan_changes_nothing() -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.install("base", "webhook")
        await domain_of(cluster, "cd")
        version = cluster.kube.store.version
        build_uninstall_plan(await cluster.look())
        assert cluster.kube.store.version == version

    run(story)


USES = {
    "gpu": (
        {"driver": names.GPU_DRIVER},
        "holds devices of gpu.nvidia.com, which only its node plugin can take back",
    ),
    "nic": ({"driver": "dra.net"}, "holds devices of dra.net, which only its node plugin can take back"),
    "channel": (
        {"driver": names.IMEX_DRIVER, "domain": "cd"},
        "holds a channel of ComputeDomain team/cd: its memory sharing would end",
    ),
}


@pytest.mark.parametrize("use", USES)
def test_nothing_is_taken_from_a_pod_that_uses_it(use: str) -> None:
    options, why = USES[use]

    async def story(cluster: Cluster) -> None:
        await cluster.install("base", "webhook")
        await programs(cluster, "webhook", *PLUGINS)
        uid = await domain_of(cluster, "cd")
        await slice_of(cluster, str(options["driver"]), "n0", by=f"rackloom-{options['driver']}")
        job = await cluster.put(JOB, {"metadata": {"name": "train", "namespace": TEAM}, "spec": {}})
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "controller": True}
        owner["uid"] = job["metadata"]["uid"]
        for number in range(5):
            holder = await running(cluster, pod(f"w-{number}", TEAM, ownerReferences=[owner]))
            domain = uid if "domain" in options else None
            await claim_of(cluster, holder, driver=str(options["driver"]), domain=domain)
        version = cluster.kube.store.version
        outcome = await cluster.uninstall()
        assert outcome.done == ()
        assert cluster.kube.store.version == version
        (blocker,) = outcome.rest.blockers
        assert (blocker.phase, blocker.why) == (UninstallPhase.WEBHOOKS, why)
        assert blocker.what == "Job team/train (pods w-0, w-1, w-2 and 2 more)"
        assert blocker.fix == "kubectl delete job.batch -n team train"
        await cluster.user.delete(JOB, "train", TEAM)
        await asyncio.sleep(5)
        assert (await cluster.uninstall()).rest.steps == ()

    run(story)


@pytest.mark.parametrize("serving", ["node-imex", "node-all"])
def test_a_compute_domain_goes_under_load_only_with_its_annotation_and_then_its_plugin_waits(
    serving: str,
) -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.install("base")
        if serving == "node-all":
            await cluster.install("one-process")
            for plugin in PLUGINS:
                await cluster.user.delete(DAEMON_SET, f"rackloom-{plugin}", DRIVER)
        await programs(cluster, *PLUGINS, serving)
        uid = await domain_of(cluster, "cd")
        await slice_of(cluster, names.IMEX_DRIVER, "n0", by=f"rackloom-{names.IMEX_DRIVER}")
        holder = await running(cluster, pod("worker", TEAM))
        await claim_of(cluster, holder, driver=names.IMEX_DRIVER, domain=uid)
        assert (await cluster.uninstall()).done == ()
        note = {"metadata": {"annotations": {names.ALLOW_DELETION_ANNOTATION: "true"}}}
        await cluster.user.patch(COMPUTE_DOMAIN, "cd", TEAM, note)
        outcome = await cluster.uninstall()
        assert UninstallPhase.DOMAINS in [step.phase for step in outcome.done]
        assert outcome.rest.steps[0].phase is UninstallPhase.PLUGINS
        (blocker,) = outcome.rest.blockers
        assert blocker.fix == "kubectl delete pod -n team worker"
        assert await cluster.user.get(DAEMON_SET, f"rackloom-{serving}", DRIVER)
        await cluster.user.delete(POD, "worker", TEAM)
        await asyncio.sleep(5)
        assert (await cluster.uninstall()).rest.steps == ()
        assert cluster.ours() == []

    run(story)


def test_pods_of_gangs_and_pods_at_our_gates_hold_it() -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.install("base", "webhook")
        await programs(cluster, "webhook")
        await tray(cluster, "tray")
        await plan_of(cluster, "g", "tray")
        meta = {"labels": {"rackloom.dev/gang": "g"}, "annotations": {"rackloom.dev/gang-size": "1"}}
        await running(cluster, pod("member", TEAM, node="tray", **meta))
        waits = pod("waits", TEAM, node=None, labels={"rackloom.dev/claim-admission": "true"})
        waits["spec"]["schedulingGates"] = [{"name": "rackloom.dev/claim-template"}]
        # Only the gates matter: a later version of Kubernetes may have other rules beside them.
        waits["spec"]["tolerations"] = [{"key": "zone", "operator": "Near"}]
        await cluster.put(POD, waits)
        outcome = await cluster.uninstall()
        assert {(blocker.what, blocker.why) for blocker in outcome.rest.blockers} == {
            ("Pod team/member", "belongs to gang team/g, which holds trays"),
            ("Pod team/waits", "waits at the gate rackloom.dev/claim-template, which nobody would open"),
        }
        assert outcome.done == ()

    run(story)


def test_pods_whose_plugin_is_gone_hold_nothing_and_are_told_of() -> None:
    """After `kubectl delete -k` their kubelet cannot finish them, and nothing that we keep would help."""

    async def story(cluster: Cluster) -> None:
        await cluster.install("base")
        holder = await running(cluster, pod("worker", TEAM))
        await claim_of(cluster, holder, driver=names.GPU_DRIVER)
        await wreck(cluster, {"gone": (), "wedged": True})
        outcome = await cluster.uninstall()
        assert outcome.rest.steps == ()
        (left,) = [entry for entry in outcome.rest.left if entry.what == "Pod team/worker"]
        assert "kubectl delete pod --force -n team worker" in left.fix
        assert await cluster.user.get(POD, "worker", TEAM)

    run(story)


def test_nvidias_driver_keeps_its_domains_classes_and_definitions() -> None:
    """Both are here: only objects that our controller made go, and shared ones stay."""

    async def story(cluster: Cluster) -> None:
        await cluster.install("base")
        mine = await domain_of(cluster, "mine")
        theirs = strange("theirs", TEAM, spec={"channel": {"resourceClaimTemplate": {"name": "t"}}})
        theirs["metadata"]["finalizers"] = [names.FINALIZER]
        made = await cluster.put(COMPUTE_DOMAIN, theirs, "compute-domain-controller")
        labels = {names.COMPUTE_DOMAIN_LABEL: made["metadata"]["uid"]}
        spec: Object = {"selector": {}, "template": {}}
        held = strange("computedomain-daemon-x", NVIDIA, labels=labels, spec=spec)
        held["metadata"]["finalizers"] = [names.FINALIZER]
        await cluster.put(DAEMON_SET, held, "compute-domain-controller")
        published = strange("n9", spec={"driver": names.IMEX_DRIVER, "nodeName": "n9", "devices": []})
        published["spec"]["pool"] = {"name": "n9", "generation": 1, "resourceSliceCount": 1}
        await cluster.put(RESOURCE_SLICE, published, "compute-domain-kubelet-plugin")
        cluster.judge.shared = (
            "compute-domain-daemon.nvidia.com",
            "compute-domain-default-channel.nvidia.com",
            "compute-domain-isolated-channel.rackloom.dev",
            "computedomains.resource.nvidia.com",
            "computedomaincliques.resource.nvidia.com",
        )
        before = cluster.foreign_objects()
        outcome = await cluster.uninstall()
        assert outcome.rest.steps == (), outcome
        assert cluster.foreign_objects() == before
        assert not [
            domain for domain in cluster.kube.store.all(COMPUTE_DOMAIN) if domain["metadata"]["uid"] == mine
        ]
        left = {
            obj["metadata"]["name"] for kind in (CRD, DEVICE_CLASS) for obj in cluster.kube.store.all(kind)
        }
        assert left == set(cluster.judge.shared)
        assert {"ComputeDomain team/theirs"} == {
            entry.what for entry in outcome.rest.left if entry.what.startswith("ComputeDomain ")
        }

    run(story)


def test_an_installation_without_the_label_is_not_touched() -> None:
    """An installation of an earlier version: which objects are ours is unknown."""

    async def story(cluster: Cluster) -> None:
        await cluster.install("base", "webhook")
        for kind in cluster.kube.schemas:
            for obj in cluster.kube.store.all(kind):
                label = {"metadata": {"labels": {"app.kubernetes.io/part-of": None}}}
                meta = obj["metadata"]
                await cluster.user.patch(kind, meta["name"], meta.get("namespace"), label)
        await cluster.put(
            COMPUTE_DOMAIN, {"metadata": {"name": "cd", "namespace": TEAM}, "spec": {}}, "rackloom-controller"
        )
        version = cluster.kube.store.version
        found = build_uninstall_plan(await cluster.look())
        assert not any(step.actions for step in found.steps)
        assert cluster.kube.store.version == version
        left = {entry.what for entry in found.left}
        assert {
            "ClusterRole rackloom-controller",
            "DeviceClass gpu.nvidia.com",
            f"Namespace {DRIVER}",
        } <= left
        assert all("apply -k" in entry.fix for entry in found.left if entry.what.startswith("ClusterRole"))

    run(story)


def test_what_somebody_put_into_our_namespace_keeps_it() -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.install("base")
        await cluster.put(CONFIG_MAP, strange("notes", DRIVER))
        outcome = await cluster.uninstall()
        assert outcome.rest.steps == ()
        (left,) = [entry for entry in outcome.rest.left if entry.what == f"Namespace {DRIVER}"]
        assert left.why == f"holds what is not ours: ConfigMap {DRIVER}/notes"
        assert "deletionTimestamp" not in (await cluster.user.get(NAMESPACE, DRIVER))["metadata"]

    run(story)


def test_what_a_helm_release_owns_goes_only_when_that_release_is_named() -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.install("base", release="racks")
        before = cluster.ours()
        left = (await cluster.uninstall(release="another")).rest.left
        assert {entry.why for entry in left} == {"belongs to the Helm release racks"}
        assert all("--helm-release racks" in entry.fix for entry in left)
        assert cluster.ours() == before
        outcome = await cluster.uninstall(release="racks")
        assert (outcome.rest.steps, outcome.rest.left) == ((), ())
        assert not cluster.ours()

    run(story)


def test_a_step_that_stands_still_is_given_up_with_the_reason() -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.install("base")
        await domain_of(cluster, "cd")
        held = {"metadata": {"finalizers": ["grove.io/computedomain-finalizer"]}}
        await cluster.user.patch(COMPUTE_DOMAIN, "cd", TEAM, held)
        outcome = await cluster.uninstall(still_seconds=20)
        assert outcome.timed_out
        step = outcome.rest.steps[0]
        assert step.phase is UninstallPhase.DOMAINS
        assert step.waits["ComputeDomain team/cd"] == "held by grove.io/computedomain-finalizer"

    run(story)


def test_a_missing_right_is_told_with_what_was_asked() -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.install("base")

        async def forbid(review: Any) -> None:
            if review.user == US and review.kind == CLUSTER_ROLE:
                raise Rejected(403, "Forbidden", "no")

        cluster.kube.admission.append(forbid)
        with pytest.raises(Refused, match="this account may not delete ClusterRole"):
            await cluster.uninstall()

    run(story)
