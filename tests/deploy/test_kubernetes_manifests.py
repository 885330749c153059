"""deploy/kubernetes and the IMEX examples: what they must say, whoever reads them."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from rackloom.claim.domain import names
from rackloom.claim.domain.crds import crds
from rackloom.claim.domain.objects import compute_domain

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy" / "kubernetes" / "base"


def documents(path: Path) -> list[dict]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def test_the_crds_are_those_of_the_code():
    assert documents(BASE / "crds.yaml") == list(crds()), "run deploy/kubernetes/write_crds.py"


def built(folder: Path) -> list[dict]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl on the PATH")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def test_channel_mode_is_said_to_the_controller_and_to_the_plugin():
    pods = [
        one for one in built(BASE.parent / "channel-isolation") if one["kind"] in ("Deployment", "DaemonSet")
    ]
    told = [one["metadata"]["name"] for one in pods if "'IMEX_ISOLATION', 'value': 'channel'" in str(one)]
    assert sorted(told) == ["rackloom-controller", "rackloom-node-imex"]


def test_kustomize_builds_everything_into_one_namespace():
    objects = built(BASE)
    files = [one for path in sorted(BASE.glob("*.yaml")) for one in documents(path)]
    kinds = [one["kind"] for one in files if one["kind"] != "Kustomization"]
    assert sorted(one["kind"] for one in objects) == sorted(kinds), "a file is not in kustomization.yaml"
    found = {one["metadata"].get("namespace", "rackloom-system") for one in objects}
    assert found == {"rackloom-system"}


def test_no_role_reaches_further_than_it_must():
    """No wildcards; secrets in the driver's namespace only; daemons nowhere else."""
    for path in BASE.glob("rbac-*.yaml"):
        for role in documents(path):
            for rule in role.get("rules", ()):
                assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"], path.name
                if role["kind"] == "ClusterRole":
                    assert "secrets" not in rule["resources"], path.name
    assert {one["kind"] for one in documents(BASE / "rbac-daemon.yaml")} == {
        "ServiceAccount",
        "Role",
        "RoleBinding",
    }


def test_every_program_has_an_account_of_its_own():
    files = [one for path in BASE.glob("*.yaml") for one in documents(path)]
    workloads = [one for one in files if one["kind"] in ("Deployment", "DaemonSet")]
    used = [one["spec"]["template"]["spec"]["serviceAccountName"] for one in workloads]
    made = {one["metadata"]["name"] for one in files if one["kind"] == "ServiceAccount"}
    assert len(workloads) == 4
    assert len(set(used)) == len(used)
    assert set(used) <= made


def test_the_classes_of_templates_exist():
    classes = {one["metadata"]["name"] for one in documents(BASE / "device-classes.yaml")}
    assert {names.DAEMON_CLASS, names.CHANNEL_CLASS, names.ISOLATED_CHANNEL_CLASS} <= classes


@pytest.mark.parametrize("example", ["imex-minimal/compute-domain.yaml", "imex-mpijob/mpijob.yaml"])
def test_examples_name_the_template_of_their_compute_domain(example):
    found = documents(ROOT / "examples" / example)
    domain = found[0]
    domain["metadata"] |= {"namespace": "team", "uid": "1"}
    template = compute_domain(domain).template
    assert f"resourceClaimTemplateName: {template}" in (ROOT / "examples" / example).read_text()
    assert names.GPU_CLIQUE_LABEL in (ROOT / "examples" / example).read_text()
