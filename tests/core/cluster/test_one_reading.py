"""Every reader of a cluster states the same facts, and they are the facts of the cluster.

The readers are `rackloom place`, the gang controller, Kueue's check, the topology of Slurm, the snapshot of
the doctor and the rack map, and the autoscaler's template of a node. `random_clusters` makes the clusters and
knows their facts.
"""

import asyncio
import json
from collections import Counter, defaultdict
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from tests.core.cluster.random_clusters import DRIVER, PLAIN, Cluster, Odds, random_cluster

from rackloom.app.snapshot.cluster import read_cluster
from rackloom.claim.kube.api import ObjectList
from rackloom.claim.manifests.documents import SITE_KINDS, parse_documents
from rackloom.core.allocate.node_template import template_of_slices, whole_gpus
from rackloom.core.allocate.objects import ResourceSlice, convert_object
from rackloom.core.cluster import reader
from rackloom.core.cluster.claims import held_devices
from rackloom.core.cluster.gang_objects import constraints_of_bound, read_member
from rackloom.core.cluster.jobs import Job, owner_of_job
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.nodes import NodeGpus, gpus_by_node
from rackloom.core.cluster.objects import (
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_SLICE,
    ResourceKind,
    full_name,
)
from rackloom.core.cluster.pods import REQUIRED, is_bound_pod, pod_owner, read_pod
from rackloom.core.cluster.projection import project_for_control, project_object
from rackloom.core.cluster.reader import ClusterReader, read_state
from rackloom.core.cluster.state import HIGHEST_PRIORITY, ClusterState
from rackloom.core.cluster.trays import Gang, GangGroup, PlacementSite, placement_site
from rackloom.core.gangs.snapshot import ClusterLists
from rackloom.core.gangs.trays import follow_lists, running_site
from rackloom.core.place.gang_planner import NodeUse, try_gang
from rackloom.core.place.mobility import restrict_moves
from rackloom.core.place.search.tray_assignment import SearchBudget
from rackloom.core.place.slurm_topology import topology_of_nodes
from rackloom.errors import Refused

LABELS = SchedulerLabels()
KINDS = (NODE, POD, RESOURCE_CLAIM, RESOURCE_SLICE)
PARTS, SAMPLE, MANY = 8, 240, 20_000
GOLDEN = Path(__file__).parent / "plain_placements.json"


def state_of(cluster: Cluster) -> ClusterState:
    return read_state(cluster.nodes, cluster.pods, cluster.claims, cluster.slices, LABELS)


def owner_text(key: str) -> str:
    """The owner of a hold as messages name it."""
    namespace, _, name = key.partition("/")
    kind, _, bare = name.partition(" ")
    if kind == "gang":
        name = f"gang {bare}"
    elif kind in ("Pod", "claim"):
        name = f"{kind.lower()} {bare}"
    return name if namespace == "default" else f"{namespace}/{name}"


