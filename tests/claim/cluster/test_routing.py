"""A change wakes the keys that it concerns now or concerned before, and no others."""

from rackloom.claim.cluster.domain_caches import ChangeRouter, CliqueKey, DomainKey
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
)


def changed(world, router, kind, obj):
    return router.keys(kind, world.put(kind, obj))


def test_a_heartbeat_wakes_nobody(make):
    world = make.world()
    router = ChangeRouter(world)
    first = changed(world, router, NODE, make.node("n0", "cd-1"))
    assert first == {DomainKey("cd-1"), CliqueKey(make.clique)}
    beat = make.node("n0", "cd-1")
    beat["status"]["conditions"][0]["lastHeartbeatTime"] = make.now
    assert changed(world, router, NODE, beat) == frozenset()


def test_a_node_that_falls_silent_wakes_whom_it_is_of(make):
    world = make.world()
    router = ChangeRouter(world)
    changed(world, router, NODE, make.node("n0", "cd-1"))
    assert DomainKey("cd-1") in changed(
        world, router, NODE, make.node("n0", "cd-1", not_ready_since=make.now)
    )
    assert DomainKey("cd-1") in changed(world, router, NODE, make.node("n0", "cd-1"))


def test_a_label_taken_off_wakes_whom_it_named(make):
    world = make.world()
    router = ChangeRouter(world)
    changed(world, router, NODE, make.node("n0", "cd-1"))
    assert DomainKey("cd-1") in changed(world, router, NODE, make.node("n0"))
    assert DomainKey("cd-1") not in changed(world, router, NODE, make.node("n0", other="label"))


def test_a_node_that_is_gone_wakes_whom_it_named(make):
    world = make.world()
    router = ChangeRouter(world)
    changed(world, router, NODE, make.node("n0", "cd-1"))
    gone = world.objects.pop((NODE, None, "n0"))
    assert DomainKey("cd-1") in router.keys(NODE, gone)


def test_a_foreign_template_wakes_those_who_want_its_name(make):
    world = make.world()
    router = ChangeRouter(world)
    world.put(COMPUTE_DOMAIN, make.domain("one", uid="cd-1", template="wanted"))
    world.put(COMPUTE_DOMAIN, make.domain("two", uid="cd-2", template="other"))
    template = {"metadata": {"namespace": "team", "name": "wanted"}}
    assert changed(world, router, RESOURCE_CLAIM_TEMPLATE, template) == {DomainKey("cd-1")}
    elsewhere = {"metadata": {"namespace": "other", "name": "wanted"}}
    assert changed(world, router, RESOURCE_CLAIM_TEMPLATE, elsewhere) == frozenset()


def test_claims_wake_the_domain_that_their_config_names(make):
    world = make.world()
    router = ChangeRouter(world)
    assert changed(world, router, RESOURCE_CLAIM, make.claim("cd-1")) == {DomainKey("cd-1")}
    plain = {"metadata": {"namespace": "team", "name": "gpu"}, "spec": {"devices": {}}}
    assert changed(world, router, RESOURCE_CLAIM, plain) == frozenset()
    odd = make.claim("cd-1", name="odd")
    odd["spec"]["devices"]["config"][0]["opaque"]["parameters"] = ["no object"]
    assert changed(world, router, RESOURCE_CLAIM, odd) == frozenset()


def test_a_warm_daemon_wakes_its_clique_and_the_jobs_in_it(make):
    world = make.world()
    router = ChangeRouter(world)
    warm = make.domain("warm", uid="warm", labels={names.WARM_CLIQUE_LABEL: make.clique})
    warm["metadata"]["namespace"] = "rackloom-imex"
    world.put(COMPUTE_DOMAIN, warm)
    pool = names.channel_pool_name(make.clique)
    world.put(RESOURCE_CLAIM, make.claim("cd-1", device=(pool, "channel-3")))
    keys = changed(world, router, POD, make.pod("n0", "warm"))
    assert keys == {DomainKey("warm"), CliqueKey(make.clique), DomainKey("cd-1")}
