"""Verdicts on one reading of a cluster: what is planned, what waits, what can never fit."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.cluster.domain_objects import read_compute_domain
from rackloom.core.cluster.gang_objects import GangKey
from rackloom.core.cluster.kueue_objects import KueueWorkload, read_workload
from rackloom.core.cluster.objects import CreateObject, Object
from rackloom.core.cluster.reader import read_state
from rackloom.core.cluster.trays import GangPlan
from rackloom.core.domains.quota import QUEUE_LABEL, domain_quota, spare_quotas
from rackloom.core.domains.settings import QuotaMode
from rackloom.core.gangs.placement import PromisedSpares, spare_room
from rackloom.core.gangs.snapshot import ClusterLists, GangRecord, GangSettings
from rackloom.core.kueue.checks import PlacementPass
from rackloom.core.kueue.plans import Verdict, held_plans, held_seats, planned_spares

CLIQUE, CHECK, GPU = "nvidia.com/gpu.clique", "c", "nvidia.com/gpu"


def node(name: str, clique: str | None, *, gpus: int = 4, **spec: Any) -> Object:
    labels = {"kubernetes.io/hostname": name} | ({CLIQUE: clique} if clique else {})
    conditions = [{"type": "Ready", "status": "True"}]
    status = {"allocatable": {GPU: str(gpus)}, "conditions": conditions}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": status}


def rack(number: int, trays: int) -> list[Object]:
    return [node(f"r{number}-t{tray}", f"c{number}") for tray in range(trays)]


def workload(
    name: str, members: int, gpus: int = 4, *, topology: Object | None = None, retries: int = 0, **pod: Any
) -> KueueWorkload:
    container = {"name": "main", "resources": {"limits": {GPU: str(gpus)} if gpus else {}}}
    meta = pod.pop("metadata", {})
    template = {"metadata": meta, "spec": {"containers": [container], **pod}}
    pod_set: Object = {"name": "main", "count": members, "template": template}
    if topology:
        pod_set["topologyRequest"] = topology
    state = {"name": CHECK, "state": "Pending", "message": "", "retryCount": retries}
    conditions = [{"type": "QuotaReserved", "status": "True"}]
    status = {"admissionChecks": [state], "conditions": conditions}
    identity = {"name": name, "namespace": "team", "uid": name, "resourceVersion": "1"}
    return read_workload({"metadata": identity, "spec": {"podSets": [pod_set]}, "status": status})


def admitted(of: KueueWorkload, verdict: Verdict) -> KueueWorkload:
    """The workload as it is once its verdict is written."""
    state = {"name": CHECK, "state": verdict.state, "podSetUpdates": list(verdict.pod_set_updates)}
    return read_workload({**of.obj, "status": {**of.obj["status"], "admissionChecks": [state]}})


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Objects as the API server has them."""

    nodes: list[Object] = []
    pods: list[Object] = []
    claims: list[Object] = []
    slices: list[Object] = []
    classes: list[Object] = []
    templates: list[Object] = []
    domains: list[Object] = []
    records: tuple[GangRecord, ...] = ()
    taint_rules: list[Object] = []


def pass_on(
    cluster: Cluster,
    *workloads: KueueWorkload,
    settings: GangSettings = GangSettings(),  # noqa: B008 (a frozen value)
    quota: QuotaMode = QuotaMode.NONE,
    before: PlacementPass | None = None,
) -> PlacementPass:
    state = read_state(cluster.nodes, cluster.pods, cluster.claims, cluster.slices)
    lists = ClusterLists(
        state=state,
        slices=tuple(cluster.slices),
        classes=tuple(cluster.classes),
        templates=tuple(cluster.templates),
        taint_rules=tuple(cluster.taint_rules),
        records=cluster.records,
        planned=held_plans(workloads, state.pods),
        spare_quotas=spare_quotas(cluster.domains, workloads, quota),
    )
    return PlacementPass(lists, cluster.domains, (), workloads, [CHECK], settings, before)


