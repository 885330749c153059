"""The rights of our accounts on objects that could take a cluster over, derived from the manifests.

`python -m deploy.kubernetes.rights` prints the table, which is a page of the site's reference. Each binding
of a role is evaluated as the API server's RBAC authorizer does, for every ServiceAccount that
deploy/kubernetes and deploy/site install. A right is kept if its resource is in `COLUMNS`. Wildcards become
the resources that they mean there. tests/deploy/expected_rights.md has the table that was reviewed last.
tests/cluster/test_rights.py compares the same rights with the answers of a real API server.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[2]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Object = dict[str, Any]
COLUMNS: dict[str, tuple[tuple[str, str], ...]] = {
    "admission": tuple(
        ("admissionregistration.k8s.io", resource)
        for resource in (
            "mutatingadmissionpolicies",
            "mutatingadmissionpolicybindings",
            "mutatingwebhookconfigurations",
            "validatingadmissionpolicies",
            "validatingadmissionpolicybindings",
            "validatingwebhookconfigurations",
        )
    ),
    "RBAC, tokens": (
        *(
            ("rbac.authorization.k8s.io", resource)
            for resource in ("clusterrolebindings", "clusterroles", "rolebindings", "roles")
        ),
        *(("", resource) for resource in ("groups", "serviceaccounts", "serviceaccounts/token", "users")),
    ),
    "Secrets": (("", "secrets"),),
    "nodes": (("", "nodes"), ("", "nodes/proxy"), ("", "nodes/status")),
    "DaemonSets": (("apps", "daemonsets"), ("apps", "daemonsets/status")),
}
"""By the title of a column: group and resource. A token or impersonation lets an account act as another."""
VERBS = (
    "get", "list", "watch", "create", "update", "patch", "delete", "deletecollection",
    "bind", "escalate", "impersonate",
)  # fmt: skip
INSTALLED = {
    "base": ("kubernetes/base", "rackloom-system"),
    "one-process": ("kubernetes/one-process", "rackloom-system"),
    "webhook": ("kubernetes/webhook", "rackloom-system"),
    "kueue": ("kubernetes/kueue", "rackloom-system"),
    "take-over": ("kubernetes/take-over", "rackloom-system"),
    "site": ("site/base", "rackloom"),
    "with-cluster": ("site/with-cluster", "rackloom"),
}
"""Folders of deploy with accounts or bindings, and the namespace of objects that name none."""
SITE = ("site", "with-cluster")
"""The folders that go on top of the site's base. The others go on top of deploy/kubernetes/base."""


class Account(NamedTuple):
    """A ServiceAccount."""

    namespace: str
    name: str

    @property
    def groups(self) -> tuple[str, ...]:
        """Those in which the API server puts its token."""
        return ("system:serviceaccounts", f"system:serviceaccounts:{self.namespace}", "system:authenticated")

    @property
    def user(self) -> str:
        """Its name as a user."""
        return f"system:serviceaccount:{self.namespace}:{self.name}"


class Right(NamedTuple):
    """One verb on one resource."""

    group: str
    resource: str
    verb: str
    namespace: str
    """Empty if the right covers the whole cluster."""
    name: str
    """The object's name. Empty if the right covers all objects."""


@cache
def documents(folder: str) -> tuple[Object, ...]:
    """The objects of a folder of deploy, with the namespaces that kustomize gives them."""
    path, namespace = INSTALLED[folder]
    place = ROOT / "deploy" / path
    files = yaml.safe_load((place / "kustomization.yaml").read_text())["resources"]
    texts = [(place / file).read_text() for file in files if file.endswith(".yaml")]
    found = tuple(obj for text in texts for obj in yaml.load_all(text, Loader=LOADER) if obj)
    for obj in found:
        if not obj["kind"].startswith("Cluster"):
            obj["metadata"].setdefault("namespace", namespace)
        for subject in obj.get("subjects", ()):
            subject.setdefault("namespace", namespace)
    return found


def accounts(objects: Iterable[Object]) -> list[Account]:
    """The ServiceAccounts among these objects."""
    return [
        Account(obj["metadata"]["namespace"], obj["metadata"]["name"])
        for obj in objects
        if obj["kind"] == "ServiceAccount"
    ]


