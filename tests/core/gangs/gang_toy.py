"""A cluster as three dicts, in which decisions about one gang are carried out and checked one by one."""

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress

import msgspec
from msgspec.structs import replace
from tests.core.cluster.views import lists_of

from rackloom.claim.kube.api import Conflict, KubeError
from rackloom.core.cluster import names
from rackloom.core.cluster.gang_objects import (
    GANG_GATE,
    TRAY_ANNOTATION,
    GangKey,
    gang_key_of,
    reserving_plans,
)
from rackloom.core.cluster.gang_owners import OwnerJob
from rackloom.core.cluster.objects import (
    GANG_PLAN,
    NODE,
    POD,
    CreateObject,
    DeleteObject,
    Object,
    metav1_time,
    name_of,
    uid_of,
)
from rackloom.core.cluster.pods import GANG_LABEL, SIZE_ANNOTATION
from rackloom.core.gangs.placement import answer_placement
from rackloom.core.gangs.reconcile import reconcile_gang
from rackloom.core.gangs.snapshot import (
    GangObjects,
    GangSettings,
    read_record,
    take_snapshot,
)
from rackloom.core.gangs.trays import SiteCache, with_reservations
from rackloom.errors import Refused
from rackloom.lab.kube.patches import json_patch, merge_patch

KEY = GangKey("team", "big")
SIZE = 3
TRAYS = [f"r{rack}-t{tray}" for rack in range(2) for tray in range(4)]
SETTINGS = GangSettings(lost_after=60.0, bind_after=30.0)


def objects_by_gang(
    plans: Iterable[Object], pods: Iterable[Object], nodes: Iterable[Object]
) -> dict[GangKey, GangObjects]:
    """The objects of every gang, from lists of the whole cluster."""
    # A gang is known by its GangPlan, by its pods, or by both: one outlives the other at each end.
    plans_by_uid = {uid_of(plan): plan for plan in plans}
    plan_of = {read_record(plan).key: plan for plan in plans_by_uid.values()}
    nodes_by_name = {name_of(node): node for node in nodes}
    pods_of: dict[GangKey, list[Object]] = defaultdict(list)
    reserved: dict[str, list[Object]] = defaultdict(list)
    for pod in pods:
        if (key := gang_key_of(pod)) is not None:
            pods_of[key].append(pod)
    for node in nodes_by_name.values():
        for uid in reserving_plans(node):
            reserved[uid].append(node)
    return {
        key: GangObjects(
            plan=plan_of.get(key),
            pods=tuple(pods_of.get(key, ())),
            nodes=nodes_by_name,
            reserved=reserved,
            plans=plans_by_uid,
        )
        for key in plan_of.keys() | pods_of.keys()
    }


