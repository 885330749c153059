"""deploy/kubernetes and the IMEX examples: the required content of the manifests."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings

from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import read_compute_domain
from rackloom.core.domains.crds import domain_crds
from rackloom.core.domains.manifests import DAEMON_SERVICE_ACCOUNT
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE, DEFAULT_NAMESPACE

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy" / "kubernetes" / "base"


def documents(path: Path) -> list[dict]:
    return [obj for obj in yaml.safe_load_all(path.read_text()) if obj]


def test_the_crds_are_those_of_the_code():
    assert documents(BASE / "crds.yaml") == list(domain_crds()), "run deploy/kubernetes/write_crds.py"


def built(folder: Path) -> list[dict]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl on the PATH")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [obj for obj in yaml.safe_load_all(done.stdout) if obj]


def test_channel_mode_is_said_to_the_controller_and_to_the_plugin():
    pods = [
        obj for obj in built(BASE.parent / "channel-isolation") if obj["kind"] in ("Deployment", "DaemonSet")
    ]
    isolated = [pod["metadata"]["name"] for pod in pods if "'IMEX_ISOLATION', 'value': 'channel'" in str(pod)]
    assert sorted(isolated) == ["rackloom-controller", "rackloom-node-imex"]


def test_daemons_are_all_that_is_in_their_namespace():
    """The controller's rights there would reach our programs and their Secrets in the same namespace."""
    objects = built(BASE)
    files = [document for path in sorted(BASE.glob("*.yaml")) for document in documents(path)]
    kinds = [file["kind"] for file in files if file["kind"] != "Kustomization"]
    assert sorted(obj["kind"] for obj in objects) == sorted(kinds), "a file is not in kustomization.yaml"
    placed = {(obj["kind"], obj["metadata"]["name"], obj["metadata"].get("namespace")) for obj in objects}
    daemons = {(kind, name) for kind, name, namespace in placed if namespace == DEFAULT_DAEMON_NAMESPACE}
    assert {name for kind, name in daemons if kind == "ServiceAccount"} == {DAEMON_SERVICE_ACCOUNT}
    assert {kind for kind, _ in daemons} == {"ServiceAccount", "Role", "RoleBinding", "NetworkPolicy"}
    others = {namespace for _, _, namespace in placed} - {DEFAULT_DAEMON_NAMESPACE}
    assert others == {None, DEFAULT_NAMESPACE}


def test_all_programs_say_the_same_namespace_for_daemons():
    objects = [*built(BASE), *built(BASE.parent / "webhook")]
    values = {}
    for obj in objects:
        if obj["kind"] in ("Deployment", "DaemonSet"):
            (container,) = obj["spec"]["template"]["spec"]["containers"]
            variables = {each["name"]: each.get("value") for each in container["env"]}
            values[obj["metadata"]["name"]] = variables.get("IMEX_NAMESPACE")
    assert values == {
        "rackloom-controller": DEFAULT_DAEMON_NAMESPACE,
        "rackloom-node-imex": DEFAULT_DAEMON_NAMESPACE,
        "rackloom-webhook": DEFAULT_DAEMON_NAMESPACE,
        "rackloom-node-gpu": None,
        "rackloom-node-nic": None,
        "rackloom-node-mps": None,
    }
    (hooks,) = (obj for obj in objects if obj["kind"] == "MutatingWebhookConfiguration")
    for hook in hooks["webhooks"]:
        (exempt,) = hook["namespaceSelector"]["matchExpressions"]
        assert {DEFAULT_NAMESPACE, DEFAULT_DAEMON_NAMESPACE} <= set(exempt["values"])


def test_earlier_daemons_are_known_to_the_controller_and_to_the_plugin():
    variable = "'ADDITIONAL_NAMESPACES', 'value': 'rackloom-system'"
    configured = [obj["metadata"]["name"] for obj in built(BASE.parent / "take-over") if variable in str(obj)]
    assert sorted(configured) == ["rackloom-controller", "rackloom-node-imex"]


