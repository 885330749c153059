"""Whole GPUs on real kubelets, requested with the objects of the end-to-end tests of NVIDIA's DRA driver.

tests/docs/upstream_tests.toml names the upstream test behind each of these. If that one reads the list of
nvidia-smi in a container, these look at the device files of the GPUs in it. Pods that do not depend on each
other are started together (`asked`), and each test looks at its pods. They stay until the last test, so the
tests that count remaining pods come before them.
"""

from collections.abc import Iterator

import pytest
from tests.node.conftest import only_all
from tests.node.gpu_claims import (
    ATTRIBUTES,
    GPU_CLASS,
    GPUS,
    HERE,
    claim,
    claims_of,
    delete,
    deployment,
    devices_of,
    gpus_in,
    host_counter,
    namespace_for_claims,
    once,
    pods_with,
    published,
    selecting,
    sharing,
    until_ready,
    until_succeeded,
    user,
)
from tests.node.installation import gpu_plugin, plugins
from tests.node.nodes import NodeCluster
from tests.node.workloads import Object
from tests.waiting import until_seen

from rackloom.core.allocate.quantity import Quantity

REPLICAS = 4
STRESS_PODS, STRESS_ROUNDS = 12, 2
"""The default of the upstream makefile outside CI."""
GIBIBYTE = 1 << 30
SYSTEM = ("-n", "rackloom-system")


@pytest.fixture(scope="module")
def gpus(installed: NodeCluster) -> Iterator[NodeCluster]:
    """The nodes, with a namespace for the claims."""
    with namespace_for_claims(installed):
        yield installed


def memory_of(device: Object) -> int:
    """Bytes."""
    return Quantity.parse(device["capacity"]["memory"]["value"]).as_integer()


def test_slices_say_product_version_and_memory(gpus: NodeCluster) -> None:
    for device in published(gpus):
        assert device["attributes"]["productName"]["string"]
        assert device["attributes"]["driverVersion"]["version"]
        assert memory_of(device) > 0


def test_a_pod_has_one_gpu_and_its_claim_goes_with_it(gpus: NodeCluster) -> None:
    until_seen(lambda: not claims_of(gpus), "no claim is there", 30)
    objects = claim("one-gpu"), user("one", "one-gpu")
    gpus.apply(*objects)
    until_ready(gpus, "one")
    assert len(gpus_in(gpus, "one")) == 1
    (made,) = claims_of(gpus)
    assert len(devices_of(made)) == 1
    delete(gpus, *objects)
    until_seen(lambda: not claims_of(gpus), "the claim has gone", 30)


def test_ten_pods_in_a_row_have_the_gpu_and_lose_none(gpus: NodeCluster) -> None:
    """Each pod has the GPU of the one before: the scheduler takes the first free GPU."""
    before = len(published(gpus))
    objects = claim("in-turn"), user("in-turn", "in-turn")
    had = []
    for _ in range(10):
        gpus.apply(*objects)
        until_ready(gpus, "in-turn")
        assert len(gpus_in(gpus, "in-turn")) == 1
        (made,) = claims_of(gpus)
        had += devices_of(made)
        delete(gpus, *objects)
        until_seen(lambda: not claims_of(gpus), "the claim has gone", 30)
    # Either node may be first.
    assert len(had) == 10
    assert {device for _, device in had} == {had[0][1]}
    assert len(published(gpus)) == before


@only_all
def test_many_pods_share_a_claim_again_and_again(gpus: NodeCluster) -> None:
    shared = claim("of-many", "ResourceClaim")
    pods = [user(f"many-{number}", shared="of-many", restartPolicy="Never") for number in range(STRESS_PODS)]
    names = [pod["metadata"]["name"] for pod in pods]
    for _ in range(STRESS_ROUNDS):
        gpus.apply(shared)
        gpus.apply(*pods)
        gpus.kubectl("wait", *HERE, "--for=condition=Ready", "pods", "-l", "app=many", "--timeout=180s")
        found = pods_with(gpus, "app=many")
        assert [each["status"]["phase"] for each in found] == ["Running"] * STRESS_PODS
        assert len(devices_of(gpus.get("resourceclaim", *HERE, "of-many"))) == 1
        seen = {tuple(gpus_in(gpus, name)) for name in (names[0], names[-1])}
        assert len(seen) == 1
        assert len(seen.pop()) == 1
        delete(gpus, *pods)
        delete(gpus, shared)