def held(site: PlacementSite, node: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for hold in site.holds:
        if hold.tray == node and hold.gpus:
            found[hold.owner] += hold.gpus
    return found


def check_site(cluster: Cluster, site: PlacementSite, *, counted: bool, claimed: bool, taints: bool) -> None:
    trays = {tray.name: tray for tray in site.trays}
    for name, facts in cluster.facts.items():
        if f"Node {name}" in cluster.unreadable:
            assert name not in trays
            continue
        tray = trays[name]
        by_plugin = facts.by_plugin or facts.by_claim
        expected = by_plugin if counted else facts.by_claim if claimed else max(by_plugin, facts.by_claim)
        assert tray.gpus == expected, name
        assert tray.clique == facts.clique, name
        is_open = not facts.cordoned and facts.ready and not (taints and facts.taints)
        assert (tray.shut is None) == is_open, (name, tray.shut)
        wanted = {owner_text(owner): gpus for owner, gpus in cluster.held.get(name, {}).items()}
        assert held(site, name) == wanted, name
        channels = {hold.owner for hold in site.holds if hold.tray == name and hold.channel}
        assert channels == {owner_text(owner) for owner in cluster.channels.get(name, ())}, name


def check_cluster(seed: int, odds: Odds) -> None:
    cluster = random_cluster(seed, odds)
    state = state_of(cluster)
    assert {unreadable.title for unreadable in state.unreadable} == cluster.unreadable, seed
    # `rackloom place` and Kueue's check, for jobs that count GPUs and for jobs that claim them.
    for counted, claimed in ((True, False), (False, True), (False, False)):
        site = placement_site(state, counted=counted, claimed=claimed)
        check_site(cluster, site, counted=counted, claimed=claimed, taints=True)
    # The gang controller: trays with GPUs alone, and taints by the terms of each gang.
    with_gpus = {name for name, gpus in state.gpus.items() if gpus != NodeGpus(0, 0)}
    whole = placement_site(state, tolerations=None)
    check_site(cluster, whole, counted=False, claimed=False, taints=False)
    running = running_site(state)
    assert {tray.name for tray in running.trays} == with_gpus
    assert all(tray in whole.trays for tray in running.trays)
    assert [hold for hold in whole.holds if hold.tray in with_gpus] == list(running.holds)
    # The amounts beside GPUs count the same pods.
    use = NodeUse(state)
    for name in cluster.facts:
        left = use.left(name)
        if left is not None:
            pods = sum(pod.node == name for pod in filter(is_bound_pod, state.pods))
            assert left["pods"] == (110 - pods) * 1000, name
    # Slurm: the blocks are the cliques.
    blocks: dict[str, set[str]] = defaultdict(set)
    for name, facts in cluster.facts.items():
        if facts.clique is not None and f"Node {name}" not in cluster.unreadable and name in with_gpus:
            blocks[facts.clique.replace(".", "-")].add(name)
    if any(title.startswith("Node ") for title in cluster.unreadable):
        # Slurm keeps its topology: a node that is left out would lose its jobs.
        with pytest.raises(Refused, match="is left out"):
            topology_of_nodes(cluster.nodes)
        return
    found = topology_of_nodes(cluster.nodes)
    named = {block: set(nodes) & with_gpus for block, nodes in found.blocks.items()}
    assert {block: nodes for block, nodes in named.items() if nodes} == blocks, seed


class Lists:
    """A server that lists these objects."""

    def __init__(self, items: dict[ResourceKind, list[dict[str, Any]]]) -> None:
        self.items = items

    async def list(self, kind: ResourceKind) -> ObjectList:
        return ObjectList(items=tuple(self.items.get(kind, ())), resource_version="1")


def check_snapshot(seed: int, odds: Odds) -> None:
    """The doctor and the rack map."""
    cluster = random_cluster(seed, odds)
    found, state = asyncio.run(read_cluster(Lists(lists_of(cluster)))), state_of(cluster)
    named = {problem.partition(" is left out")[0] for problem in found.problem.split("; ") if problem}
    assert len(cluster.unreadable) > 16 or named == cluster.unreadable, seed
    assert [node.name for node in found.nodes] == sorted(node.name for node in state.nodes), seed
    for node in found.nodes:
        facts = cluster.facts[node.name]
        assert node.clique == facts.clique, (seed, node)
        assert (node.ready is True, node.unschedulable) == (facts.ready, facts.cordoned), (seed, node)
        blocking = {taint.split("=")[0].split(":")[0] for taint in node.taints if "Prefer" not in taint}
        assert blocking == facts.taints, (seed, node)
    assert {(d.pool, d.name) for d in found.devices if d.driver == DRIVER} == state.published.keys(), seed
    cluster_gpus = Counter({name: facts.by_claim for name, facts in cluster.facts.items()})
    gpus = Counter(device.node for device in found.devices if device.kind == "gpu")
    assert gpus == gpus_by_node(state.published) == cluster_gpus, seed
    uses = Counter(
        (full_name(claim), held.driver, held.pool, held.device)
        for claim in state.claims
        for held in held_devices(claim)
    )
    assert Counter((use.claim, *use.device_id) for use in found.uses) == uses, seed
    # The map keeps only a part of each object, and shows the same.
    kept = {
        kind: [part for obj in objects if (part := project_object(kind, obj))]
        for kind, objects in lists_of(cluster).items()
    }
    assert asyncio.run(read_cluster(Lists(kept))) == found, seed
    # The autoscaler's view of a new node like each of these. Its command refuses files that cannot be read.
    slices = [] if cluster.unreadable else [convert_object(obj, ResourceSlice) for obj in cluster.slices]
    for name in {slice_.spec.node_name for slice_ in slices} - {None}:
        template = template_of_slices(slices, name, "group")
        assert whole_gpus(template, DRIVER) == cluster.facts[name].by_claim, seed


@pytest.mark.parametrize("part", range(PARTS))
def test_all_readers_state_the_facts(part: int) -> None:
    for seed in range(part, SAMPLE, PARTS):
        check_cluster(seed, Odds())
        check_snapshot(seed, Odds())


@pytest.mark.parametrize("part", range(PARTS))
def test_a_broken_object_is_named_and_changes_nothing_else(part: int) -> None:
    for seed in range(part, SAMPLE, PARTS):
        check_cluster(seed, Odds(broken=0.05))
        check_snapshot(seed, Odds(broken=0.05))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_the_same_of_many_clusters(part: int) -> None:
    for seed in range(SAMPLE + part, MANY, PARTS):
        # Half of them have broken objects.
        odds = Odds(broken=0.01 * (seed // PARTS % 2))
        check_cluster(seed, odds)
        check_snapshot(seed, odds)


def seats(site: PlacementSite, gang: Gang) -> list[str] | None:
    plan = try_gang(site, gang, SearchBudget())
    return None if plan is None else [seat.tray for seat in plan.seats]


def plans(seed: int) -> list[list[str] | None]:
    """The trays of two gangs on a plain cluster: by whole trays, and by counted GPUs."""
    state, members = state_of(random_cluster(seed, PLAIN)), 1 + seed % 4
    site = placement_site(state)
    ordered = sorted((tray for tray in site.trays if tray.gpus), key=lambda t: (t.clique or "", t.name))
    site = PlacementSite(tuple(ordered), site.holds)
    whole = Gang(name="ml/x", groups=(GangGroup(name="w", members=members, gpus=4),), exclusive=True)
    assert seats(site, whole) == seats(running_site(state), whole)
    part = Gang(name="ml/x", groups=(GangGroup(name="w", members=members, gpus=1 + seed % 2),))
    return [seats(site, whole), seats(site, part)]


def test_placements_are_those_of_the_readers_before_where_these_agreed() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert len(golden) == 2000
    for seed, expected in enumerate(golden):
        found = plans(seed)
        shown = "" if found == [None, None] else sha256(json.dumps(found).encode()).hexdigest()[:8]
        assert shown == expected, seed


def lists_of(cluster: Cluster) -> dict[ResourceKind, list[dict[str, Any]]]:
    return dict(zip(KINDS, cluster[:4], strict=True))


def test_the_memory_of_a_reader_changes_nothing() -> None:
    follower = ClusterReader(LABELS)
    for seed in range(200):
        # One cluster follows another, and objects of the same UID have new versions.
        cluster = random_cluster(seed, Odds(broken=0.05))
        for listed in lists_of(cluster).values():
            for obj in listed:
                obj["metadata"]["resourceVersion"] = f"{seed}-{obj['metadata'].get('resourceVersion')}"
        anew = state_of(cluster)
        for _ in range(2):
            again = follower.read(lists_of(cluster))
            assert again == anew, seed


def test_a_cluster_is_followed_object_by_object() -> None:
    rng, known = Random(7), 0
    for seed in range(60):
        follower, there = ClusterReader(LABELS), dict[tuple[ResourceKind, str], dict[str, Any]]()
        # The objects of two clusters come, change into each other and go, in any order.
        changes = [
            (kind, obj)
            for half in range(2)
            for kind, listed in lists_of(random_cluster(2 * seed + half, Odds(broken=0.05))).items()
            for obj in listed
        ]
        rng.shuffle(changes)
        for number, (kind, obj) in enumerate(changes):
            # A server has one object of a name.
            uid = f"{kind.kind}/{obj['metadata'].get('namespace')}/{obj['metadata'].get('name')}"
            for user in (obj.get("status") or {}).get("reservedFor") or ():
                user["uid"] = f"Pod/{obj['metadata'].get('namespace')}/{user.get('name')}"
            obj = {**obj, "metadata": {**obj["metadata"], "uid": uid, "resourceVersion": str(number)}}
            candidates = [key for key in there if key[0] == kind]
            if candidates and rng.random() < 0.3:
                gone = rng.choice(candidates)
                follower.drop(kind, there.pop(gone))
            there.pop((kind, uid), None)
            there[kind, uid] = obj
            follower.take(kind, obj)
            if rng.random() < 0.2:
                follower.state()
        found = follower.state()
        lists = ([obj for (other, _), obj in there.items() if other is kind] for kind in KINDS)
        anew = read_state(*lists, LABELS)
        assert (found.gpus, found.published) == (anew.gpus, anew.published), seed
        assert found.nodes == anew.nodes, seed
        assert found.pods == anew.pods, seed
        assert (found.claims, found.holders) == (anew.claims, anew.holders), seed
        assert Counter(found.holds) == Counter(anew.holds), seed
        for (kind, _), obj in there.items():
            follower.drop(kind, obj)
        nothing = follower.state()
        assert nothing == ClusterState(labels=LABELS)
        # It keeps nothing of objects that are gone either.
        kept = {name: value for name, value in vars(follower).items() if isinstance(value, dict)}
        del kept["_kinds"]
        assert not any(kept.values()), kept
        known += sum(hold.priority != HIGHEST_PRIORITY for hold in found.holds)
        assert Counter(found.unreadable) == Counter(anew.unreadable), seed
    assert known > 25, "claims whose pods are known"


def test_a_dump_has_the_facts_of_its_objects() -> None:
    """`rackloom place` decodes nodes and pods of a dump straight into values, without unread fields."""
    bulk = {"env": [{"name": "E", "value": "v"}], "image": "i", "volumeMounts": [{"name": "v"}]}
    decoded = 0
    for seed in range(60):
        cluster = random_cluster(seed, Odds(broken=0.1))
        whole = state_of(cluster)
        for obj in (*cluster.pods, *cluster.nodes):
            spec = obj.get("spec")
            containers = spec.get("containers") if isinstance(spec, dict) else None
            for container in containers if isinstance(containers, list) else ():
                if isinstance(container, dict):
                    container.update(bulk)
        items = [{**obj, "kind": kind.kind} for kind, listed in lists_of(cluster).items() for obj in listed]
        dump = json.dumps({"kind": "List", "items": items})
        found: dict[str, list[Any]] = defaultdict(list)
        for document in parse_documents(dump, "dump", SITE_KINDS):
            found[document.value["kind"]].append(document.decoded or document.value)
            decoded += document.decoded is not None
            assert "image" not in str(document.decoded)
        state = read_state(*(found[kind.kind] for kind in KINDS), LABELS)
        named = {unreadable.title: unreadable.reason for unreadable in whole.unreadable}
        assert {unreadable.title: unreadable.reason for unreadable in state.unreadable} == named, seed
        unnamed = {"unreadable": (), "claims": ()}
        assert replace(state, **unnamed) == replace(whole, **unnamed), seed
    assert decoded > 400


def test_a_rule_that_is_newer_than_this_program_is_no_weaker_rule() -> None:
    """The pod holds its GPUs, and its job is not moved because its possible places are unknown."""
    term = {"matchLabels": {"zone": "b"}}
    affinity = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term]}}}
    container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    meta = {"name": "p", "labels": {LABELS.movable: "true"}}
    pod = {"metadata": meta, "spec": {"nodeName": "n", "containers": [container], "affinity": affinity}}
    state = read_state(pods=[pod])
    (hold,) = state.holds
    assert (hold.gpus, hold.movable, state.unreadable) == (1, True, ())
    assert [hold.movable for hold in restrict_moves(state)] == [False]
    affinity["nodeAffinity"][REQUIRED]["nodeSelectorTerms"] = [{"matchExpressions": [{"key": 3}]}]
    (unreadable,) = read_state(pods=[pod]).unreadable
    path = f"spec.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[0].matchExpressions[0].key"
    assert f"its shape: {path}: expected text, got a whole number" in unreadable.reason


