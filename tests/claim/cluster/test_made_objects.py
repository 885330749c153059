"""The DaemonSet and templates, as NVIDIA's driver makes them, and the fields that operators may change."""

import msgspec
import pytest

from rackloom.core.cluster import names
from rackloom.core.cluster.device_configs import ChannelConfig, DaemonConfig, decode_imex_config
from rackloom.core.cluster.domain_objects import read_compute_domain
from rackloom.core.cluster.names import AllocationMode
from rackloom.core.cluster.nodes import read_node
from rackloom.core.cluster.pods import read_pod
from rackloom.core.cluster.scheduling import is_node_selected
from rackloom.core.domains import manifests
from rackloom.core.domains.settings import ControllerSettings, ImexDaemonSettings


@pytest.fixture
def domain(make):
    return read_compute_domain(make.domain())


def pod_spec(domain, **daemon):
    settings = ControllerSettings(daemon=ImexDaemonSettings(image="image:1", **daemon))
    return manifests.daemon_set(domain, settings, settings.daemon_namespace)["spec"]["template"]["spec"]


def test_the_daemon_set_of_the_driver(domain, settings):
    made = manifests.daemon_set(domain, settings, settings.daemon_namespace)
    assert made["metadata"] == {
        "name": "computedomain-daemon-cd-1",
        "namespace": "rackloom-imex",
        "labels": {"resource.nvidia.com/computeDomain": "cd-1"},
        "finalizers": ["resource.nvidia.com/computeDomain"],
    }
    spec = made["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "compute-domain-daemon-service-account"
    assert {toleration["effect"] for toleration in spec["tolerations"]} == {
        "NoSchedule",
        "NoExecute",
        "PreferNoSchedule",
    }
    assert "hostNetwork" not in spec
    assert (spec["dnsPolicy"], spec["dnsConfig"]) == ("None", {"nameservers": ["127.0.0.1"]})
    assert spec["resourceClaims"] == [
        {"name": "daemon", "resourceClaimTemplateName": "computedomain-daemon-cd-1"}
    ]
    (container,) = spec["containers"]
    assert container["name"] == "compute-domain-daemon"
    probes = {
        name: (container[name]["periodSeconds"], container[name]["failureThreshold"])
        for name in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert probes == {"startupProbe": (1, 1200), "livenessProbe": (60, 20), "readinessProbe": (10, 1)}
    environment = {variable["name"]: variable for variable in container["env"]}
    assert environment["MAX_NODES_PER_IMEX_DOMAIN"]["value"] == "18"
    assert environment["NVIDIA_VISIBLE_DEVICES"]["value"] == "void"
    own = {
        name: variable["valueFrom"]["fieldRef"]["fieldPath"]
        for name, variable in environment.items()
        if "valueFrom" in variable
    }
    assert own == {
        "NODE_NAME": "spec.nodeName",
        "POD_IP": "status.podIP",
        "POD_UID": "metadata.uid",
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
    }


@pytest.mark.parametrize(
    ("more", "there"),
    [
        ({}, True),
        ({names.COMPUTE_DOMAIN_LABEL: "cd-2"}, False),
        ({"nvidia.com/gpu.deploy.client": "true"}, True),
        ({"nvidia.com/gpu.deploy.client": "paused-for-driver-upgrade"}, False),
    ],
)
def test_a_warm_daemon_leaves_a_node_to_a_job_and_to_a_driver_upgrade(make, settings, more, there):
    warm = make.domain(namespace=settings.daemon_namespace)
    warm["metadata"]["labels"] = {names.WARM_CLIQUE_LABEL: "c.1"}
    made = manifests.daemon_set(read_compute_domain(warm), settings, settings.daemon_namespace)
    node = {"metadata": {"name": "n", "labels": {names.WARM_CLIQUE_LABEL: "c.1"} | more}}
    assert is_node_selected(read_pod(made["spec"]["template"]).spec, read_node(node)) is there


def test_daemons_can_be_given_priority_resources_and_secrets(domain):
    limits = {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}}
    spec = pod_spec(domain, priority_class="imex", resources=limits, pull_secrets=("registry",), max_nodes=36)
    assert spec["priorityClassName"] == "imex"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["containers"][0]["resources"] == {**limits, "claims": [{"name": "daemon"}]}


@pytest.mark.parametrize("authentication", [True, False])
def test_daemons_get_the_certificate_of_their_domain(domain, authentication):
    spec = pod_spec(domain, authentication=authentication)
    secrets = [volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume]
    assert secrets == (["computedomain-imex-cd-1"] if authentication else [])
    mounted = [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"] if mount.get("readOnly")]
    assert mounted == (["/imexd-tls"] if authentication else [])
    values = {variable["name"]: variable.get("value") for variable in spec["containers"][0]["env"]}
    assert values["IMEX_AUTHENTICATION"] == str(authentication).lower()


def test_daemons_get_the_settings_of_nvidia_imex_only_where_there_are_some(domain):
    def variables(**daemon):
        return {
            each["name"]: each.get("value") for each in pod_spec(domain, **daemon)["containers"][0]["env"]
        }

    chosen = {"LOG_LEVEL": "3", "IMEX_WAIT_FOR_QUORUM": "NONE"}
    assert variables(imex_settings=chosen)["IMEX_SETTINGS"] == "IMEX_WAIT_FOR_QUORUM=NONE,LOG_LEVEL=3"
    assert "IMEX_SETTINGS" not in variables()


@pytest.mark.parametrize("mode", AllocationMode)
def test_templates_carry_configs_that_a_strict_reader_accepts(domain, settings, mode):
    domain = msgspec.structs.replace(domain, allocation_mode=mode)
    made = (
        (manifests.workload_template(domain, settings), "channel", "Workload", ChannelConfig),
        (manifests.daemon_template(domain, settings.daemon_namespace), "daemon", "Daemon", DaemonConfig),
    )
    for template, request, target, kind in made:
        devices = template["spec"]["spec"]["devices"]
        assert [requested["name"] for requested in devices["requests"]] == [request]
        assert template["metadata"]["labels"][names.TARGET_LABEL] == target
        config = decode_imex_config(devices["config"][0]["opaque"]["parameters"])
        assert isinstance(config, kind)
        assert config.domain_id == "cd-1"
        if isinstance(config, ChannelConfig):
            assert config.allocation_mode is mode