@pytest.mark.slow
def test_one_process_takes_the_place_of_the_three_plugins():
    """With the rights, the folders of the host and the nodes of all three, and nothing beside."""
    together = built(BASE.parent / "one-process")
    alone, combined = (
        {obj["metadata"]["name"]: obj for obj in objects if obj["kind"] == "DaemonSet"}
        for objects in (built(BASE), together)
    )
    # MPS daemons must outlive either.
    assert combined.pop("rackloom-node-mps") == alone.pop("rackloom-node-mps")
    (node,) = combined.values()
    assert node["metadata"]["name"] == "rackloom-node-all"
    pods = [obj["spec"]["template"]["spec"] for obj in alone.values()]
    pod = node["spec"]["template"]["spec"]
    assert [pod["affinity"]] * 3 == [each["affinity"] for each in pods]
    assert [pod["tolerations"]] * 3 == [each["tolerations"] for each in pods]
    # /sys and /proc of the host, which the NIC plugin reads, are below its root.
    assert host_paths([pod]) == host_paths(pods) - {"/sys", "/proc"}
    assert written_by([pod]) == written_by(pods)
    (arguments,) = (container["args"] for container in pod["containers"])
    assert arguments[:2] == ["node", "all"]
    assert roles_of("rackloom-node-all", together) == set().union(
        *(roles_of(account, built(BASE)) for account in alone)
    )


def host_paths(pods: list[dict]) -> set[str]:
    return {volume["hostPath"]["path"] for pod in pods for volume in pod["volumes"]}


def written_by(pods: list[dict]) -> set[str]:
    """The mount paths at which the pods may write."""
    mounts = [mount for pod in pods for mount in pod["containers"][0]["volumeMounts"]]
    return {mount["mountPath"] for mount in mounts if not mount.get("readOnly")}


def roles_of(account: str, objects: list[dict]) -> set[tuple[str, str, str]]:
    """The roles that an account is bound to, with their namespaces."""
    return {
        (obj["metadata"].get("namespace", ""), obj["roleRef"]["kind"], obj["roleRef"]["name"])
        for obj in objects
        if obj["kind"] in ("ClusterRoleBinding", "RoleBinding")
        for subject in obj["subjects"]
        if subject["name"] == account
    }


@pytest.mark.parametrize(
    ("account", "drivers"),
    [
        ("imex", {"compute-domain.nvidia.com"}),
        ("gpu", {"gpu.nvidia.com"}),
        ("nic", {"dra.net"}),
        ("all", {"compute-domain.nvidia.com", "gpu.nvidia.com", "dra.net"}),
        ("other", set()),
    ],
)
def test_a_plugin_publishes_devices_of_its_own_drivers_only(account, drivers):
    (policy,) = (
        obj["spec"]
        for obj in documents(BASE / "admission-policies.yaml")
        if obj["kind"] == "ValidatingAdmissionPolicy" and obj["metadata"]["name"] == "rackloom-node-slices"
    )
    (known,) = (each["expression"] for each in policy["variables"] if each["name"] == "drivers")
    user = {"userInfo": {"username": f"system:serviceaccount:rackloom-system:rackloom-node-{account}"}}
    extensions = [ext_optional.ExtOptional(), ext_strings.ExtStrings()]
    environment = cel.NewEnv(variables={"request": cel.Type.DYN}, extensions=extensions)
    found = environment.compile(known).eval(data={"request": user}).plain_value()
    assert set(found) == drivers


def test_every_port_that_a_pod_serves_is_in_one_network_policy():
    """By its name, so that a policy and a port cannot come apart. The host's network knows no policies."""
    objects = [*built(BASE), *built(BASE.parent / "webhook")]
    policies = [obj["spec"] for obj in objects if obj["kind"] == "NetworkPolicy"]
    for obj in objects:
        if obj["kind"] not in ("Deployment", "DaemonSet") or "'hostNetwork': True" in str(obj):
            continue
        template = obj["spec"]["template"]
        (container,) = template["spec"]["containers"]
        serves = {port["name"] for port in container.get("ports", ())}
        opened = [
            port["port"]
            for policy in policies
            if selects(policy["podSelector"], template["metadata"]["labels"], obj["metadata"]["namespace"])
            for rule in policy["ingress"]
            for port in rule["ports"]
        ]
        assert serves <= set(opened), obj["metadata"]["name"]


def selects(selector: dict, labels: dict, namespace: str) -> bool:
    """Whether a policy of our programs selects a pod. The policy without labels is for the daemons."""
    if not selector or namespace != DEFAULT_NAMESPACE:
        return False
    listed = selector.get("matchExpressions", ())
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(requirement["key"]) in requirement["values"] for requirement in listed
    )