def test_controllers_read_the_same_facts_from_what_they_keep() -> None:
    """The gang controller, and Kueue's check, keep only a part of each object."""
    bulk = {"env": [{"name": "E", "value": "v"}], "image": "i", "volumeMounts": [{"name": "v"}]}
    for seed in range(SAMPLE):
        cluster = random_cluster(seed, Odds(broken=0.05 * (seed % 2)))
        for obj in (*cluster.pods, *cluster.nodes):
            spec = obj.get("spec")
            containers = spec.get("containers") if isinstance(spec, dict) else None
            for container in containers if isinstance(containers, list) else ():
                if isinstance(container, dict):
                    container.update(bulk)
            obj["metadata"]["managedFields"] = [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}]
        kept = {
            kind: [project_for_control(kind, obj) for obj in objects]
            for kind, objects in lists_of(cluster).items()
        }
        whole, lighter = state_of(cluster), read_state(*kept.values(), LABELS)
        facts = ("gpus", "published", "holds", "holders", "unreadable")
        for fact in facts:
            assert getattr(lighter, fact) == getattr(whole, fact), (seed, fact)
        assert running_site(lighter) == running_site(whole), seed
        assert placement_site(lighter) == placement_site(whole), seed
        uses = NodeUse(lighter), NodeUse(whole)
        for name in cluster.facts:
            assert uses[0].left(name) == uses[1].left(name), (seed, name)
        bounds = [constraints_of_bound(state.pods, all_pods=True) for state in (lighter, whole)]
        assert bounds[0] == bounds[1], seed
        bad = {unreadable.title for unreadable in whole.unreadable}
        for pod, part in zip(cluster.pods, kept[POD], strict=True):
            if f"Pod {full_name(pod)}" not in bad:
                assert read_member(part).node_rules == read_member(pod).node_rules
                assert read_member(part) == read_member(pod), seed
                assert '"image"' not in json.dumps(part)
        # A projection of a projection is the same.
        for kind, objects in kept.items():
            assert [project_for_control(kind, obj) for obj in objects] == objects, seed


