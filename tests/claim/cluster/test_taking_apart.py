"""One ComputeDomain that is deleted: the order of its objects, their blockers, and leftovers."""

from tests.claim.cluster.one_domain import UID, delete, settle, started, status_of

from rackloom.core.cluster import names
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    DAEMON_SET,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
)
from rackloom.core.domains.observe import take_domain_snapshot
from rackloom.core.domains.reconcile import reconcile_domain


def test_deletion_takes_everything_and_only_what_is_ours(make, settings):
    world = make.world()
    started(world, make, settings)
    world.put(NODE, make.node("n9", "cd-other"))
    delete(world)
    settle(world, settings, make)
    assert not world.of(COMPUTE_DOMAIN)
    assert not world.of(RESOURCE_CLAIM_TEMPLATE)
    assert not world.of(DAEMON_SET)
    labels = {node["metadata"]["name"]: node["metadata"]["labels"] for node in world.of(NODE)}
    assert {name for name, found in labels.items() if names.COMPUTE_DOMAIN_LABEL in found} == {"n9"}


def all_actions(world, settings, make):
    """All actions until nothing is left, in order."""
    done = []
    while (decision := reconcile_domain(take_domain_snapshot(world, UID, settings, make.now))).actions:
        done += [action.what for action in decision.actions]
        world.carry_out(decision, UID)
    return done


def test_the_order_of_making_and_of_taking_apart(make, settings):
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain())
    daemon = "rackloom-imex/computedomain-daemon-cd-1"
    workload = "ResourceClaimTemplate team/imex-channel-0"
    assert all_actions(world, settings, make) == [
        "change ComputeDomain team/job",
        f"create ResourceClaimTemplate {daemon}",
        f"create NetworkPolicy {daemon}",
        f"create DaemonSet {daemon}",
        f"create {workload}",
    ]
    world.put(NODE, make.node("n0", UID))
    delete(world)
    assert all_actions(world, settings, make) == [
        f"delete {workload}",
        f"delete ResourceClaimTemplate {daemon}",
        f"delete NetworkPolicy {daemon}",
        f"delete DaemonSet {daemon}",
        "change Node n0",
        f"change {workload}",
        f"change ResourceClaimTemplate {daemon}",
        f"change NetworkPolicy {daemon}",
        f"change DaemonSet {daemon}",
        "change ComputeDomain team/job",
    ]


def test_deletion_waits_for_running_pods_and_names_them(make, settings):
    world = make.world()
    started(world, make, settings)
    used = world.put(RESOURCE_CLAIM, make.claim(UID, pods=("worker-0",), device=("n0", "channel-0")))
    delete(world)
    notices = settle(world, settings, make)
    progressing = status_of(world).condition("Progressing")
    assert progressing.reason == "DeletionHeld"
    assert "team/worker-0" in progressing.message
    assert names.ALLOW_DELETION_ANNOTATION in progressing.message
    assert [notice.reason for notice in notices] == ["DeletionHeld"]
    assert world.of(DAEMON_SET)
    world.put(RESOURCE_CLAIM, {**used, "status": {}})
    settle(world, settings, make)
    assert not world.of(COMPUTE_DOMAIN)


def test_the_annotation_allows_deletion_under_load(make, settings):
    world = make.world()
    started(world, make, settings)
    world.put(RESOURCE_CLAIM, make.claim(UID, pods=("worker-0",), device=("n0", "channel-0")))
    held = world.at(COMPUTE_DOMAIN, "team", "job")
    held["metadata"]["annotations"] = {names.ALLOW_DELETION_ANNOTATION: "true"}
    delete(world)
    settle(world, settings, make)
    assert not world.of(COMPUTE_DOMAIN)


def test_a_claim_made_after_the_deletion_holds_nothing_back(make, settings):
    world = make.world()
    started(world, make, settings)
    late = make.claim(UID, pods=("worker-0",), device=("n0", "channel-0"))
    late["metadata"]["creationTimestamp"] = "2026-01-01T00:00:01Z"
    delete(world)
    world.put(RESOURCE_CLAIM, late)
    settle(world, settings, make)
    assert not world.of(COMPUTE_DOMAIN)


def test_what_others_label_with_the_uid_is_not_ours(make, settings):
    """It keeps no domain from Ready as a duplicate, and is not ours to delete, which policies refuse."""
    world = make.world()
    world.put(COMPUTE_DOMAIN, make.domain())
    labels = {names.COMPUTE_DOMAIN_LABEL: UID}
    theirs = [
        world.put(kind, {"metadata": {"namespace": namespace, "name": name, "labels": {**labels, **more}}})
        for kind, namespace, name, more in (
            (RESOURCE_CLAIM_TEMPLATE, "rivals", "work", {names.TARGET_LABEL: names.TARGET_WORKLOAD}),
            (RESOURCE_CLAIM_TEMPLATE, "rivals", "daemon", {names.TARGET_LABEL: names.TARGET_DAEMON}),
            (RESOURCE_CLAIM, "rivals", names.shared_claim_name(UID), {}),
            (RESOURCE_CLAIM, "team", "mine", {}),
        )
    ]
    settle(world, settings, make)
    assert status_of(world).condition("Degraded").status == "False"
    delete(world)
    settle(world, settings, make)
    assert not world.of(COMPUTE_DOMAIN)
    left = [*world.of(RESOURCE_CLAIM_TEMPLATE), *world.of(RESOURCE_CLAIM)]
    assert {obj["metadata"]["uid"] for obj in left} == {their["metadata"]["uid"] for their in theirs}


def test_things_that_outlived_their_domain_are_taken_apart(make, settings):
    world = make.world()
    started(world, make, settings)
    del world.objects[(COMPUTE_DOMAIN, "team", "job")]
    for name in ("n0", "n1"):
        world.delete(POD, world.at(POD, "rackloom-imex", f"daemon-cd-1-{name}"))
    settle(world, settings, make)
    assert [obj for key, obj in world.objects.items() if key[0] is not NODE] == []
    assert all(names.COMPUTE_DOMAIN_LABEL not in node["metadata"]["labels"] for node in world.of(NODE))
