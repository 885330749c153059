"""deploy/site/with-cluster: the map may read the objects that it draws, and has no more rights."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from rackloom.app.config import load_config
from rackloom.core.cluster.projection import SNAPSHOT_KINDS

SITE = Path(__file__).parents[2] / "deploy" / "site"
READER = SITE / "with-cluster" / "cluster-reader.yaml"
FOLLOWING = {"list", "watch"}
"""The verbs that an informer needs."""


def of_kind(kind, documents):
    return [document for document in documents if document and document["kind"] == kind]


def documents(*paths):
    return [obj for path in paths for obj in yaml.safe_load_all(path.read_text())]


def test_what_the_map_is_made_of_may_be_followed_and_nothing_more():
    (role,) = of_kind("ClusterRole", documents(READER))
    assert all(set(rule) == {"apiGroups", "resources", "verbs"} for rule in role["rules"])
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {(kind.group, kind.plural, verb) for kind in SNAPSHOT_KINDS for verb in FOLLOWING}


def test_it_is_granted_to_the_account_of_the_service():
    every = documents(READER, *sorted((SITE / "base").glob("*.yaml")))
    (binding,) = of_kind("ClusterRoleBinding", every)
    (role,) = of_kind("ClusterRole", every)
    (account,) = of_kind("ServiceAccount", every)
    (deployment,) = of_kind("Deployment", every)
    (kustomization,) = [obj for obj in every if obj["kind"] == "Kustomization"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    subject = {"kind": "ServiceAccount", "name": account["metadata"]["name"]}
    assert binding["subjects"] == [{**subject, "namespace": kustomization["namespace"]}]
    pod = deployment["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (subject["name"], True)


def test_the_base_grants_nothing_in_the_cluster():
    assert of_kind("ClusterRole", documents(*(SITE / "base").glob("*.yaml"))) == []


def test_the_service_is_told_to_follow_the_cluster(monkeypatch):
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl on the PATH")
    command = [kubectl, "kustomize", str(SITE / "with-cluster")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    (deployment,) = of_kind("Deployment", built)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "postgresql://u@db/site"))
    config = load_config(SITE / "base" / "site.toml")
    assert config.kubernetes is not None
    assert config.kubernetes.in_cluster
    (binding,) = of_kind("ClusterRoleBinding", built)
    (account,) = of_kind("ServiceAccount", built)
    assert binding["subjects"][0]["namespace"] == account["metadata"]["namespace"]