class Toy:
    """A cluster as three dicts. Writes are checked by the rules of the API server and of gangs."""

    def __init__(self):
        self.now = 1_000_000.0
        self.version = 0
        self.plans, self.pods, self.nodes = {}, {}, {}
        self.refusal, self.checked = "", None
        self.counted = SiteCache()
        self.job = self.given_back = 0
        self.held = ()
        self.succeeded = set()
        for name in TRAYS:
            self.put(self.nodes, name, node(name))

    def put(self, where, name, obj):
        self.version += 1
        meta = {"uid": f"uid-{self.version}", **obj["metadata"], "resourceVersion": str(self.version)}
        where[name] = {**obj, "metadata": meta}

    def snapshot(self):
        objects = objects_by_gang(self.plans.values(), self.pods.values(), self.nodes.values())
        snapshot = take_snapshot(objects.get(KEY, GangObjects()), KEY, self.now)
        if snapshot.record is None or snapshot.record.plan is None:
            self.checked = None
        owners = {self.job_uid: OwnerJob(completions=SIZE, parallelism=SIZE, is_indexed=False)}
        return replace(snapshot, refusal=self.refusal, checked=self.checked, owners=owners)

    @property
    def job_uid(self):
        return f"job-{self.job}"

    def one_pass(self, most=None):
        """Runs one pass of the controller. Returns whether anything was left to do."""
        decision = reconcile_gang(self.snapshot(), SETTINGS)
        for action in decision.actions[:most]:
            self.carry_out(action)
        if most is not None:
            self.forget(None)
            return True
        if decision.status is not None and KEY.name in self.plans:
            status = {"status": msgspec.to_builtins(decision.status)}
            self.put(self.plans, KEY.name, merge_patch(self.plans[KEY.name], status))
        changed = bool(decision.actions) or decision.status is not None
        return self.ask() or changed

    def ask(self):
        before = (self.refusal, self.checked)
        self.refusal, snapshot = "", replace(self.snapshot(), refusal="")
        if not reconcile_gang(snapshot, SETTINGS).needs_placement:
            return before[0] != self.refusal
        records = tuple(read_record(plan) for plan in self.plans.values())
        cluster = lists_of(self.nodes.values(), self.pods.values(), settings=SETTINGS, records=records)
        try:
            found = answer_placement(replace(snapshot, cluster=cluster), SETTINGS, self.counted)
        except Refused as refused:
            self.refusal = str(refused)
            return before[0] != self.refusal
        self.checked = found.checked or self.checked
        for action in found.actions:
            self.carry_out(action)
        return True

    def carry_out(self, action):
        where = {GANG_PLAN: self.plans, POD: self.pods, NODE: self.nodes}[action.kind]
        if isinstance(action, CreateObject):
            assert action.obj["metadata"]["name"] not in where
            self.put(where, action.obj["metadata"]["name"], action.obj)
            return
        obj = where.get(action.name)
        if obj is None:
            return
        if isinstance(action, DeleteObject):
            assert action.uid == obj["metadata"]["uid"]
            if where is self.pods:
                self.check_sending_away(obj)
            del where[action.name]
            return
        self.change(where, action, obj)

    def change(self, where, action, obj):
        if isinstance(action.patch, tuple):
            new = json_patch(obj, action.patch)
            self.check_letting_go(new)
        else:
            if action.patch["metadata"]["resourceVersion"] != obj["metadata"]["resourceVersion"]:
                raise Conflict(409, "Conflict", action.name)
            new = merge_patch(obj, action.patch)
            if where is self.plans:
                self.check_seats(read_record(obj).plan, read_record(new).plan)
        self.put(where, action.name, new)

    def check_seats(self, before, after):
        """No slot is released that a pod may need, whether the pod exists or is still to be created."""
        if before is None or after is None or len(after.seats) == len(before.seats):
            return
        self.given_back += 1
        done = [pod for pod in self.pods_of_gang() if is_done(pod) and uid_of_job(pod) == self.job_uid]
        assert len(after.seats) >= SIZE - len(done)
        used = {pod["metadata"]["annotations"][TRAY_ANNOTATION] for pod in self.ungated()}
        assert set(before.trays) & used <= set(after.trays)

    def check_sending_away(self, pod):
        """A pod that stays never loses a seat to one that leaves."""
        tray = pod["metadata"]["annotations"][TRAY_ANNOTATION]
        here = (pod for pod in self.ungated() if pod["metadata"]["annotations"][TRAY_ANNOTATION] == tray)
        staying = [pod for pod in here if "deletionTimestamp" not in pod["metadata"]]
        seats = [seat for seat in read_record(self.plans[KEY.name]).plan.seats if seat.tray == tray]
        assert pod not in staying or len(staying) > len(seats), "it stays, and has its seat"

    def check_letting_go(self, pod):
        record = read_record(self.plans[KEY.name])
        tray = pod["metadata"]["annotations"][TRAY_ANNOTATION]
        assert tray in record.plan.trays
        assert reserving_plans(self.nodes[tray]) == (record.uid,)
        others = [pod for pod in self.ungated() if pod["metadata"]["annotations"][TRAY_ANNOTATION] == tray]
        assert not others, "one seat, one pod"
        if not self.ungated():
            assert all(record.uid in reserving_plans(self.nodes[name]) for name in record.reserved)
            if not self.succeeded:
                assert len([pod for pod in self.pods_of_gang() if not has_ended(pod)]) == SIZE
            assert len(record.plan.seats) >= SIZE - len(self.succeeded)

    def pods_of_gang(self):
        return [pod for pod in self.pods.values() if GANG_LABEL in pod["metadata"].get("labels", {})]

    def ungated(self):
        """The ungated pods that have not ended."""
        pods = (pod for pod in self.pods_of_gang() if not has_ended(pod))
        return [pod for pod in pods if not pod["spec"].get("schedulingGates")]

    # Events that happen to the gang.

    def happen(self, what, about):
        getattr(self, what)(about)

    def pod(self, number):
        name = f"w{number}"
        if name not in self.pods and number not in self.succeeded:
            self.put(self.pods, name, worker(name, self.job_uid))

    def end(self, number):
        self.pods.pop(f"w{number}", None)

    def succeed(self, number):
        pod = self.pods.get(f"w{number}")
        if pod is not None and pod["spec"].get("nodeName"):
            self.put(self.pods, f"w{number}", merge_patch(pod, {"status": {"phase": "Succeeded"}}))
            if uid_of_job(pod) == self.job_uid:
                self.succeeded.add(number)

    def anew(self, _):
        """The job is deleted and created again under its name: pods of the old job are being deleted."""
        self.job += 1
        self.succeeded.clear()
        for pod in self.pods_of_gang():
            going = {"metadata": {"deletionTimestamp": metav1_time(self.now)}}
            self.put(self.pods, pod["metadata"]["name"], merge_patch(pod, going))

    def depart(self, number):
        """A pod is being deleted, and its Job makes another of its rank at once."""
        name = f"w{number}"
        pod = self.pods.pop(name, None)
        if pod is not None:
            going = {"metadata": {"name": f"{name}-going", "deletionTimestamp": metav1_time(self.now)}}
            self.put(self.pods, f"{name}-going", merge_patch(pod, going))
            self.pod(number)

    def stop(self, _):
        """A controller has decided, and is stopped before it writes."""
        self.held = reconcile_gang(self.snapshot(), SETTINGS).actions

    def resume(self, _):
        """It goes on as if nothing had happened, although another has led since."""
        for action in self.held:
            where = {GANG_PLAN: self.plans, POD: self.pods, NODE: self.nodes}[action.kind]
            obj = where.get(action.name)
            with suppress(KubeError):
                if obj is not None and isinstance(action.patch, tuple):
                    self.put(where, action.name, json_patch(obj, action.patch))

    def other(self, tray):
        """A pod that knows of no gangs, on a tray that it may use."""
        if tray in self.nodes and not reserving_plans(self.nodes[tray]) and not self.users(tray):
            meta = {"namespace": "team", "name": f"other-{tray}"}
            self.put(self.pods, meta["name"], {"metadata": meta, "spec": gpus() | {"nodeName": tray}})

    def take(self, tray):
        """The same, decided by a scheduler that has not seen the taint yet."""
        if tray in self.nodes and not self.users(tray) and not self.ungated():
            meta = {"namespace": "team", "name": f"other-{tray}"}
            self.put(self.pods, meta["name"], {"metadata": meta, "spec": gpus() | {"nodeName": tray}})

    def leave(self, tray):
        self.pods.pop(f"other-{tray}", None)

    def users(self, tray):
        pods = (pod for pod in self.pods.values() if not has_ended(pod))
        return [pod for pod in pods if pod["spec"].get("nodeName") == tray]

    def lose(self, tray):
        self.say(tray, "Unknown")

    def come_back(self, tray):
        self.say(tray, "True")

    def say(self, tray, status):
        if tray not in self.nodes:
            if status == "True":
                self.put(self.nodes, tray, node(tray))
            return
        condition = {"type": "Ready", "status": status, "lastTransitionTime": metav1_time(self.now)}
        self.put(self.nodes, tray, merge_patch(self.nodes[tray], {"status": {"conditions": [condition]}}))

    def remove(self, tray):
        self.nodes.pop(tray, None)
        self.pods = {name: pod for name, pod in self.pods.items() if pod["spec"].get("nodeName") != tray}

    def cordon(self, tray):
        if tray in self.nodes:
            self.put(self.nodes, tray, merge_patch(self.nodes[tray], {"spec": {"unschedulable": True}}))

    def open(self, tray):
        if tray in self.nodes:
            self.put(self.nodes, tray, merge_patch(self.nodes[tray], {"spec": {"unschedulable": None}}))

    def wait(self, seconds):
        self.now += seconds

    def forget(self, _):
        """The controller is another one, so the state in memory is gone."""
        self.refusal, self.checked = "", None

    def schedule(self, _):
        """Binds each pod that can be bound."""
        for pod in self.ungated():
            tray = pod["metadata"]["annotations"][TRAY_ANNOTATION]
            host = self.nodes.get(tray)
            if pod["spec"].get("nodeName") or host is None or host["spec"].get("unschedulable"):
                continue
            ready = host["status"]["conditions"][0]["status"] == "True"
            tolerated = {toleration["value"] for toleration in pod["spec"]["tolerations"]}
            if ready and not self.users(tray) and set(reserving_plans(host)) <= tolerated:
                name = pod["metadata"]["name"]
                self.put(self.pods, name, merge_patch(pod, {"spec": {"nodeName": tray}}))

    def settle(self):
        """Lets time pass and the controller work until it has nothing to do."""
        for name in [name for name, pod in self.pods.items() if "deletionTimestamp" in pod["metadata"]]:
            del self.pods[name]
        for _ in range(120):
            for number in range(SIZE):
                self.pod(number)
            self.schedule(None)
            busy = self.one_pass()
            bound = [pod for pod in self.pods_of_gang() if pod["spec"].get("nodeName")]
            if not busy and len(bound) == SIZE:
                return
            self.wait(5.0)
        raise AssertionError(f"does not settle: {self.plans} {self.refusal}")


def node(name):
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2001-01-01T00:00:00Z"}
    meta = {"name": name, "labels": {names.GPU_CLIQUE_LABEL: name.split("-")[0]}}
    return {
        "metadata": meta,
        "spec": {},
        "status": {"allocatable": {"nvidia.com/gpu": "4"}, "conditions": [ready]},
    }


def gpus():
    return {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "4"}}}]}


def has_ended(pod):
    return "status" in pod and pod["status"].get("phase") == "Succeeded"


def is_done(pod):
    return has_ended(pod) and "deletionTimestamp" not in pod["metadata"]


def uid_of_job(pod):
    return pod["metadata"]["ownerReferences"][0]["uid"]


def worker(name, job):
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "big", "uid": job, "controller": True}
    meta = {
        "ownerReferences": [owner],
        "namespace": "team",
        "name": name,
        "labels": {GANG_LABEL: "big"},
        "annotations": {SIZE_ANNOTATION: str(SIZE)},
    }
    return {"metadata": meta, "spec": gpus() | {"schedulingGates": [{"name": GANG_GATE}]}}


def read_site(cluster, records=()):
    """The trays, with the holds of running pods, of their claims, and of recorded plans."""
    return with_reservations(cluster.running, records)
