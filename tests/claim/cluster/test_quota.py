"""Quota of ComputeDomains: which ones wait for it, which give it back, and that all are counted."""

import asyncio
import itertools
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from tests.claim.cluster import fake_site
from tests.claim.cluster.conftest import NOW, World, claim, compute_domain
from tests.claim.cluster.one_domain import UID, delete, settle, started, status_of
from tests.claim.cluster.quota_kueue import QuotaKueue, conditions_of, requests_of

from rackloom.claim.kube.api import Conflict, NotFound
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import read_compute_domain
from rackloom.core.cluster.kueue_objects import read_workload
from rackloom.core.cluster.names import ImexIsolation, ImexMode
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    DAEMON_SET,
    NETWORK_POLICY,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    SECRET,
    WORKLOAD,
    Object,
    ResourceKind,
    has_condition,
    metav1_time,
)
from rackloom.core.domains.observe import take_domain_snapshot
from rackloom.core.domains.quota import (
    DOMAINS_RESOURCE,
    QUEUE_LABEL,
    SPARES_ANNOTATION,
    SPARES_RESOURCE,
    spare_quotas,
    workload_name,
)
from rackloom.core.domains.reconcile import reconcile_domain
from rackloom.core.domains.settings import ControllerSettings, ImexDaemonSettings, QuotaMode
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.objects import TypeSchema
from rackloom.lab.virtual import event_loop
from rackloom.lab.virtual.event_loop import loop_wall_time

QUEUED = {QUEUE_LABEL: "team-queue"}
OWNED = (RESOURCE_CLAIM_TEMPLATE, DAEMON_SET, NETWORK_POLICY)


@pytest.fixture
def counted(settings: ControllerSettings) -> ControllerSettings:
    return msgspec.structs.replace(settings, quota=QuotaMode.LABELLED)


def workload(world: World, uid: str = UID) -> Object:
    found = world.at(WORKLOAD, "team", workload_name(uid))
    assert found is not None
    return found


def decide(world: World, kueue: QuotaKueue, make: SimpleNamespace) -> None:
    """One turn of Kueue."""
    for obj in world.of(WORKLOAD):
        others = [other for other in world.of(WORKLOAD) if other is not obj]
        world.put(WORKLOAD, kueue.decided(obj, others, make.now))


def reason(world: World, type_: str = "QuotaReserved", name: str = "job") -> str:
    condition = status_of(world, name).condition(type_)
    return "" if condition is None else condition.reason


def message(world: World, type_: str = "QuotaReserved") -> str:
    return status_of(world).condition(type_).message


def has_objects(world: World) -> list[bool]:
    return [bool(world.of(kind)) for kind in OWNED]


def relabel(world: World, name: str = "job", **meta: Any) -> None:
    obj = world.at(COMPUTE_DOMAIN, "team", name)
    assert obj is not None
    world.put(COMPUTE_DOMAIN, {**obj, "metadata": {**obj["metadata"], **meta}})


def admitted(make: SimpleNamespace, counted: ControllerSettings, kueue: QuotaKueue, **meta: Any) -> World:
    world: World = make.world()
    world.put(COMPUTE_DOMAIN, make.domain(labels=QUEUED, **meta))
    settle(world, counted, make)
    decide(world, kueue, make)
    settle(world, counted, make)
    return world


def evict(world: World, kueue: QuotaKueue, make: SimpleNamespace, **why: str) -> None:
    world.put(WORKLOAD, kueue.evicted(workload(world), make.now, **why))


# ComputeDomains that wait.


@pytest.mark.parametrize("mode", [ImexMode.DRIVER_MANAGED, ImexMode.HOST_MANAGED])
def test_one_with_a_queue_has_nothing_until_it_is_admitted(
    make: SimpleNamespace, counted: ControllerSettings, mode: ImexMode
) -> None:
    counted = msgspec.structs.replace(counted, imex_mode=mode)
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain(labels=QUEUED, annotations={SPARES_ANNOTATION: "2"}))
    settle(world, counted, make)
    assert not any(has_objects(world))
    made = workload(world)
    assert requests_of(made) == {DOMAINS_RESOURCE: 1, SPARES_RESOURCE: 2}
    assert made["spec"]["queueName"] == "team-queue"
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("ComputeDomain", UID, True)
    assert reason(world) == reason(world, "Ready") == reason(world, "Progressing") == "WaitingForQuota"
    assert message(world) == "waits for quota in queue team-queue: Kueue has not decided yet"
    assert status_of(world).status.value == "NotReady"

    decide(world, QuotaKueue(spares=1), make)
    settle(world, counted, make)
    assert "insufficient quota for rackloom.dev/spare-nodes" in message(world)
    assert not any(has_objects(world))

    decide(world, QuotaKueue(), make)
    settle(world, counted, make)
    assert world.of(RESOURCE_CLAIM_TEMPLATE)
    assert message(world) == "it has quota in queue team-queue, spare nodes: 2"
    assert has_condition(workload(world), "PodsReady"), "or Kueue evicts it by its timeout for pods"