def decide(
    cluster: Cluster,
    of: KueueWorkload,
    *others: KueueWorkload,
    settings: GangSettings = GangSettings(),  # noqa: B008 (a frozen value)
) -> Verdict:
    return pass_on(cluster, *others, settings=settings).decide(of, CHECK)


def busy(node: str, namespace: str = "other", gpus: int = 4) -> Object:
    container = {"name": "main", "resources": {"limits": {GPU: str(gpus)}}}
    return {
        "metadata": {"name": f"busy-{node}", "namespace": namespace, "uid": node},
        "spec": {"containers": [container], "nodeName": node},
    }


def test_each_verdict_counts_for_the_next_and_for_a_later_pass() -> None:
    cluster = Cluster(nodes=rack(0, 4))
    first, second = workload("first", 3), workload("second", 2)
    served = pass_on(cluster)
    ready = served.decide(first, CHECK)
    assert ready.state == "Ready"
    assert served.decide(second, CHECK).state == "Retry"
    assert decide(cluster, second, admitted(first, ready)).state == "Retry"
    assert decide(cluster, second).state == "Ready"


def test_a_retry_names_what_is_in_the_way_but_nobody_else() -> None:
    cluster = Cluster(nodes=rack(0, 2), pods=[busy("r0-t0"), busy("r0-t1", "team")])
    verdict = decide(cluster, workload("train", 2))
    assert verdict.state == "Retry"
    assert "has room for 0 of 2 main" in verdict.message
    assert "another job" in verdict.message
    assert "team/pod busy-r0-t1" in verdict.message
    assert "other/" not in verdict.message


@pytest.mark.parametrize(("retries", "seconds"), [(0, 15), (1, 30), (3, 120), (9, 300), (10**6, 300)])
def test_pauses_grow_up_to_a_limit(retries: int, seconds: int) -> None:
    cluster = Cluster(nodes=rack(0, 1), pods=[busy("r0-t0")])
    assert decide(cluster, workload("train", 1, retries=retries)).requeue_after == seconds


@pytest.mark.parametrize(
    ("nodes", "state"),
    [
        (rack(0, 2), "Rejected"),
        ([], "Retry"),
        ([*rack(0, 2), node("new", None)], "Retry"),
        ([*rack(0, 2), node("silent", "c0", gpus=0)], "Retry"),
        ([*rack(0, 2), node("cpu", None, gpus=0)], "Rejected"),
        ([*rack(0, 2), node("off", "c0", unschedulable=True)], "Retry"),
    ],
    ids=["too large", "no nodes", "no clique yet", "no GPUs yet", "beside a CPU node", "cordoned"],
)
def test_only_what_can_never_fit_is_rejected(nodes: list[Object], state: str) -> None:
    assert decide(Cluster(nodes=nodes), workload("train", 3)).state == state


def test_a_rule_that_no_node_meets_may_be_met_later() -> None:
    verdict = decide(Cluster(nodes=rack(0, 2)), workload("train", 2, nodeSelector={"zone": "z"}))
    assert verdict.state == "Retry"
    assert "zone=z" in verdict.message


def test_a_claim_template_may_come_later() -> None:
    claims = [{"name": "gpus", "resourceClaimTemplateName": "none-such"}]
    verdict = decide(Cluster(nodes=rack(0, 2)), workload("train", 1, 0, resourceClaims=claims))
    assert verdict.state == "Retry"
    assert "none-such" in verdict.message


def test_a_job_without_devices_is_let_through() -> None:
    verdict = decide(Cluster(), workload("cpu", 8, 0))
    assert verdict.state == "Ready"
    assert verdict.pod_set_updates == ()