@pytest.mark.slow
@pytest.mark.parametrize("image", ["rackloom:0.1.0", "registry.example:5000/gpu/rackloom:0.2.0"])
@pytest.mark.parametrize("place", ["base", "overlay"])
def test_the_policy_names_the_image_that_the_controller_runs_daemons_from(image, place, tmp_path):
    """Also if an operator names another image, as in README.md: in the base, or in a separate overlay."""
    folder = shutil.copytree(BASE, tmp_path / "base")
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    name, _, tag = image.rpartition(":")
    given = {"images": [{"name": "rackloom", "newName": name, "newTag": tag}]}
    if place == "overlay":
        folder = tmp_path / "overlay"
        folder.mkdir()
        given |= {"resources": ["../base"], "replacements": kustomization["replacements"]}
        kustomization = {}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization | given))
    objects = built(folder)
    (controller,) = (obj for obj in objects if obj["kind"] == "Deployment")
    (container,) = controller["spec"]["template"]["spec"]["containers"]
    policies = {obj["metadata"]["name"]: obj for obj in objects if obj["kind"] == "ValidatingAdmissionPolicy"}
    policy = policies["rackloom-controller-daemons"]
    variables = {variable["name"]: variable["expression"] for variable in policy["spec"]["variables"]}
    assert container["image"] == image
    assert variables["image"] == f"'{image}'"
    assert {"name": "IMAGE_NAME", "value": container["image"]} in container["env"]


def test_no_role_reaches_further_than_it_must():
    """No wildcards. Secrets in one namespace only and never all of them. Daemons nowhere else."""
    for path in BASE.glob("rbac-*.yaml"):
        for role in documents(path):
            for rule in role.get("rules", ()):
                assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"], path.name
                if "secrets" in rule["resources"]:
                    assert role["kind"] == "Role", path.name
                    assert not {"list", "watch", "update"} & set(rule["verbs"]), path.name
    assert {document["kind"] for document in documents(BASE / "rbac-daemon.yaml")} == {
        "ServiceAccount",
        "Role",
        "RoleBinding",
    }


def test_every_program_has_an_account_of_its_own():
    files = [document for path in BASE.glob("*.yaml") for document in documents(path)]
    workloads = [file for file in files if file["kind"] in ("Deployment", "DaemonSet")]
    used = [workload["spec"]["template"]["spec"]["serviceAccountName"] for workload in workloads]
    made = {file["metadata"]["name"] for file in files if file["kind"] == "ServiceAccount"}
    assert len(workloads) == 5
    assert len(set(used)) == len(used)
    assert set(used) <= made


WRITTEN = {
    "rackloom-controller": set(),
    "rackloom-node-imex": {"/var/lib/kubelet/plugins/compute-domain.nvidia.com"},
    "rackloom-node-gpu": {
        "/var/lib/kubelet/plugins/gpu.nvidia.com",
        "/driver-root/var/lib/kubelet/plugins/gpu.nvidia.com/mps",
        "/driver-root/dev/shm",
    },
    "rackloom-node-nic": {"/var/lib/kubelet/plugins/dra.net", "/mnt/proc-sys-net"},
    "rackloom-node-mps": {
        "/var/lib/kubelet/plugins/gpu.nvidia.com/mps",
        "/driver-root/var/lib/kubelet/plugins/gpu.nvidia.com/mps",
        "/driver-root/dev/shm",
    },
}
"""Directories of the host that a program writes, beside those of all plugins."""
OF_PLUGINS = {"/var/lib/kubelet/plugins_registry", "/var/run/cdi"}


def test_host_mounts_are_writable_only_where_they_are_written():
    files = [document for path in BASE.glob("*.yaml") for document in documents(path)]
    for obj in (each for each in files if each["kind"] in ("Deployment", "DaemonSet")):
        name = obj["metadata"]["name"]
        (container,) = obj["spec"]["template"]["spec"]["containers"]
        mounts = container.get("volumeMounts", ())
        writable = {each["mountPath"] for each in mounts if not each.get("readOnly")}
        is_plugin = obj["kind"] == "DaemonSet" and name != "rackloom-node-mps"
        assert writable == WRITTEN[name] | (OF_PLUGINS if is_plugin else set())
        assert container["securityContext"]["readOnlyRootFilesystem"]


def test_only_programs_that_open_the_gpus_device_nodes_are_privileged():
    """The device cgroup denies the nodes to all other programs. docs/admission.md lists each program."""
    files = [document for path in BASE.glob("*.yaml") for document in documents(path)]
    found = {}
    for obj in (each for each in files if each["kind"] in ("Deployment", "DaemonSet")):
        spec = obj["spec"]["template"]["spec"]
        security = spec["containers"][0]["securityContext"]
        found[obj["metadata"]["name"]] = bool(security.get("privileged"))
        if not security.get("privileged"):
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert {name for name, privileged in found.items() if privileged} == {
        "rackloom-node-imex",
        "rackloom-node-gpu",
        "rackloom-node-mps",
    }