@pytest.mark.parametrize("mode", [QuotaMode.NONE, QuotaMode.LABELLED])
def test_one_without_a_queue_is_not_counted(
    make: SimpleNamespace, settings: ControllerSettings, mode: QuotaMode
) -> None:
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain(labels=QUEUED if mode is QuotaMode.NONE else {}))
    settle(world, msgspec.structs.replace(settings, quota=mode), make)
    assert all(has_objects(world))
    assert not world.of(WORKLOAD)
    assert reason(world) == ""


def test_where_all_are_counted_one_without_a_queue_waits(
    make: SimpleNamespace, settings: ControllerSettings
) -> None:
    everywhere = msgspec.structs.replace(settings, quota=QuotaMode.ALL)
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain())
    settle(world, everywhere, make)
    assert not any(has_objects(world))
    assert not world.of(WORKLOAD)
    assert message(world) == f"waits for quota: label it {QUEUE_LABEL}: all need quota here"
    relabel(world, labels={**world.at(COMPUTE_DOMAIN, "team", "job")["metadata"]["labels"], **QUEUED})
    settle(world, everywhere, make)
    decide(world, QuotaKueue(), make)
    settle(world, everywhere, make)
    assert all(has_objects(world))


def test_warm_domains_of_the_controller_are_never_counted(
    make: SimpleNamespace, settings: ControllerSettings
) -> None:
    everywhere = msgspec.structs.replace(settings, quota=QuotaMode.ALL)
    world = make.world()
    meta = {"namespace": settings.daemon_namespace, "labels": {names.WARM_CLIQUE_LABEL: make.clique}}
    obj = make.domain()
    world.put(COMPUTE_DOMAIN, {**obj, "metadata": {**obj["metadata"], **meta}})
    decision = reconcile_domain(take_domain_snapshot(world, UID, everywhere, make.now))
    assert not any(getattr(action, "kind", None) == WORKLOAD for action in decision.actions)
    assert any(action.kind == DAEMON_SET for action in decision.actions)


@pytest.mark.parametrize("text", ["-1", "two", "1000", "", "٣"])
def test_a_count_of_spares_that_is_none_is_said(
    make: SimpleNamespace, counted: ControllerSettings, text: str
) -> None:
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain(labels=QUEUED, annotations={SPARES_ANNOTATION: text}))
    settle(world, counted, make)
    assert not world.of(WORKLOAD)
    assert f"annotation {SPARES_ANNOTATION} is {text!r}: use a number from 0 to 999" in message(world)


# All are counted.


def test_one_that_waits_may_change_its_queue_and_its_spares_and_stays_counted(
    make: SimpleNamespace, counted: ControllerSettings
) -> None:
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain(labels=QUEUED))
    settle(world, counted, make)
    decide(world, QuotaKueue(domains=0), make)
    before = workload(world)
    relabel(world, labels={QUEUE_LABEL: "other"}, annotations={SPARES_ANNOTATION: "3"})
    settle(world, counted, make)
    QuotaKueue().check_changes(before, workload(world))
    assert workload(world)["spec"]["queueName"] == "other"
    assert requests_of(workload(world)) == {DOMAINS_RESOURCE: 1, SPARES_RESOURCE: 3}
    relabel(world, labels={})
    settle(world, counted, make)
    assert workload(world)["spec"]["queueName"] == "other"
    assert reason(world) == "WaitingForQuota"
    assert not any(has_objects(world))