def test_the_workload_of_a_compute_domain_is_let_through() -> None:
    meta = {"name": "d", "namespace": "team", "uid": "u", "labels": {QUEUE_LABEL: "q"}}
    spec = {"channel": {"resourceClaimTemplate": {"name": "channel"}}}
    domain: Object = {"metadata": meta, "spec": spec}
    made = domain_quota(read_compute_domain(domain), None, QuotaMode.LABELLED, "").write
    assert isinstance(made, CreateObject)
    status = workload("like", 1).obj["status"]
    identity = {**made.obj["metadata"], "uid": "w", "resourceVersion": "1"}
    counted = read_workload({**made.obj, "metadata": identity, "status": status})
    verdict = decide(Cluster(nodes=rack(0, 1), domains=[domain]), counted)
    assert (verdict.state, verdict.pod_set_updates) == ("Ready", ())


def test_a_tray_has_one_channel_whatever_its_gpus() -> None:
    domain = {
        "metadata": {"name": "d", "namespace": "team"},
        "spec": {"channel": {"resourceClaimTemplate": {"name": "channel"}}},
    }
    cluster = Cluster(nodes=rack(0, 2), domains=[domain])
    claims = [{"name": "channel", "resourceClaimTemplateName": "channel"}]
    first, second = (workload(name, 1, 1, resourceClaims=claims) for name in ("first", "second"))
    third = workload("third", 1, 1, resourceClaims=claims)
    served = pass_on(cluster)
    assert [served.decide(of, CHECK).state for of in (first, second, third)] == ["Ready", "Ready", "Retry"]
    assert served.decide(workload("counted", 2, 3), CHECK).state == "Ready"


def test_gpus_and_nics_have_to_be_free_on_the_same_tray() -> None:
    def slices(driver: str, *nodes: str) -> list[Object]:
        return [
            {
                "metadata": {"name": f"{name}-{driver}"},
                "spec": {
                    "driver": driver,
                    "nodeName": name,
                    "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
                    "devices": [{"name": f"d{number}"} for number in range(4)],
                },
            }
            for name in nodes
        ]

    drivers = ("gpu.nvidia.com", "dra.net")
    classes = [
        {
            "metadata": {"name": name},
            "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{name}'"}}]},
        }
        for name in drivers
    ]
    requests = [
        {
            "name": f"r{number}",
            "exactly": {"deviceClassName": name, "allocationMode": "ExactCount", "count": 4},
        }
        for number, name in enumerate(drivers)
    ]
    template = {
        "metadata": {"name": "tray", "namespace": "team"},
        "spec": {"spec": {"devices": {"requests": requests}}},
    }
    names = [f"r0-t{tray}" for tray in range(4)]
    cluster = Cluster(
        nodes=[node(name, "c0", gpus=0) for name in names],
        slices=[*slices(drivers[0], *names), *slices(drivers[1], *names[:3])],
        classes=classes,
        templates=[template],
    )
    claims = [{"name": "tray", "resourceClaimTemplateName": "tray"}]
    fits = decide(cluster, workload("three", 3, 0, resourceClaims=claims))
    assert fits.state == "Ready"
    assert "r0-t3" not in str(fits.pod_set_updates)
    assert decide(cluster, workload("four", 4, 0, resourceClaims=claims)).state == "Rejected"


def test_the_trays_of_a_topology_assignment_are_planned_on() -> None:
    cluster = Cluster(nodes=[*rack(0, 3), *rack(1, 3)])
    of = workload("train", 2)
    part = {"domainCount": 2, "valuesPerLevel": [{"individual": {"prefix": "r1-t", "roots": ["0", "2"]}}]}
    topology = {"levels": ["kubernetes.io/hostname"], "slices": [part]}
    admission = {"podSetAssignments": [{"name": "main", "count": 2, "topologyAssignment": topology}]}
    given_ = read_workload({**of.obj, "status": {**of.obj["status"], "admission": admission}})
    updates = admitted(of, decide(cluster, given_)).checks[CHECK].pod_set_updates
    (hold, other) = held_seats(given_.full_name, updates, ())
    assert {hold.tray, other.tray} == {"r1-t0", "r1-t2"}