@pytest.mark.parametrize("file", [BASE / "node-gpu.yaml", BASE.parent / "one-process" / "node-all.yaml"])
def test_the_gpu_plugin_can_read_the_kernel_log_of_its_host(file):
    """`/dev/kmsg` below --sysroot. A privileged container has CAP_SYSLOG."""
    (plugin,) = [each for each in documents(file) if each["kind"] == "DaemonSet"]
    pod = plugin["spec"]["template"]["spec"]
    container = pod["containers"][0]
    root = container["args"][container["args"].index("--sysroot") + 1]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == root]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
    assert (volume["hostPath"]["path"], mount["mountPropagation"]) == ("/", "HostToContainer")
    assert container["securityContext"]["privileged"]
    assert container["securityContext"]["runAsUser"] == 0


def test_nothing_replaces_the_pod_of_mps_daemons_or_restarts_its_container():
    """No rollout, no probe, no limit of memory: each would end the daemons of running jobs."""
    (daemon_set,) = documents(BASE / "node-mps.yaml")
    assert daemon_set["spec"]["updateStrategy"] == {"type": "OnDelete"}
    spec = daemon_set["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert not [name for name in container if name.endswith("Probe")]
    assert "limits" not in container["resources"]
    # Orphans of daemons are reaped, and the pod has no token.
    assert spec["shareProcessNamespace"] is True
    assert spec["automountServiceAccountToken"] is False
    assert roles_of("rackloom-node-mps", built(BASE)) == set()


def test_daemons_run_where_the_gpu_plugin_does():
    (plugin,) = documents(BASE / "node-gpu.yaml")
    (pod,) = documents(BASE / "node-mps.yaml")
    for part in ("affinity", "tolerations", "priorityClassName"):
        assert pod["spec"]["template"]["spec"][part] == plugin["spec"]["template"]["spec"][part]
    assert {"name": "MPS_DAEMONS", "value": "pod"} in plugin["spec"]["template"]["spec"]["containers"][0][
        "env"
    ]


@pytest.mark.parametrize("plugin", ["gpu", "imex", "nic"])
def test_a_plugin_counts_as_ready_once_it_serves_and_is_not_killed_while_it_waits(plugin):
    (daemon_set,) = documents(BASE / f"node-{plugin}.yaml")
    (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
    paths = {name: probe["httpGet"]["path"] for name, probe in container.items() if name.endswith("Probe")}
    assert paths == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}


def test_the_classes_of_templates_exist():
    classes = {document["metadata"]["name"] for document in documents(BASE / "device-classes.yaml")}
    assert {names.DAEMON_CLASS, names.CHANNEL_CLASS, names.ISOLATED_CHANNEL_CLASS} <= classes


@pytest.mark.parametrize("example", ["imex-minimal/compute-domain.yaml", "imex-mpijob/mpijob.yaml"])
def test_examples_name_the_template_of_their_compute_domain(example):
    found = documents(ROOT / "examples" / example)
    domain = found[0]
    domain["metadata"] |= {"namespace": "team", "uid": "1"}
    template = read_compute_domain(domain).template
    assert f"resourceClaimTemplateName: {template}" in (ROOT / "examples" / example).read_text()
    assert names.GPU_CLIQUE_LABEL in (ROOT / "examples" / example).read_text()


OVERLAYS = ("base", "channel-isolation", "gpus-by-count", "kueue", "one-process", "take-over", "webhook")
PART_OF = "app.kubernetes.io/part-of"


@pytest.mark.slow
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everything_that_is_installed_carries_our_label_and_nothing_selects_by_it(overlay):
    """The uninstallation finds our objects by the label. In a selector or template it would restart pods."""
    objects = built(BASE.parent / overlay)
    assert {
        obj["kind"] for obj in objects if obj["metadata"].get("labels", {}).get(PART_OF) != "rackloom"
    } == set()
    assert not [obj["metadata"]["name"] for obj in objects if PART_OF in str(obj.get("spec"))]


def test_the_site_service_does_not_carry_it():
    for path in (ROOT / "deploy" / "site").rglob("*.yaml"):
        assert PART_OF not in path.read_text(), path


def test_each_webhook_is_asked_only_while_the_base_is_installed():
    hooks = [hook for obj in built(BASE.parent / "webhook") for hook in obj.get("webhooks", ())]
    assert len(hooks) == 3
    for hook in hooks:
        (condition,) = [
            match_condition
            for match_condition in hook["matchConditions"]
            if match_condition["name"] == "base-is-installed"
        ]
        assert "serviceAccount('rackloom-system', 'rackloom-controller')" in condition["expression"]