@pytest.mark.parametrize("labels", [{}, {QUEUE_LABEL: "other"}])
@pytest.mark.parametrize("spares", ["5", "nonsense"])
def test_one_with_quota_keeps_its_workload_whatever_is_written(
    make: SimpleNamespace, counted: ControllerSettings, labels: dict[str, str], spares: str
) -> None:
    kueue = QuotaKueue()
    world = admitted(make, counted, kueue, annotations={SPARES_ANNOTATION: "1"})
    before = workload(world)
    relabel(world, labels=labels, annotations={SPARES_ANNOTATION: spares})
    settle(world, counted, make)
    assert workload(world)["spec"] == before["spec"]
    assert message(world) == "it has quota in queue team-queue, spare nodes: 1"
    # Its writes do not save it from eviction either.
    evict(world, kueue, make)
    settle(world, counted, make)
    assert not any(has_objects(world))


def test_a_workload_that_somebody_deletes_is_made_again_and_what_runs_stays(
    make: SimpleNamespace, counted: ControllerSettings
) -> None:
    world = admitted(make, counted, QuotaKueue())
    del world.objects[WORKLOAD, "team", workload_name(UID)]
    settle(world, counted, make)
    assert requests_of(workload(world)) == {DOMAINS_RESOURCE: 1}
    assert all(has_objects(world))
    assert reason(world) == "KeptWithoutQuota"
    assert message(world).startswith("keeps what it has, and waits for quota in queue ")


@pytest.mark.parametrize("kind", [RESOURCE_CLAIM_TEMPLATE, NETWORK_POLICY, DAEMON_SET])
@pytest.mark.parametrize("mode", [ImexMode.DRIVER_MANAGED, ImexMode.HOST_MANAGED])
def test_what_a_tenant_makes_under_its_label_is_no_sign_that_it_had_quota(
    make: SimpleNamespace, counted: ControllerSettings, mode: ImexMode, kind: ResourceKind
) -> None:
    counted = msgspec.structs.replace(counted, imex_mode=mode)
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain(labels=QUEUED))
    settle(world, counted, make)
    decide(world, QuotaKueue(domains=0), make)
    settle(world, counted, make)
    assert reason(world) == "WaitingForQuota"
    labels = {names.COMPUTE_DOMAIN_LABEL: UID, names.TARGET_LABEL: names.TARGET_WORKLOAD}
    meta = {"name": "mine", "namespace": "team", "uid": "x", "resourceVersion": "1", "labels": labels}
    obj = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, "spec": {"spec": {}}}
    world.put(kind, obj)
    settle(world, counted, make)
    assert reason(world) == "WaitingForQuota"


@pytest.mark.parametrize("change", ["owner", "requests", "finished"])
def test_a_workload_that_is_not_what_was_made_admits_nothing(
    make: SimpleNamespace, counted: ControllerSettings, change: str
) -> None:
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain(labels=QUEUED))
    settle(world, counted, make)
    decide(world, QuotaKueue(), make)
    obj = workload(world)
    if change == "owner":
        obj = {**obj, "metadata": {**obj["metadata"], "ownerReferences": []}}
    elif change == "requests":
        obj = {**obj, "spec": {**obj["spec"], "podSets": []}}
    else:
        done = {"type": "Finished", "status": "True", "reason": "x", "message": ""}
        status = {**obj["status"], "conditions": [*obj["status"]["conditions"], done]}
        obj = {**obj, "status": status}
    world.put(WORKLOAD, obj)
    settle(world, counted, make)
    assert "delete it" in message(world)
    assert not any(has_objects(world))


# Eviction.


@pytest.mark.parametrize(
    ("why", "requeued"), [("Preempted", "True"), ("ClusterQueueStopped", "False"), ("Deactivated", "False")]
)
def test_an_evicted_one_without_users_is_taken_apart_and_gives_its_quota_back(
    make: SimpleNamespace, counted: ControllerSettings, why: str, requeued: str
) -> None:
    kueue = QuotaKueue(domains=1)
    world = admitted(make, counted, kueue)
    evict(world, kueue, make, reason=why)
    before = workload(world)
    notices = settle(world, counted, make)
    kueue.check_changes(before, workload(world))
    assert not any(has_objects(world))
    assert world.at(COMPUTE_DOMAIN, "team", "job")["metadata"]["finalizers"] == [names.FINALIZER]
    conditions = conditions_of(workload(world))
    assert (conditions["Requeued"]["status"], conditions["Requeued"]["reason"]) == (requeued, why)
    assert conditions["QuotaReserved"]["message"] == "a better one came"
    assert ("Withdrawn", True) in [(notice.reason, notice.warning) for notice in notices]
    assert reason(world) == "WaitingForQuota"