def test_the_pods_of_a_gang_get_empty_trays_and_their_spares() -> None:
    annotations = {"rackloom.dev/gang-size": "2", "rackloom.dev/gang-spares": "1"}
    meta = {"labels": {"rackloom.dev/gang": "g"}, "annotations": annotations}
    nodes = rack(0, 4)
    assert (
        decide(
            Cluster(nodes=nodes, pods=[busy("r0-t0", gpus=1)]), workload("gang", 2, 4, metadata=meta)
        ).state
        == "Ready"
    )
    two_busy = [busy("r0-t0", gpus=1), busy("r0-t1", gpus=1)]
    assert decide(Cluster(nodes=nodes, pods=two_busy), workload("gang", 2, 4, metadata=meta)).state == "Retry"


def test_spares_that_the_gang_controller_would_refuse_are_not_planned() -> None:
    annotations = {"rackloom.dev/gang-size": "2", "rackloom.dev/gang-spares": "1"}
    meta = {"labels": {"rackloom.dev/gang": "g"}, "annotations": annotations}
    cluster, gang = Cluster(nodes=rack(0, 4)), workload("gang", 2, 4, metadata=meta)
    none = decide(cluster, gang, gang, settings=GangSettings(max_spares=0))
    assert none.state == "Retry"
    assert "it would keep 1 spare trays, and its namespace may keep 0 more" in none.message
    # Where all need quota, only a ComputeDomain has it.
    served = pass_on(cluster, gang, quota=QuotaMode.ALL)
    assert "its ComputeDomains, by their quota, may keep 0 more" in served.decide(gang, CHECK).message
    served = pass_on(cluster, gang, quota=QuotaMode.LABELLED)
    assert served.decide(gang, CHECK).state == "Ready"


def test_spares_of_workloads_whose_gangs_are_still_to_come_count() -> None:
    annotations = {"rackloom.dev/gang-size": "2", "rackloom.dev/gang-spares": "1"}
    first, second = (
        workload(name, 2, metadata={"labels": {"rackloom.dev/gang": name}, "annotations": annotations})
        for name in ("first", "second")
    )
    cluster, settings = Cluster(nodes=rack(0, 8)), GangSettings(max_spares=1)
    served = pass_on(cluster, first, second, settings=settings)
    ready = served.decide(first, CHECK)
    assert ready.state == "Ready"
    refused = served.decide(second, CHECK)
    assert refused.state == "Retry"
    assert "it would keep 1 spare trays, and its namespace may keep 0 more" in refused.message
    # A later pass reads them from the status; a workload without a plan is promised nothing.
    later = pass_on(cluster, admitted(first, ready), second, settings=settings)
    assert later.decide(second, CHECK).state == "Retry"
    assert decide(cluster, second, first, second, settings=settings).state == "Ready"


@pytest.mark.parametrize("wanted", [(("g", 2), ("g", 2), ("g", 2)), (("g", 2), ("g", 1), ("h", 1))])
def test_spares_of_several_workloads_that_name_one_gang_count_together(wanted: Any) -> None:
    workloads = [
        workload(
            str(number),
            2,
            metadata={
                "labels": {"rackloom.dev/gang": gang},
                "annotations": {"rackloom.dev/gang-size": "2", "rackloom.dev/gang-spares": str(spares)},
            },
        )
        for number, (gang, spares) in enumerate(wanted)
    ]
    cluster, settings = Cluster(nodes=rack(0, 18)), GangSettings(max_spares=2)
    for number, waiting in enumerate(workloads):
        verdict = decide(cluster, waiting, *workloads, settings=settings)
        workloads[number] = admitted(waiting, verdict)
    updates = (
        update for each in workloads for check in each.checks.values() for update in check.pod_set_updates
    )
    assert planned_spares(updates) == 2