def test_equal_parts_of_objects_are_kept_once() -> None:
    pods = [project_for_control(POD, pod) for pod in random_cluster(3, PLAIN).pods for _ in range(2)]
    assert pods[0]["spec"]["containers"] is pods[1]["spec"]["containers"]
    assert pods[0]["metadata"]["labels"] is pods[1]["metadata"]["labels"]


def test_the_sites_of_a_cluster_that_is_followed_are_those_of_a_new_reading() -> None:
    rng = Random(11)
    for seed in range(60):
        follower, lists = ClusterReader(LABELS), ClusterLists()
        for half in range(2):
            objects = [
                (kind, obj)
                for kind, listed in lists_of(random_cluster(2 * seed + half, Odds(broken=0.05))).items()
                for obj in listed
            ]
            rng.shuffle(objects)
            for number, (kind, obj) in enumerate(objects):
                uid = f"{kind.kind}/{obj['metadata'].get('namespace')}/{obj['metadata'].get('name')}"
                meta = {**obj["metadata"], "uid": uid, "resourceVersion": str(number)}
                follower.take(kind, {**obj, "metadata": meta})
                if rng.random() < 0.1:
                    lists = follow_lists(lists, ClusterLists(state=follower.state()))
                    for name in lists.state.gpus:
                        lists.use.left(name)
        state = follower.state()
        lists = follow_lists(lists, ClusterLists(state=state))
        assert lists.running == running_site(state), seed
        assert follow_lists(lists, ClusterLists(state=follower.state())) is lists
        for name in state.gpus:
            assert lists.use.left(name) == NodeUse(state).left(name), (seed, name)


