"""Gangs share parts of a site, and wait until a cluster offers more. No plan changes."""

from random import Random

from msgspec.structs import replace
from tests.core.cluster.random_clusters import Odds, random_cluster

from rackloom.core.cluster.gang_objects import GANG_GATE, GROUP_LABEL, GangKey
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.objects import GANG_PLAN, NODE, POD, RESOURCE_CLAIM, RESOURCE_SLICE
from rackloom.core.cluster.pods import GANG_LABEL, SIZE_ANNOTATION
from rackloom.core.cluster.reader import ClusterReader
from rackloom.core.gangs.placement import answer_placement
from rackloom.core.gangs.snapshot import ClusterLists, GangObjects, GangSettings, read_record, take_snapshot
from rackloom.core.gangs.trays import SiteCache, follow_lists, offers_more
from rackloom.errors import Refused

KINDS = (NODE, POD, RESOURCE_CLAIM, RESOURCE_SLICE)


def gang(key, members, gpus, spec=None):
    """A gang without a plan. All its pods wait."""
    meta = {"name": key.name, "namespace": key.namespace, "uid": f"{key}", "resourceVersion": "1"}
    plan = {"apiVersion": GANG_PLAN.api_version, "kind": "GangPlan", "metadata": meta, "spec": {}}
    pods = []
    for number in range(members):
        resources = {"limits": {"nvidia.com/gpu": str(gpus)}, "requests": {"cpu": "1"}}
        meta = {
            "name": f"{key.name}-{number}",
            "namespace": key.namespace,
            "uid": f"{key}-{number}",
            "resourceVersion": "1",
            "labels": {GANG_LABEL: key.name, GROUP_LABEL: "w"},
            "annotations": {SIZE_ANNOTATION: f"w={members}"},
        }
        body = {
            "containers": [{"name": "main", "resources": resources}],
            "schedulingGates": [{"name": GANG_GATE}],
            **(spec or {}),
        }
        pods.append({"metadata": meta, "spec": body, "status": {"phase": "Pending"}})
    return take_snapshot(GangObjects(plan=plan, pods=tuple(pods)), key, 0.0)


def answer(snapshot, lists, cache):
    try:
        return answer_placement(replace(snapshot, cluster=lists), GangSettings(), cache).actions
    except Refused as refused:
        return str(refused)


def some_gangs(rng):
    apart = {"labelSelector": {"matchLabels": {"app": "x"}}, "topologyKey": "kubernetes.io/hostname"}
    specs = (
        {},
        {"tolerations": [{"operator": "Exists"}]},
        {"nodeSelector": {"zone": "a"}},
        {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}},
    )
    for number in range(8):
        key = GangKey(rng.choice(("ml", "default", "team")), f"gang-{number}")
        yield gang(key, rng.choice((1, 2, 4)), rng.choice((1, 4)), rng.choice(specs))


def test_gangs_that_share_a_site_get_the_answers_of_gangs_that_come_alone():
    rng, refused, placed = Random(5), 0, 0
    for seed in range(40):
        cluster = random_cluster(seed, Odds())
        reader = ClusterReader(SchedulerLabels())
        state = reader.read(dict(zip(KINDS, cluster[:4], strict=True)))
        lists, cache = follow_lists(ClusterLists(), ClusterLists(state=state)), SiteCache()
        for snapshot in some_gangs(rng):
            found = answer(snapshot, lists, cache)
            assert found == answer(snapshot, lists, SiteCache()), seed
            refused += isinstance(found, str)
            if not isinstance(found, str):
                placed += 1
                # Its plan takes the trays from those that come after it.
                spec = {key: value for key, value in found[0].patch["spec"].items() if key != "trays"}
                meta = {"name": snapshot.key.name, "namespace": snapshot.key.namespace, "uid": snapshot.uid}
                record = read_record({"metadata": meta, "spec": spec})
                lists = replace(lists, records=(*lists.records, record))
    assert min(refused, placed) > 30


def test_a_gang_that_fits_after_a_change_was_offered_more():
    rng, offered, kept, refused = Random(6), 0, 0, 0
    for seed in range(25):
        reader, there = ClusterReader(SchedulerLabels()), []
        for half in range(2):
            objects = dict(zip(KINDS, random_cluster(2 * seed + half, Odds())[:4], strict=True))
            for kind, obj in ((kind, obj) for kind, listed in objects.items() for obj in listed):
                uid = f"{kind.kind}/{obj['metadata'].get('namespace')}/{obj['metadata'].get('name')}"
                there.append((kind, {**obj, "metadata": {**obj["metadata"], "uid": uid}}))
        rng.shuffle(there)
        lists, gangs, present = ClusterLists(), list(some_gangs(rng)), {}
        for number, (kind, obj) in enumerate(there):
            version = {**obj["metadata"], "resourceVersion": str(number)}
            present[kind, version["uid"]] = {**obj, "metadata": version}
            reader.take(kind, present[kind, version["uid"]])
            if rng.random() < 0.3:
                gone = rng.choice(list(present))
                reader.drop(gone[0], present.pop(gone))
            before, lists = lists, follow_lists(lists, ClusterLists(state=reader.state()))
            if offers_more(before, lists):
                offered += 1
                continue
            kept += 1
            for snapshot in rng.sample(gangs, 2):
                if isinstance(answer(snapshot, before, SiteCache()), str):
                    refused += 1
                    assert isinstance(answer(snapshot, lists, SiteCache()), str), (seed, number, kind)
    assert min(offered, kept, refused) > 100