def test_promised_spares_count_for_the_quota_of_their_compute_domain() -> None:
    spec = {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": "ours"}}}
    meta = {"name": "cd", "namespace": "team", "uid": "u", "labels": {QUEUE_LABEL: "q"}}
    domain = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "ComputeDomain",
        "metadata": {**meta, "annotations": {"rackloom.dev/spare-nodes": "1"}},
        "spec": spec,
    }
    made = domain_quota(read_compute_domain(domain), None, QuotaMode.LABELLED, "").write
    assert isinstance(made, CreateObject)
    conditions = [{"type": type_, "status": "True"} for type_ in ("QuotaReserved", "Admitted")]
    meta = {**made.obj["metadata"], "uid": "w", "resourceVersion": "1"}
    counted = read_workload({**made.obj, "metadata": meta, "status": {"conditions": conditions}})
    quota = spare_quotas([domain], [counted], QuotaMode.LABELLED)
    cluster = ClusterLists(spare_quotas=quota)
    key, ours, theirs = GangKey("team", "mine"), {"ours"}, GangKey("team", "other")
    other = [PromisedSpares(theirs, 1, frozenset(ours))]
    assert spare_room(key, ours, cluster, 9).trays == 1
    assert spare_room(key, ours, cluster, 9, other).trays == 0
    assert spare_room(theirs, ours, cluster, 9, other).trays == 0, "of another workload"
    elsewhere = [PromisedSpares(theirs, 1, frozenset({"theirs"}))]
    assert spare_room(key, ours, cluster, 9, elsewhere).trays == 1
    plan = GangPlan(gang="team/other", seats=(), cliques=(), spares=("a",), price=(), reason="")
    record = GangRecord(key=theirs, uid="", resource_version="", created=0.0, finalizers=(), plan=plan)
    placed = msgspec.structs.replace(cluster, records=(record,))
    assert spare_room(key, set(), placed, 9, elsewhere).trays == 8, "once: its plan or its promise"


def test_a_preferred_topology_that_is_not_had_is_said() -> None:
    verdict = decide(
        Cluster(nodes=[*rack(0, 2), *rack(1, 2)]), workload("wide", 4, topology={"preferred": CLIQUE})
    )
    assert verdict.state == "Ready"
    assert "preferred, so it is spread" in verdict.message
    assert "nodeSelector" not in verdict.pod_set_updates[0]


def tray_with_cpus(cpus: str) -> Object:
    tray = node("r0-t0", "c0")
    return {
        **tray,
        "status": {**tray["status"], "allocatable": {GPU: "4", "cpu": cpus, "memory": "1Ti", "pods": "9"}},
    }


def asking_for_cpus(name: str, cpus: str) -> KueueWorkload:
    resources = {"limits": {GPU: "1"}, "requests": {"cpu": cpus}}
    return workload(name, 1, containers=[{"name": "main", "resources": resources}])


def test_the_cpus_of_members_that_are_still_to_come_count() -> None:
    cluster = Cluster(nodes=[tray_with_cpus("96")])
    first, second, small = (
        asking_for_cpus(name, cpus) for name, cpus in (("first", "60"), ("second", "60"), ("small", "36"))
    )
    served = pass_on(cluster)
    ready = served.decide(first, CHECK)
    assert ready.state == "Ready"
    refused = served.decide(second, CHECK)
    assert refused.state == "Retry"
    assert "36 of the 60 cpu of a member" in refused.message
    assert decide(cluster, second, admitted(first, ready)).state == "Retry"
    assert decide(cluster, small, admitted(first, ready)).state == "Ready"