def test_a_change_costs_the_object_that_it_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, read = random_cluster(3), []
    everything = ClusterReader(LABELS)
    before = everything.read(lists_of(cluster))
    check = reader.check_shape

    def checked(obj: dict[str, Any], *rest: Any) -> Any:
        read.append(obj)
        return check(obj, *rest)

    monkeypatch.setattr(reader, "check_shape", checked)
    pod = {**cluster.pods[0], "metadata": {**cluster.pods[0]["metadata"], "resourceVersion": "new"}}
    everything.take(POD, pod)
    after = everything.state()
    assert read == [pod]
    assert (after.nodes, after.published, after.gpus) == (before.nodes, before.published, before.gpus)
    assert after.nodes is before.nodes
    assert after.published is before.published
    assert everything.state() is after


@pytest.mark.parametrize(
    ("job", "pod"),
    [
        ({"apiVersion": "batch/v1", "kind": "Job"}, {"labels": {"batch.kubernetes.io/job-name": "x"}}),
        (
            {"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job"},
            {"labels": {"volcano.sh/job-name": "x"}},
        ),
        (
            {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob"},
            {"labels": {"training.kubeflow.org/job-name": "x"}},
        ),
        ({"apiVersion": "ray.io/v1", "kind": "RayCluster"}, {"labels": {"ray.io/cluster": "x"}}),
        (
            {"apiVersion": "apps/v1", "kind": "StatefulSet"},
            {"ownerReferences": [{"kind": "StatefulSet", "name": "x", "controller": True}]},
        ),
    ],
    ids=["Job", "Volcano", "MPIJob", "RayCluster", "StatefulSet"],
)
def test_the_pods_of_a_job_are_its_own(job: dict[str, Any], pod: dict[str, Any]) -> None:
    meta = {"name": "x", "namespace": "ml"}
    read = Job(name="ml/x", kind=job["kind"], groups=(), objects=({**job, "metadata": meta},))
    made = {"metadata": {"name": "x-0", "namespace": "ml", **pod}}
    assert owner_of_job(read, LABELS.gang) == pod_owner(read_pod(made), LABELS.gang)


def test_amounts_of_kubernetes_own_resources_may_be_parts() -> None:
    node = {"metadata": {"name": "n"}, "status": {"allocatable": {"kubernetes.io/batch-cpu": "500m"}}}
    assert read_state([node]).unreadable == ()
    node["status"]["allocatable"] = {"example.com/card": "500m"}
    assert [str(found) for found in read_state([node]).unreadable] == [
        "Node n is left out: example.com/card is '500m', and not a whole number"
    ]