# Plugins, their metrics and their signals.


def plugin_pods(cluster: NodeCluster, daemon_set: str) -> list[Object]:
    component = daemon_set.removeprefix("rackloom-")
    label = f"app.kubernetes.io/component={component}"
    found: list[Object] = cluster.get("pods", *SYSTEM, "-l", label)["items"]
    return found


def inside_plugin(cluster: NodeCluster, pod: Object, program: str) -> str:
    """The output of a Python program in the container of a plugin. The image has no shell."""
    return cluster.kubectl("exec", *SYSTEM, pod["metadata"]["name"], "--", "python3.11", "-c", program)


def test_plugins_and_controller_are_ready_and_the_definition_is_there(gpus: NodeCluster) -> None:
    gpus.kubectl("get", "crd", "computedomains.resource.nvidia.com")
    for component in ("controller", *(name.removeprefix("rackloom-") for name in plugins())):
        label = f"app.kubernetes.io/component={component}"
        gpus.kubectl("wait", *SYSTEM, "--for=condition=Ready", "pods", "-l", label, "--timeout=10s")


def test_the_gpu_plugin_tells_how_many_devices_are_prepared(gpus: NodeCluster) -> None:
    plugin = plugin_pods(gpus, gpu_plugin())[0]
    (port,) = plugin["spec"]["containers"][0]["ports"]
    page = f"http://localhost:{port['containerPort']}/metrics"
    metrics = inside_plugin(
        gpus, plugin, f"import urllib.request; print(urllib.request.urlopen({page!r}).read().decode())"
    )
    assert "\nnvidia_dra_prepared_devices{" in metrics


@pytest.mark.parametrize("daemon_set", sorted({plugins()[0], plugins()[1 % len(plugins())]}))
def test_a_signal_makes_a_plugin_tell_its_stacks(gpus: NodeCluster, daemon_set: str) -> None:
    """The stacks of the GPU plugin and of the ComputeDomain plugin."""
    plugin = plugin_pods(gpus, daemon_set)[0]
    name = plugin["metadata"]["name"]
    inside_plugin(gpus, plugin, "import os, signal; os.kill(1, signal.SIGUSR2)")
    log = until_seen(lambda: stacks(gpus, name), "its stacks are in its log", 10)
    assert "most recent call first" in log
    assert "rackloom/cli/node.py" in log
    (after,) = (each for each in plugin_pods(gpus, daemon_set) if each["metadata"]["name"] == name)
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0


def stacks(cluster: NodeCluster, pod: str) -> str:
    """The log of a plugin, once all stacks are in it."""
    log = cluster.kubectl("logs", *SYSTEM, pod)
    return log if "end of stacks" in log else ""


# Pods that are started together.


@pytest.fixture(scope="module")
def asked(gpus: NodeCluster) -> Iterator[NodeCluster]:
    """Pods that request GPUs in all the ways that do not depend on each other, started together.

    Product, version, memory and architecture are those that the first GPU is published with.
    """
    attributes = published(gpus)[0]["attributes"]
    product = attributes["productName"]["string"].lower()
    version = attributes["driverVersion"]["version"]
    architecture = attributes["architecture"]["string"]
    memory = memory_of(published(gpus)[0]) // GIBIBYTE * 9 // 10
    objects = [
        *(claim("template-a"), claim("template-b"), user("two-claims", "template-a", "template-b")),
        selecting("of-architecture", f'{ATTRIBUTES}.architecture == "{architecture}"'),
        user("architecture", "of-architecture", command=GPUS, restartPolicy="Never"),
        selecting("of-no-product", f'{ATTRIBUTES}.productName == "NO-SUCH-GPU"'),
        user("no-product", "of-no-product"),
        *(host_counter(f"counts-{node.name}", node.name) for node in gpus.nodes),
        claim("short-slices", config=sharing("TimeSlicing", timeSlicingConfig={"interval": "Short"})),
        user("time-slices", "short-slices", containers=2),
        selecting("of-product", f'{ATTRIBUTES}.productName.lowerAscii().matches("^.*{product}.*$")', count=1),
        once("product", "of-product"),
        selecting("of-version", f'{ATTRIBUTES}.driverVersion.compareTo(semver("{version}")) >= 0', count=1),
        once("version", "of-version"),
        selecting(
            "of-memory",
            f'device.capacity["{GPU_CLASS}"].memory.compareTo(quantity("{memory}Gi")) >= 0',
            count=1,
        ),
        once("memory", "of-memory"),
        selecting("of-none", f'{ATTRIBUTES}.productName.lowerAscii().matches("^.*h300.*$")', count=2),
        once("none", "of-none"),
        *(claim("of-replicas", "ResourceClaim"), deployment("replicas", "of-replicas", REPLICAS)),
    ]
    gpus.apply(*objects)
    yield gpus
    delete(gpus, *objects)
    until_seen(lambda: not claims_of(gpus), "no claim is left", 30)