@pytest.mark.parametrize("isolation", list(ImexIsolation))
def test_an_evicted_one_keeps_everything_while_a_pod_has_its_channel(
    make: SimpleNamespace, counted: ControllerSettings, isolation: ImexIsolation
) -> None:
    counted = msgspec.structs.replace(counted, isolation=isolation)
    kueue = QuotaKueue(domains=1)
    world = admitted(make, counted, kueue)
    world.put(RESOURCE_CLAIM, make.claim(UID, pods=("worker-0",), device=("n0", "channel-0")))
    evict(world, kueue, make)
    had = has_objects(world)
    settle(world, counted, make)
    assert has_objects(world) == had
    assert has_condition(workload(world), "QuotaReserved"), "Kueue gives it to nobody else"
    assert "it keeps what it has until pods team/worker-0 end" in message(world)
    # Even its daemons are made again while it has users.
    for obj in world.of(DAEMON_SET):
        del world.objects[DAEMON_SET, obj["metadata"]["namespace"], obj["metadata"]["name"]]
    settle(world, counted, make)
    assert has_objects(world) == had

    del world.objects[RESOURCE_CLAIM, "team", "c"]
    settle(world, counted, make)
    assert not any(has_objects(world))
    assert not world.of(RESOURCE_CLAIM)
    assert not has_condition(workload(world), "QuotaReserved")


def test_a_pod_that_got_a_channel_after_the_template_went_keeps_the_daemons(
    make: SimpleNamespace, counted: ControllerSettings
) -> None:
    kueue = QuotaKueue(domains=1)
    world = admitted(make, counted, kueue)
    evict(world, kueue, make)
    while world.at(RESOURCE_CLAIM_TEMPLATE, "team", "imex-channel-0") is not None:
        decision = reconcile_domain(take_domain_snapshot(world, UID, counted, make.now))
        assert not any(action.kind == DAEMON_SET for action in decision.actions), "the template goes first"
        world.carry_out(decision, UID)
    world.put(RESOURCE_CLAIM, make.claim(UID, pods=("late",), device=("n0", "channel-0")))
    settle(world, counted, make)
    assert all(has_objects(world))
    assert has_condition(workload(world), "QuotaReserved")


def test_quota_goes_back_after_the_last_daemon_has_ended(
    make: SimpleNamespace, counted: ControllerSettings
) -> None:
    kueue = QuotaKueue(domains=1)
    world = make.world()
    started(world, make, counted)
    relabel(world, labels={**world.at(COMPUTE_DOMAIN, "team", "job")["metadata"]["labels"], **QUEUED})
    settle(world, counted, make)
    decide(world, kueue, make)
    settle(world, counted, make)
    evict(world, kueue, make)
    settle(world, counted, make)
    assert not any(has_objects(world))
    assert has_condition(workload(world), "QuotaReserved")
    assert not any(names.COMPUTE_DOMAIN_LABEL in node["metadata"]["labels"] for node in world.of(NODE))
    for pod in world.of(POD):
        del world.objects[POD, "rackloom-imex", pod["metadata"]["name"]]
    settle(world, counted, make)
    assert not has_condition(workload(world), "QuotaReserved")


def test_a_deleted_one_holds_its_quota_until_it_is_gone(
    make: SimpleNamespace, counted: ControllerSettings
) -> None:
    world = admitted(make, counted, QuotaKueue())
    before = workload(world)
    delete(world)
    for _ in range(9):
        world.carry_out(reconcile_domain(take_domain_snapshot(world, UID, counted, make.now)), UID)
    assert not world.of(COMPUTE_DOMAIN)
    assert workload(world) == before, "the garbage collector deletes it with its owner"