def test_the_cpus_of_a_member_that_is_bound_count_once() -> None:
    first, second = asking_for_cpus("first", "60"), asking_for_cpus("second", "36")
    ready = decide(Cluster(nodes=[tray_with_cpus("96")]), first)
    update = ready.pod_set_updates[0]
    template = first.pod_sets[0].template["spec"]
    meta = {
        "name": "first-0",
        "namespace": "team",
        "uid": "p",
        **{key: update[key] for key in ("labels", "annotations")},
    }
    pod = {"metadata": meta, "spec": {**template, "nodeName": "r0-t0"}, "status": {"phase": "Running"}}
    cluster = Cluster(nodes=[tray_with_cpus("96")], pods=[pod])
    assert decide(cluster, second, admitted(first, ready)).state == "Ready"


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=6),
)
def test_no_tray_is_promised_twice(cliques: list[int], jobs: list[tuple[int, int]]) -> None:
    """Whoever decides: one pass, or a new one for each workload that reads what the others were promised."""
    cluster = Cluster(nodes=[obj for number, trays in enumerate(cliques) for obj in rack(number, trays)])
    asked = [workload(f"w{number}", members, gpus) for number, (members, gpus) in enumerate(jobs)]
    served, states = pass_on(cluster), list[str]()
    inside: list[KueueWorkload] = []
    for of in asked:
        states.append(served.decide(of, CHECK).state)
        verdict = decide(cluster, of, *inside)
        assert verdict.state == states[-1]
        if verdict.state == "Ready":
            inside.append(admitted(of, verdict))
    used: dict[str, int] = {}
    for of in inside:
        for hold in held_seats(of.full_name, of.checks[CHECK].pod_set_updates, ()):
            used[hold.tray] = used.get(hold.tray, 0) + hold.gpus
    assert all(gpus <= 4 for gpus in used.values())


def with_cpus(found: Object, cpus: int) -> Object:
    allocatable = found["status"]["allocatable"] | {"cpu": str(cpus), "memory": "1Ti", "pods": "99"}
    return {**found, "status": {**found["status"], "allocatable": allocatable}}


def random_cluster(rng: random.Random) -> Cluster:
    """Racks in use in part, with gangs that keep spare trays."""
    cliques = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    nodes = [obj for number, trays in enumerate(cliques) for obj in rack(number, trays)]
    nodes = [with_cpus(obj, rng.choice((16, 64))) for obj in nodes]
    for obj in nodes:
        obj["spec"] = rng.choice(({}, {}, {}, {"unschedulable": True}))
        obj["metadata"]["labels"]["zone"] = rng.choice("ab")
    names = [obj["metadata"]["name"] for obj in nodes]
    in_use = [name for name in names if rng.random() < 0.3]
    pods = [busy(name, rng.choice(("team", "other")), rng.randint(1, 4)) for name in in_use]
    for obj in pods:
        obj["metadata"]["labels"] = {"app": rng.choice("xy")}
    records = []
    for gang in rng.choice(((), ("g",), ("g", "h"))):
        plan = GangPlan(gang=gang, seats=(), cliques=(), spares=(rng.choice(names),), price=(), reason="")
        record = GangRecord(
            key=GangKey("team", gang), uid=gang, resource_version="1", created=0.0, finalizers=(), plan=plan
        )
        records.append(record)
    claims, _ = claiming("gpu.nvidia.com")
    return msgspec.structs.replace(claims, nodes=nodes, pods=pods, records=tuple(records))