def test_two_claims_of_a_pod_are_two_gpus(asked: NodeCluster) -> None:
    until_ready(asked, "two-claims")
    seen = gpus_in(asked, "two-claims")
    assert len(seen) == len(set(seen)) == 2
    had = [device for each in claims_of(asked, "two-claims") for device in devices_of(each)]
    assert len(had) == len(set(had)) == 2


def test_a_selector_on_the_architecture_is_met(asked: NodeCluster) -> None:
    until_succeeded(asked, "architecture")
    assert len(asked.kubectl("logs", *HERE, "architecture").split()) == 1


@pytest.mark.parametrize("pod", ["product", "version", "memory"])
def test_selectors_on_product_version_and_memory_are_met(asked: NodeCluster, pod: str) -> None:
    until_ready(asked, pod)
    (made,) = claims_of(asked, pod)
    assert len(devices_of(made)) == 1
    assert len(gpus_in(asked, pod)) == 1


@pytest.mark.parametrize("pod", ["no-product", "none"])
def test_a_pod_whose_selector_no_gpu_meets_stays_pending(asked: NodeCluster, pod: str) -> None:
    """The pod is checked again after the pods that were created with it run."""

    def refusal() -> Object | None:
        conditions = asked.get("pod", *HERE, pod)["status"].get("conditions", ())
        return next((each for each in conditions if each["type"] == "PodScheduled"), None)

    reported = until_seen(refusal, "the scheduler has looked at it", 30)
    until_ready(asked, "two-claims", "product", "version", "memory")
    assert (reported["status"], reported["reason"]) == ("False", "Unschedulable")
    assert "allocate" in reported["message"]
    assert asked.get("pod", *HERE, pod)["status"]["phase"] == "Pending"
    (made,) = claims_of(asked, pod)
    assert devices_of(made) == []


def test_as_many_gpus_are_published_as_the_hosts_have(asked: NodeCluster) -> None:
    counters = [f"counts-{node.name}" for node in asked.nodes]
    until_succeeded(asked, *counters)
    counted = [int(asked.kubectl("logs", *HERE, counter)) for counter in counters]
    assert min(counted) > 0
    assert len(published(asked)) == sum(counted)


def test_two_containers_see_one_gpu_under_short_time_slices(asked: NodeCluster) -> None:
    until_ready(asked, "time-slices")
    first, second = (gpus_in(asked, "time-slices", f"ctr{number}") for number in range(2))
    assert len(first) == 1
    assert first == second


def test_the_pods_of_a_deployment_share_one_claim(asked: NodeCluster) -> None:
    asked.kubectl("rollout", "status", *HERE, "deployment/replicas", "--timeout=60s")
    assert asked.get("deployment", *HERE, "replicas")["status"]["readyReplicas"] == REPLICAS
    shared = asked.get("resourceclaim", *HERE, "of-replicas")
    assert len(devices_of(shared)) == 1
    names = {each["metadata"]["name"] for each in pods_with(asked, "app=replicas")}
    assert {each["name"] for each in shared["status"]["reservedFor"]} == names
    assert len(names) == REPLICAS
    seen = {tuple(gpus_in(asked, name)) for name in names}
    assert len(seen) == 1
    assert len(seen.pop()) == 1
