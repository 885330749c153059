"""The rights of our accounts on admission, RBAC, Secrets, nodes and DaemonSets are the reviewed ones."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
from deploy.kubernetes import rights
from deploy.kubernetes.rights import Account, Right
from tests.cluster.rights_installed import built

EXPECTED = Path(__file__).parent / "expected_rights.md"
"""The table that was reviewed last."""
SYSTEM = "rackloom-system"
ISSUER = Account(SYSTEM, "rackloom-webhook-certificates")
HOOKS = ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")


def installed() -> list[dict[str, Any]]:
    """All of deploy together."""
    return [obj for folder in rights.INSTALLED for obj in rights.documents(folder)]


def every_account() -> list[Account]:
    return list(dict.fromkeys(rights.accounts(installed())))


def test_the_manifests_give_the_rights_that_were_reviewed() -> None:
    assert rights.table() == EXPECTED.read_text(), (
        f"review the new rights, then run python -m deploy.kubernetes.rights > {EXPECTED}"
    )


def test_a_change_of_a_role_changes_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The right that the webhook had until its certificate was issued for it."""
    documents = rights.documents

    def with_a_right(folder: str) -> list[dict[str, Any]]:
        found = copy.deepcopy(list(documents(folder)))
        for obj in found:
            if (obj["kind"], obj["metadata"]["name"]) == ("ClusterRole", "rackloom-webhook"):
                group, names = "admissionregistration.k8s.io", ["rackloom-webhook"]
                rule = {"apiGroups": [group], "resources": list(HOOKS), "resourceNames": names}
                obj["rules"].append({**rule, "verbs": ["patch"]})
        return found

    monkeypatch.setattr(rights, "documents", with_a_right)
    assert rights.table() != EXPECTED.read_text()


def test_one_account_alone_writes_admission_and_none_touches_rights_or_tokens() -> None:
    found = {account: rights.rights(account, installed()) for account in every_account()}
    assert len(found) == 11
    admission, rbac = set(rights.COLUMNS["admission"]), set(rights.COLUMNS["RBAC, tokens"])
    of_admission = {
        account: {right for right in held if (right.group, right.resource) in admission}
        for account, held in found.items()
    }
    assert {account for account, held in of_admission.items() if held} == {ISSUER}
    assert of_admission[ISSUER] == {
        Right("admissionregistration.k8s.io", resource, verb, "", "rackloom-webhook")
        for resource in HOOKS
        for verb in ("get", "patch")
    }
    assert not [right for held in found.values() for right in held if (right.group, right.resource) in rbac]


def test_no_pod_that_serves_has_the_account_that_writes_admission() -> None:
    users = {}
    for obj in rights.documents("webhook"):
        template = obj.get("spec", {}).get("jobTemplate", obj).get("spec", {}).get("template", {})
        if template:
            users[obj["kind"]] = template["spec"]
    assert users.keys() == {"Deployment", "Job", "CronJob"}
    assert users["Deployment"]["serviceAccountName"] == "rackloom-webhook"
    for kind in ("Job", "CronJob"):
        assert users[kind]["serviceAccountName"] == ISSUER.name
        assert not [container for container in users[kind]["containers"] if "ports" in container]
    everywhere = [obj for obj in installed() if obj["kind"] in ("Deployment", "DaemonSet", "StatefulSet")]
    assert ISSUER.name not in {obj["spec"]["template"]["spec"]["serviceAccountName"] for obj in everywhere}


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        ({"apiGroups": ["*"], "resources": ["secrets"], "verbs": ["get"]}, {("secrets", "get", "")}),
        ({"apiGroups": ["apps"], "resources": ["secrets"], "verbs": ["get"]}, set()),
        (
            {"apiGroups": [""], "resources": ["*/status"], "verbs": ["patch"], "resourceNames": ["a"]},
            {("nodes/status", "patch", "a")},
        ),
        (
            {"apiGroups": ["apps"], "resources": ["*"], "verbs": ["get"]},
            {("daemonsets", "get", ""), ("daemonsets/status", "get", "")},
        ),
        (
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["*"]},
            {("nodes", verb, "") for verb in rights.VERBS},
        ),
        ({"nonResourceURLs": ["*"], "verbs": ["*"]}, set()),
    ],
)
def test_wildcards_are_what_they_mean(rule: dict[str, Any], found: set[tuple[str, str, str]]) -> None:
    given = rights.rights_of_rule(rule, "")
    assert {(right.resource, right.verb, right.name) for right in given} == found


@pytest.mark.parametrize(
    "subject",
    [
        {"kind": "Group", "name": f"system:serviceaccounts:{SYSTEM}"},
        {"kind": "Group", "name": "system:authenticated"},
        {"kind": "User", "name": f"system:serviceaccount:{SYSTEM}:rackloom-webhook"},
        {"kind": "ServiceAccount", "name": "rackloom-webhook", "namespace": SYSTEM},
    ],
)
def test_an_account_has_what_its_groups_and_its_user_have(subject: dict[str, str]) -> None:
    rule = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["list"]}
    role = {"kind": "ClusterRole", "metadata": {"name": "r"}, "rules": [rule]}
    binding = {
        "kind": "RoleBinding",
        "metadata": {"name": "b", "namespace": "team"},
        "roleRef": {"kind": "ClusterRole", "name": "r"},
        "subjects": [subject],
    }
    ours, other = Account(SYSTEM, "rackloom-webhook"), Account("other", "rackloom-webhook")
    assert rights.rights(ours, [role, binding]) == {Right("", "secrets", "list", "team", "")}
    assert bool(rights.rights(other, [role, binding])) == (subject["name"] == "system:authenticated")


@pytest.mark.slow
@pytest.mark.parametrize("folder", rights.INSTALLED)
def test_kustomize_builds_no_other_rights(folder: str) -> None:
    """An overlay may patch the files."""
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl on the PATH")
    objects, files = list(built(folder)), list(rights.documents(folder))
    if folder not in ("base", "webhook", "site"):
        files += rights.documents("site" if folder in rights.SITE else "base")
    for account in every_account():
        assert rights.rights(account, objects) == rights.rights(account, files), account