class Tenants(RuleBasedStateMachine):
    """Under any acts of tenants and Kueue, a claim template exists for no more domains than have quota."""

    def __init__(self) -> None:
        super().__init__()
        self.world, self.kueue = World(), QuotaKueue(domains=2, spares=3)
        daemon = ImexDaemonSettings(image="rackloom:test")
        self.settings = ControllerSettings(daemon=daemon, quota=QuotaMode.LABELLED)
        self.numbers = itertools.count(1)

    domains = Bundle("domains")

    @rule(target=domains)
    def create(self) -> str:
        number = next(self.numbers)
        obj = compute_domain(f"job{number}", uid=f"cd-{number}", template=f"t{number}", labels=QUEUED)
        self.world.put(COMPUTE_DOMAIN, obj)
        # A domain whose label goes before the controller has seen it is as one that never had it.
        self.reconcile(f"job{number}", 1)
        return f"job{number}"

    def own(self, name: str) -> Object | None:
        return self.world.at(WORKLOAD, "team", workload_name(name.replace("job", "cd-")))

    def exists(self, name: str) -> bool:
        return self.world.at(COMPUTE_DOMAIN, "team", name) is not None

    @rule(name=domains)
    def evict(self, name: str) -> None:
        own = self.own(name)
        if own is not None and has_condition(own, "QuotaReserved"):
            self.world.put(WORKLOAD, self.kueue.evicted(own, NOW))

    @rule(name=domains)
    def use(self, name: str) -> None:
        """A pod gets a channel. Without the claim template it gets no claim."""
        if self.world.at(RESOURCE_CLAIM_TEMPLATE, "team", name.replace("job", "t")) is not None:
            number = next(self.numbers)
            device = (f"n{number}", "channel-0")
            uid = name.replace("job", "cd-")
            self.world.put(RESOURCE_CLAIM, claim(uid, name=f"c{number}", pods=("p",), device=device))

    @rule()
    def end_pods(self) -> None:
        for obj in self.world.of(RESOURCE_CLAIM):
            del self.world.objects[RESOURCE_CLAIM, "team", obj["metadata"]["name"]]

    @rule(name=domains)
    def delete(self, name: str) -> None:
        if self.exists(name):
            delete(self.world, name)

    @rule(name=domains, queue=st.sampled_from(["other", None]), spares=st.sampled_from(["0", "3", "4", "x"]))
    def rewrite(self, name: str, queue: str | None, spares: str) -> None:
        if self.exists(name):
            labels = {} if queue is None else {QUEUE_LABEL: queue}
            relabel(self.world, name, labels=labels, annotations={SPARES_ANNOTATION: spares})

    @rule(name=domains, times=st.integers(1, 8))
    def reconcile(self, name: str, times: int) -> None:
        uid = name.replace("job", "cd-")
        for _ in range(times):
            before = self.own(name)
            self.world.carry_out(
                reconcile_domain(take_domain_snapshot(self.world, uid, self.settings, NOW)), uid
            )
            after = self.own(name)
            if before is not None and after is not None:
                self.kueue.check_changes(before, after)
        if not self.exists(name) and self.own(name) is not None:
            del self.world.objects[WORKLOAD, "team", workload_name(uid)]  # the garbage collector

    @rule()
    def decide(self) -> None:
        for obj in self.world.of(WORKLOAD):
            others = [other for other in self.world.of(WORKLOAD) if other is not obj]
            self.world.put(WORKLOAD, self.kueue.decided(obj, others, NOW))

    @invariant()
    def no_more_run_than_have_quota(self) -> None:
        templates = (
            obj["metadata"]
            for obj in self.world.of(RESOURCE_CLAIM_TEMPLATE)
            if obj["metadata"]["namespace"] == "team"
        )
        running = {workload_name(meta["labels"][names.COMPUTE_DOMAIN_LABEL]) for meta in templates}
        reserved = {
            obj["metadata"]["name"] for obj in self.world.of(WORKLOAD) if has_condition(obj, "QuotaReserved")
        }
        assert running <= reserved
        assert len(reserved) <= 2


Tenants.TestCase.settings = hypothesis.settings(max_examples=40, stateful_step_count=25, deadline=None)
TestTenants = Tenants.TestCase


# Spares.


def test_gangs_may_keep_the_spares_that_have_quota(
    make: SimpleNamespace, counted: ControllerSettings
) -> None:
    world = admitted(make, counted, QuotaKueue(), annotations={SPARES_ANNOTATION: "2"})
    world.put(COMPUTE_DOMAIN, make.domain("waits", uid="cd-2", template="other", labels=QUEUED))
    world.put(COMPUTE_DOMAIN, make.domain("free", uid="cd-3", template="free"))
    domains, workloads = world.of(COMPUTE_DOMAIN), list(map(read_workload, world.of(WORKLOAD)))
    quotas = spare_quotas(domains, workloads, QuotaMode.LABELLED)
    assert quotas is not None
    assert quotas.room("team", ["imex-channel-0", "gpus"]) == 2
    assert quotas.room("team", ["other"]) == 0
    assert quotas.room("team", ["free"]) is None
    assert quotas.room("elsewhere", ["imex-channel-0"]) is None
    everywhere = spare_quotas(domains, workloads, QuotaMode.ALL)
    assert everywhere is not None
    assert [everywhere.room("team", [name]) for name in ("imex-channel-0", "free", "none")] == [2, 0, 0]
    assert spare_quotas(domains, workloads, QuotaMode.NONE) is None