def rights(account: Account, objects: Iterable[Object]) -> set[Right]:
    """The rights on the resources of `COLUMNS` that the bindings among these objects give to an account."""
    listed = list(objects)
    rules = {
        (obj["kind"], obj["metadata"].get("namespace", ""), obj["metadata"]["name"]): obj.get("rules") or ()
        for obj in listed
        if obj["kind"] in ("ClusterRole", "Role")
    }
    found: set[Right] = set()
    for obj in listed:
        if obj["kind"] not in ("ClusterRoleBinding", "RoleBinding"):
            continue
        namespace = obj["metadata"]["namespace"] if obj["kind"] == "RoleBinding" else ""
        if any(_is_subject(account, subject) for subject in obj["subjects"]):
            role = obj["roleRef"]
            of_role = namespace if role["kind"] == "Role" else ""
            for rule in rules[role["kind"], of_role, role["name"]]:
                found |= rights_of_rule(rule, namespace)
    return found


def _is_subject(account: Account, subject: Object) -> bool:
    if subject["kind"] == "ServiceAccount":
        return (subject["namespace"], subject["name"]) == account
    return subject["name"] in ((account.user,) if subject["kind"] == "User" else account.groups)


def rights_of_rule(rule: Object, namespace: str) -> set[Right]:
    """The rights of one rule on the resources of `COLUMNS`, without wildcards."""
    return {
        Right(group, resource, verb, namespace, name)
        for column in COLUMNS.values()
        for group, resource in column
        if {group, "*"} & set(rule.get("apiGroups") or ())
        and {resource, "*", re.sub(r"^.*(?=/)", "*", resource)} & set(rule.get("resources") or ())
        for verb in VERBS
        if {verb, "*"} & set(rule["verbs"])
        for name in rule.get("resourceNames") or ("",)
    }


def rows() -> list[tuple[str, set[Right]]]:
    """Each account with its rights, and a row for each overlay that gives an account more."""
    known: dict[Account, set[Right]] = {}
    found: list[tuple[str, set[Right]]] = []
    for folder in INSTALLED:
        objects = [*documents("site" if folder in SITE else "base"), *documents(folder)]
        of = " of the site" if folder in SITE else ""
        for account in dict.fromkeys([*known, *accounts(objects)]):
            held = rights(account, objects)
            if account not in known:
                found.append((f"`{account.name}`{of}", held))
            elif held - known[account]:
                found.append((f"`{account.name}`{of}, with `{folder}` also", held - known[account]))
            known[account] = known.get(account, set()) | held
    return found


def table() -> str:
    """The table in Markdown. Accounts with equal rights share a row."""
    shared: dict[frozenset[Right], list[str]] = defaultdict(list)
    for title, held in rows():
        shared[frozenset(held)].append(title)
    lines = [
        f"| account | {' | '.join(COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
    ]
    for held, titles in shared.items():
        cells = [", ".join(dict.fromkeys(titles)), *(_cell(held, column) for column in COLUMNS.values())]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(held: Iterable[Right], column: tuple[tuple[str, str], ...]) -> str:
    """The rights of one column: verbs, then resources if the column has several, then names and namespace."""
    verbs: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for right in held:
        if (right.group, right.resource) in column:
            verbs[right.resource, right.namespace, right.name].add(right.verb)
    # Names with the same verbs stand together, then resources with the same verbs and names.
    names: dict[tuple[str, str, tuple[str, ...]], list[str]] = defaultdict(list)
    for (resource, namespace, name), given in sorted(verbs.items()):
        ordered = tuple(verb for verb in VERBS if verb in given)
        names[resource, namespace, ordered].append(f"`{name}`" if name else "all")
    resources: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = defaultdict(list)
    for (resource, namespace, ordered), of_names in names.items():
        resources[namespace, ordered, tuple(of_names)].append(f"`{resource}`")
    parts = []
    for (namespace, ordered, of_names), of_resources in resources.items():
        plain = f"`{column[0][1]}`"
        shown = f" of {', '.join(of_resources)}" if of_resources != [plain] else ""
        place = f" in `{namespace}`" if namespace else ""
        parts.append(f"{', '.join(ordered)}{shown}: {', '.join(of_names)}{place}")
    return "; ".join(parts) or "none"


if __name__ == "__main__":
    print(table(), end="")
