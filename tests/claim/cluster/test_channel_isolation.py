"""Channel mode: a warm IMEX domain per clique, one channel per job, and no way back under a running job."""

import random

import msgspec
import pytest

from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import (
    ComputeDomainClique,
    ObjectRef,
    Readiness,
    clique_json,
    read_compute_domain_status,
)
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DAEMON_SET,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    CreateObject,
)
from rackloom.core.domains.channel_mode import mixed_isolation_event, reconcile_clique
from rackloom.core.domains.clique import join_clique, with_daemon_status
from rackloom.core.domains.observe import take_clique_snapshot, take_domain_snapshot
from rackloom.core.domains.reconcile import reconcile_domain

NODES = ("n0", "n1", "n2")


@pytest.fixture(scope="session")
def channel(settings):
    return msgspec.structs.replace(settings, isolation=ImexIsolation.CHANNEL)


@pytest.fixture
def rack(make, channel):
    """A warm clique of three nodes."""
    world = make.world()
    for name in NODES:
        world.put(NODE, make.node(name))
    settle(world, channel, make)
    warm(world, make, NODES)
    settle(world, channel, make)
    return world


def settle(world, config, make, rounds=20):
    for _ in range(rounds):
        before = world.writes
        for action in reconcile_clique(take_clique_snapshot(world, make.clique, config, make.now), config):
            world.do(action)
        for found in world.of(COMPUTE_DOMAIN):
            uid = found["metadata"]["uid"]
            world.carry_out(reconcile_domain(take_domain_snapshot(world, uid, config, make.now)), uid)
        if world.writes == before:
            return
    raise AssertionError("does not settle")


def warm_object(world):
    return next(
        domain for domain in world.of(COMPUTE_DOMAIN) if domain["metadata"]["namespace"] == "rackloom-imex"
    )


def warm(world, make, nodes, status=Readiness.READY):
    """The warm daemons run and report their state."""
    uid = warm_object(world)["metadata"]["uid"]
    members = ComputeDomainClique(compute_domain=uid, clique_id=make.clique)
    for name in nodes:
        pod = world.put(POD, make.pod(name, uid, ready=status is Readiness.READY))
        ref = ObjectRef(pod["metadata"]["name"], pod["metadata"]["uid"])
        address = pod["status"]["podIP"]
        members = join_clique(members, node=name, ip_address=address, pod=ref, max_nodes=18)
        members = with_daemon_status(members, node=name, ip_address=address, status=status)
    world.put(COMPUTE_DOMAIN_CLIQUE, clique_json(members, "rackloom-imex"))


def offered_on(world):
    nodes = world.of(NODE)
    return {
        node["metadata"]["name"]
        for node in nodes
        if node["metadata"]["labels"].get(names.CHANNELS_READY_LABEL)
    }


def job(world, make, name):
    return world.put(COMPUTE_DOMAIN, make.domain(name, uid=f"cd-{name}", template=f"channel-{name}"))


def allocate(world, make, name, channel, pods=("w",)):
    """Do kube-scheduler's part for the shared claim of a job."""
    claim = world.at(RESOURCE_CLAIM, "team", names.shared_claim_name(f"cd-{name}"))
    result = {
        "driver": names.IMEX_DRIVER,
        "pool": names.channel_pool_name(make.clique),
        "device": names.channel_device_name(channel),
        "request": "channel",
    }
    status = {
        "allocation": {"devices": {"results": [result]}},
        "reservedFor": [{"resource": "pods", "name": pod, "uid": pod} for pod in pods],
    }
    return world.put(RESOURCE_CLAIM, {**claim, "status": status})


def status_of(world, name):
    return read_compute_domain_status(world.at(COMPUTE_DOMAIN, "team", name))