def random_workload(rng: random.Random, name: str) -> KueueWorkload:
    """A workload that counts or claims GPUs, with or without rules."""
    members, gpus = rng.randint(1, 6), rng.choice((1, 2, 4, 4))
    more: dict[str, Any] = {}
    match rng.choice(("plain", "plain", "cpus", "gang", "topology", "selector", "apart", "claims")):
        case "cpus":
            resources = {"limits": {GPU: str(gpus)}, "requests": {"cpu": str(rng.choice((3, 10, 40)))}}
            more["containers"] = [{"name": "main", "resources": resources}]
        case "gang":
            annotations = {"rackloom.dev/gang-size": str(members), "rackloom.dev/gang-spares": "1"}
            more["metadata"] = {"labels": {"rackloom.dev/gang": rng.choice("gk")}, "annotations": annotations}
        case "topology":
            more["topology"] = {rng.choice(("required", "preferred")): rng.choice((CLIQUE, "zone"))}
        case "selector":
            more["nodeSelector"] = {"zone": rng.choice("abc")}
        case "apart":
            selector = {"matchLabels": {"app": "x"}}
            term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": selector}
            more["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
        case "claims":
            gpus, more["resourceClaims"] = 0, [{"name": "devices", "resourceClaimTemplateName": "devices"}]
    return workload(name, members, gpus, **more)


@given(st.integers(0, 2**32))
def test_a_pass_decides_as_a_fresh_look_at_the_cluster_does(seed: int) -> None:
    """The site is kept for all workloads of a pass, and for later passes. No verdict or plan differs."""
    rng = random.Random(seed)
    cluster = random_cluster(rng)
    inside = [random_workload(rng, f"w{number}") for number in range(rng.randint(2, 8))]
    served = pass_on(cluster, *inside)
    for number, of in enumerate(inside):
        if number and rng.random() < 0.3:
            # A node changes, and a pod comes or goes.
            nodes = [*cluster.nodes[1:], {**cluster.nodes[0], "spec": {"unschedulable": True}}]
            cluster = msgspec.structs.replace(cluster, nodes=nodes, pods=cluster.pods[1:])
            served = pass_on(cluster, *inside, before=served)
        verdict = served.decide(of, CHECK)
        assert verdict == decide(cluster, of, *inside), of.name
        inside[number] = admitted(of, verdict)


def claiming(driver: str) -> tuple[Cluster, KueueWorkload]:
    """Two trays with four devices of a driver, and a workload that claims all of them."""
    selector = {"cel": {"expression": f"device.driver == '{driver}'"}}
    slices = [
        {
            "metadata": {"name": tray},
            "spec": {
                "driver": driver,
                "nodeName": tray,
                "pool": {"name": tray, "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": f"device-{number}"} for number in range(4)],
            },
        }
        for tray in ("r0-t0", "r0-t1")
    ]
    exactly = {"deviceClassName": driver, "allocationMode": "ExactCount", "count": 4}
    request = {"name": "devices", "exactly": exactly}
    template = {
        "metadata": {"name": "devices", "namespace": "team"},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }
    cluster = Cluster(
        nodes=rack(0, 2),
        slices=slices,
        classes=[{"metadata": {"name": driver}, "spec": {"selectors": [selector]}}],
        templates=[template],
    )
    claims = [{"name": "devices", "resourceClaimTemplateName": "devices"}]
    return cluster, workload("pair", 2, gpus=0, resourceClaims=claims)


def test_a_device_that_a_rule_taints_is_no_room_and_no_reason_for_good() -> None:
    """A rule can be deleted, so what it keeps from a workload is never proof that it can never fit."""
    cluster, pair = claiming("gpu.nvidia.com")
    taint = {"key": "example.com/checked", "effect": "NoSchedule"}
    selected = {"pool": "r0-t1", "device": "device-2"}
    rule = {"metadata": {"name": "bad"}, "spec": {"deviceSelector": selected, "taint": taint}}
    assert decide(cluster, pair).state == "Ready"
    assert decide(msgspec.structs.replace(cluster, taint_rules=[rule]), pair).state == "Retry"


def test_a_claim_with_fields_of_a_later_kubernetes_holds_its_devices() -> None:
    cluster, pair = claiming("nic.example.com")
    held = {"request": "r", "driver": "nic.example.com", "pool": "r0-t1", "device": "device-2", "newer": 1}
    holder = {
        "metadata": {"name": "held", "namespace": "team", "uid": "c"},
        "status": {"allocation": {"devices": {"results": [held]}, "newer": 1}},
    }
    assert decide(cluster, pair).state == "Ready"
    assert decide(msgspec.structs.replace(cluster, claims=[holder]), pair).state == "Retry"