# The controller at work, under virtual time.


async def run_kueue(place: Any, kueue: QuotaKueue) -> None:
    api = DirectApi(place.kube, "kueue")
    seen: dict[str, Object] = {}
    while True:
        items = (await api.list(WORKLOAD)).items
        for obj in items:
            meta = obj["metadata"]
            if meta["uid"] in seen:
                kueue.check_changes(seen[meta["uid"]], obj)
            others = [other for other in items if other["metadata"]["uid"] != meta["uid"]]
            next_ = kueue.decided(obj, others, metav1_time(loop_wall_time()))
            with suppress(Conflict, NotFound):
                if next_ != obj:
                    patch = {
                        "metadata": {"resourceVersion": meta["resourceVersion"]},
                        "status": next_["status"],
                    }
                    obj = await api.patch(WORKLOAD, meta["name"], "team", patch, subresource="status")
                seen[meta["uid"]] = obj
        await asyncio.sleep(0.5)


def serve_workloads(place: Any) -> None:
    lists = {"status.conditions": ("type",), "spec.podSets": ("name",)}
    place.kube.serve(WORKLOAD, TypeSchema(status=True, generation=True, lists=lists))


async def queued(place: Any, name: str) -> None:
    meta = {"name": name, "namespace": "team", "labels": QUEUED}
    spec = {"channel": {"resourceClaimTemplate": {"name": f"channel-{name}"}}}
    await place.user.create(COMPUTE_DOMAIN, {"metadata": meta, "spec": spec})


@pytest.mark.parametrize("seed", range(3))
def test_the_controller_serves_a_queue_through_faults_and_deaths(site: Any, seed: int) -> None:
    async def story() -> None:
        place = site(quota=QuotaMode.ALL, seed=seed)
        serve_workloads(place)
        await place.begin()
        place.tasks.insert(0, asyncio.create_task(run_kueue(place, QuotaKueue(domains=1))))
        place.kube.faults.add(RequestFault(rate=0.1, user="controller", code=503))
        place.kube.faults.add(RequestFault(rate=0.1, user="controller", lost="reply"))
        for name in ("first", "second"):
            await queued(place, name)
            await place.until(lambda name=name: has_reported(place, name, "Admitted", "WaitingForQuota"))
            await place.kill()
            place.start()
        await place.until(lambda: has_reported(place, "first", "Admitted"))
        assert await has_reported(place, "second", "WaitingForQuota")
        templates = (await place.user.list(RESOURCE_CLAIM_TEMPLATE, "team")).items
        assert [obj["metadata"]["name"] for obj in templates] == ["channel-first"]
        await place.user.delete(COMPUTE_DOMAIN, "first", "team")
        await place.until(lambda: is_gone(place, "first"))
        # The garbage collector of a real cluster does this.
        for obj in (await place.user.list(WORKLOAD, "team")).items:
            if obj["metadata"]["ownerReferences"][0]["name"] == "first":
                await place.user.delete(WORKLOAD, obj["metadata"]["name"], "team")
        await place.until(lambda: has_reported(place, "second", "Admitted"))
        await place.end()

    event_loop.run_simulation(seed, story)


async def has_reported(place: Any, name: str, *reasons: str) -> bool:
    condition = (await place.status(name)).condition("QuotaReserved")
    return condition is not None and condition.reason in reasons


async def is_gone(place: Any, name: str) -> bool:
    return all(obj["metadata"]["name"] != name for obj in (await place.user.list(COMPUTE_DOMAIN)).items)


def test_without_the_rights_only_what_names_a_queue_waits(site: Any) -> None:
    async def story() -> None:
        place = site(quota=QuotaMode.LABELLED)
        serve_workloads(place)
        place.kube.faults.add(
            RequestFault(rate=1.0, user="controller", resource=WORKLOAD.plural, code=403, reason="Forbidden")
        )
        await place.begin()
        await place.domain("free")
        await queued(place, "waits")
        await place.until(lambda: fake_site.has_condition(place, "free", "NoNodes"))
        await place.until(lambda: fake_site.has_condition(place, "waits", "ApiRefused"))
        templates = (await place.user.list(RESOURCE_CLAIM_TEMPLATE, "team")).items
        assert [obj["metadata"]["name"] for obj in templates] == ["channel-free"]
        await place.end()

    event_loop.run_simulation(1, story)