def test_a_warm_clique_offers_channels_where_its_daemons_are_ready(rack, make):
    daemons = rack.of(DAEMON_SET)
    assert len(daemons) == 1
    spec = daemons[0]["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {names.WARM_CLIQUE_LABEL: make.clique}
    assert offered_on(rack) == set(NODES)
    (slice_,) = rack.of(RESOURCE_SLICE)
    assert len(slice_["spec"]["devices"]) == 128
    ids = [device["attributes"]["id"]["int"] for device in slice_["spec"]["devices"]]
    assert 0 not in ids
    assert len(set(ids)) == 128
    assert all(
        device["attributes"]["type"]["string"] == "isolated-channel" for device in slice_["spec"]["devices"]
    )


def test_a_node_whose_daemon_is_not_ready_is_no_longer_offered(rack, make, channel):
    warm(rack, make, NODES, Readiness.NOT_READY)
    settle(rack, channel, make)
    assert offered_on(rack) == set()
    assert rack.of(RESOURCE_SLICE), "the pool stays: its channels are in use"


def test_a_job_has_one_claim_and_no_daemons_of_its_own(rack, make, channel):
    job(rack, make, "a")
    settle(rack, channel, make)
    assert len(rack.of(DAEMON_SET)) == 1
    claim = rack.at(RESOURCE_CLAIM, "team", names.shared_claim_name("cd-a"))
    request = claim["spec"]["devices"]["requests"][0]["exactly"]
    assert request["deviceClassName"] == names.ISOLATED_CHANNEL_CLASS
    assert rack.at(RESOURCE_CLAIM_TEMPLATE, "team", "channel-a"), "the pod refers to it until it is admitted"
    assert status_of(rack, "a").condition("Ready").reason == "NoNodes"
    allocate(rack, make, "a", 5)
    settle(rack, channel, make)
    status = status_of(rack, "a")
    assert status.status is Readiness.READY
    assert {node.name for node in status.nodes} == set(NODES)


def test_whether_a_job_is_on_the_node_that_failed_is_not_known(rack, make, channel):
    job(rack, make, "a")
    settle(rack, channel, make)
    allocate(rack, make, "a", 5)
    warm(rack, make, NODES[1:])
    settle(rack, channel, make)
    assert status_of(rack, "a").condition("Ready").status == "True"
    failing = rack.at(POD, "rackloom-imex", f"daemon-{warm_object(rack)['metadata']['uid']}-n2")
    rack.put(POD, {**failing, "status": {"phase": "Running", "podIP": failing["status"]["podIP"]}})
    settle(rack, channel, make)
    ready = status_of(rack, "a").condition("Ready")
    assert (ready.status, ready.reason) == ("Unknown", "NodesNotReady")
    assert "n2" in ready.message
    assert status_of(rack, "a").status is Readiness.NOT_READY


def test_jobs_under_churn_never_share_a_channel_and_leak_none(rack, make, channel):
    rng = random.Random(7)
    free, held = set(range(1, 129)), {}
    for step in range(40):
        if held and rng.random() < 0.45:
            name = rng.choice(sorted(held))
            claim = rack.at(RESOURCE_CLAIM, "team", names.shared_claim_name(f"cd-{name}"))
            rack.put(RESOURCE_CLAIM, {**claim, "status": {}})
            rack.delete(COMPUTE_DOMAIN, rack.at(COMPUTE_DOMAIN, "team", name))
            free.add(held.pop(name))
        else:
            name = f"j{step}"
            job(rack, make, name)
            settle(rack, channel, make)
            held[name] = min(free)
            free.discard(held[name])
            allocate(rack, make, name, held[name])
        settle(rack, channel, make)
        claims = rack.of(RESOURCE_CLAIM)
        assert len(claims) == len(held), "one claim per job that lives"
        devices = [claim["status"]["allocation"]["devices"]["results"][0]["device"] for claim in claims]
        assert len(set(devices)) == len(devices)


def test_all_channels_are_refused(rack, make, channel):
    obj = make.domain("a", uid="cd-a", template="channel-a")
    obj["spec"]["channel"]["allocationMode"] = "All"
    rack.put(COMPUTE_DOMAIN, obj)
    settle(rack, channel, make)
    degraded = status_of(rack, "a").condition("Degraded")
    assert degraded.reason == "AllChannelsRefused"
    assert "label the ComputeDomain rackloom.dev/imex-isolation=domain" in degraded.message
    assert not rack.of(RESOURCE_CLAIM)
    made = [template["metadata"]["name"] for template in rack.of(RESOURCE_CLAIM_TEMPLATE)]
    assert "channel-a" not in made, "a pod must wait, and not be bound to a node to fail there"


def test_the_label_that_the_refusal_names_gives_the_job_all_channels(rack, make, channel):
    obj = make.domain("a", uid="cd-a", template="channel-a")
    obj["spec"]["channel"]["allocationMode"] = "All"
    rack.put(COMPUTE_DOMAIN, obj)
    settle(rack, channel, make)
    refused = rack.at(COMPUTE_DOMAIN, "team", "a")
    labels = {**refused["metadata"].get("labels", {}), names.ISOLATION_LABEL: "domain"}
    rack.put(COMPUTE_DOMAIN, {**refused, "metadata": {**refused["metadata"], "labels": labels}})
    settle(rack, channel, make)
    devices = rack.at(RESOURCE_CLAIM_TEMPLATE, "team", "channel-a")["spec"]["spec"]["devices"]
    assert devices["requests"][0]["exactly"]["deviceClassName"] == names.CHANNEL_CLASS
    assert devices["config"][0]["opaque"]["parameters"]["allocationMode"] == "All"
    assert status_of(rack, "a").condition("Degraded").status == "False"


def test_a_job_beyond_one_claim_or_one_clique_is_told(rack, make, channel):
    obj = make.domain("a", uid="cd-a", template="channel-a")
    obj["spec"]["numNodes"] = 4
    rack.put(COMPUTE_DOMAIN, obj)
    settle(rack, channel, make)
    allocate(rack, make, "a", 1, pods=tuple(f"w{number}" for number in range(256)))
    settle(rack, channel, make)
    degraded = status_of(rack, "a").condition("Degraded")
    assert degraded.reason == "ClaimFull"
    assert "256" in degraded.message
    assert "one channel spans one clique" in degraded.message
    assert status_of(rack, "a").condition("Ready").reason == "TooFewNodes"


def test_a_mixed_clique_is_left_as_it_is_and_told(rack, make, channel):
    rack.put(NODE, make.node("n3", **{names.ISOLATION_LABEL: "domain"}))
    view = take_clique_snapshot(rack, make.clique, channel, make.now)
    assert reconcile_clique(view, channel) == ()
    assert names.ISOLATION_LABEL in mixed_isolation_event(view).message
    settle(rack, channel, make)
    warm_status = read_compute_domain_status(warm_object(rack))
    assert warm_status.condition("Degraded").reason == "IsolationMixed"


def test_back_to_domain_mode_waits_for_the_last_job(rack, make, channel, settings):
    labelled = make.domain("a", uid="cd-a", template="t", labels={names.ISOLATION_LABEL: "channel"})
    rack.put(COMPUTE_DOMAIN, labelled)
    settle(rack, channel, make)
    allocate(rack, make, "a", 9)
    settle(rack, settings, make)
    assert offered_on(rack) == set(), "nothing new is placed there"
    assert warm_object(rack)
    assert rack.of(RESOURCE_SLICE)
    claim = rack.at(RESOURCE_CLAIM, "team", names.shared_claim_name("cd-a"))
    rack.put(RESOURCE_CLAIM, {**claim, "status": {}})
    settle(rack, settings, make)
    assert not rack.of(RESOURCE_SLICE)
    assert not rack.of(DAEMON_SET)
    assert not rack.by(NODE, "mark", make.clique)


def test_a_deleted_warm_domain_waits_for_its_jobs_and_comes_back(rack, make, channel):
    job(rack, make, "a")
    settle(rack, channel, make)
    used = allocate(rack, make, "a", 9)
    before = warm_object(rack)["metadata"]["uid"]
    rack.delete(COMPUTE_DOMAIN, warm_object(rack))
    settle(rack, channel, make)
    assert offered_on(rack) == set(), "it takes no new jobs"
    assert rack.of(DAEMON_SET)
    held = read_compute_domain_status(warm_object(rack)).condition("Progressing")
    assert (held.reason, "team/w" in held.message) == ("DeletionHeld", True)
    rack.put(RESOURCE_CLAIM, {**used, "status": {}})
    settle(rack, channel, make)
    assert warm_object(rack)["metadata"]["uid"] != before


def test_a_node_that_loses_its_clique_label_for_a_moment_keeps_its_daemon(rack, make, channel):
    node = rack.at(NODE, None, "n1")
    labels = {
        key: value for key, value in node["metadata"]["labels"].items() if key != names.GPU_CLIQUE_LABEL
    }
    rack.put(NODE, {**node, "metadata": {**node["metadata"], "labels": labels}})
    settle(rack, channel, make)
    after = rack.at(NODE, None, "n1")["metadata"]["labels"]
    assert after[names.WARM_CLIQUE_LABEL] == make.clique


def test_a_users_domain_cannot_pass_for_a_warm_one(make, channel):
    world = make.world()
    world.put(NODE, make.node("n0"))
    world.put(COMPUTE_DOMAIN, make.domain(labels={names.WARM_CLIQUE_LABEL: make.clique}))
    actions = reconcile_clique(take_clique_snapshot(world, make.clique, channel, make.now), channel)
    assert isinstance(actions[0], CreateObject)
    assert actions[0].kind == COMPUTE_DOMAIN