def test_without_kueue_only_what_names_a_queue_waits(site: Any) -> None:
    async def story() -> None:
        place = site(quota=QuotaMode.LABELLED)
        await place.begin()
        await place.domain("free")
        await place.until(lambda: fake_site.has_condition(place, "free", "NoNodes"))
        await queued(place, "waits")
        await place.until(lambda: fake_site.has_condition(place, "waits", "WaitingForQuota"))
        await asyncio.sleep(30)
        templates = (await place.user.list(RESOURCE_CLAIM_TEMPLATE, "team")).items
        assert [obj["metadata"]["name"] for obj in templates] == ["channel-free"]
        # Kueue is installed later.
        serve_workloads(place)
        place.tasks.insert(0, asyncio.create_task(run_kueue(place, QuotaKueue())))
        await place.until(lambda: has_reported(place, "waits", "Admitted"), 300)
        await place.end()

    event_loop.run_simulation(1, story)


# A ComputeDomain with running pods that comes to need quota loses nothing.


@pytest.mark.parametrize("has_kueue", [True, False])
def test_certificates_of_running_daemons_are_renewed_while_it_waits(site: Any, has_kueue: bool) -> None:
    async def story() -> None:
        place = site()
        await place.begin()
        made = await place.domain("old")
        await place.until(lambda: fake_site.has_condition(place, "old", "NoNodes"))
        await place.kill()
        secret = names.imex_secret_name(made["metadata"]["uid"])
        (daemons,) = (await place.user.list(DAEMON_SET)).items
        space = daemons["metadata"]["namespace"]
        await place.user.patch(SECRET, secret, space, {"data": {"tls.crt": "bm9uZQ=="}})
        if has_kueue:
            serve_workloads(place)
        place.settings = msgspec.structs.replace(place.settings, quota=QuotaMode.ALL)
        place.start()
        await place.until(lambda: has_reported(place, "old", "KeptWithoutQuota"))
        await asyncio.sleep(5)
        assert (await place.user.get(SECRET, secret, space))["data"]["tls.crt"] != "bm9uZQ=="
        await place.end()

    event_loop.run_simulation(1, story)


def test_upkeep_does_not_wait_for_a_write_that_kueue_may_refuse(
    make: SimpleNamespace, counted: ControllerSettings
) -> None:
    """Writes are sent up to the first that fails."""
    world = make.world()
    started(world, make, counted)
    relabel(world, labels=QUEUED)
    world.delete(POD, next(pod for pod in world.of(POD) if pod["spec"]["nodeName"] == "n0"))
    decision = reconcile_domain(take_domain_snapshot(world, UID, counted, make.now))
    kinds = [action.kind for action in decision.actions]
    assert len(kinds) > 1
    assert kinds.index(WORKLOAD) == len(kinds) - 1


@pytest.mark.parametrize("rounds", range(1, 8))
def test_half_withdrawn_and_then_without_its_workload_nothing_is_stuck(
    make: SimpleNamespace, counted: ControllerSettings, rounds: int
) -> None:
    kueue = QuotaKueue()
    world = admitted(make, counted, kueue)
    evict(world, kueue, make)
    for _ in range(rounds):
        world.carry_out(reconcile_domain(take_domain_snapshot(world, UID, counted, make.now)), UID)
    own = workload(world)
    del world.objects[WORKLOAD, "team", own["metadata"]["name"]]
    settle(world, counted, make)
    for kind in (DAEMON_SET,):
        assert not [obj for obj in world.of(kind) if obj["metadata"].get("deletionTimestamp")]


def test_a_second_compute_domain_of_the_same_template_takes_no_spares_away(
    make: SimpleNamespace, counted: ControllerSettings
) -> None:
    world = admitted(make, counted, QuotaKueue(), annotations={SPARES_ANNOTATION: "2"})
    first = world.at(COMPUTE_DOMAIN, "team", "job")
    template = read_compute_domain(first).template
    second = make.domain("waits", uid="cd-2", template=template, labels=QUEUED)
    workloads = list(map(read_workload, world.of(WORKLOAD)))
    for order in ([first, second], [second, first]):
        quotas = spare_quotas(order, workloads, QuotaMode.LABELLED)
        assert quotas.room("team", [template]) == 2
