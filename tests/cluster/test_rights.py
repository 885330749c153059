"""The table of deploy/kubernetes/rights.py on a real API server: every account, resource and verb.

All objects of deploy that give rights are installed at once. The API server lists the rules of each account
and decides each single request. The manifests must give the same.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest
import yaml
from deploy.kubernetes import rights
from deploy.kubernetes.rights import Account, Right
from tests.cluster.control_plane import ControlPlane
from tests.cluster.custom import none_is_going
from tests.cluster.kubectl import LEAVE, kubectl
from tests.cluster.rights_installed import built
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.connection import http_client
from rackloom.core.cluster.objects import NAMESPACE, Object

pytestmark = pytest.mark.anyio
KINDS = ("Namespace", "ServiceAccount", "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")
NAMESPACES = ("default", "rackloom-system", "rackloom-imex", "rackloom")
"""No role is bound in the first one, so the rules there are those of the whole cluster."""
AT_A_TIME = 40


@pytest.fixture
async def objects(cluster: ControlPlane, api: KubeApi) -> AsyncIterator[list[Object]]:
    """The objects that give rights, as kustomize builds them, while they are installed."""
    found = {}
    for folder in rights.INSTALLED:
        for obj in await asyncio.to_thread(lambda folder=folder: list(built(folder))):  # type: ignore[misc]
            meta = obj["metadata"]
            if obj["kind"] in KINDS:
                found[obj["kind"], meta.get("namespace"), meta["name"]] = obj
    ordered = sorted(found.values(), key=lambda obj: KINDS.index(obj["kind"]))
    text = yaml.safe_dump_all(ordered)
    await asyncio.to_thread(kubectl, cluster, "apply", "--server-side", "-f", "-", given=text)
    yield ordered
    await asyncio.to_thread(kubectl, cluster, "delete", "-f", "-", *LEAVE, given=text)
    await until(lambda: none_is_going(api, NAMESPACE), "our namespaces are gone")


async def rules_of(client: httpx2.AsyncClient, account: Account) -> set[Right]:
    """The rights that the API server lists for an account."""
    names = [("Impersonate-User", account.user), *(("Impersonate-Group", name) for name in account.groups)]
    found: dict[str, set[Right]] = {}
    for namespace in NAMESPACES:
        answer = await client.post(
            "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews",
            json={"spec": {"namespace": namespace}},
            headers=names,
        )
        rules = answer.raise_for_status().json()["status"]["resourceRules"]
        assert rules, "every account may at least list its rights"
        found[namespace] = set().union(*(rights.rights_of_rule(rule, "") for rule in rules))
    everywhere = found[NAMESPACES[0]]
    return everywhere.union(
        *(
            {right._replace(namespace=namespace) for right in held - everywhere}
            for namespace, held in found.items()
        )
    )


def requests(objects: list[Object]) -> Iterator[Right]:
    """Each resource and verb in each namespace, for any object and for each name in a role."""
    accounts = rights.accounts(objects)
    granted = set().union(*(rights.rights(account, objects) for account in accounts))
    for group, resource in itertools.chain.from_iterable(rights.COLUMNS.values()):
        named = {right.name for right in granted if (right.group, right.resource) == (group, resource)}
        is_cluster_wide = (
            group == "admissionregistration.k8s.io"
            or resource.startswith(("nodes", "cluster"))
            or resource in ("users", "groups")
        )
        for namespace in ("",) if is_cluster_wide else ("", *NAMESPACES):
            for verb in rights.VERBS:
                for name in sorted({"", *named}):
                    yield Right(group, resource, verb, namespace, name)


async def is_allowed(client: httpx2.AsyncClient, account: Account, request: Right) -> bool:
    """The API server's decision."""
    resource, _, subresource = request.resource.partition("/")
    asked = {"group": request.group, "resource": resource, "subresource": subresource, "verb": request.verb}
    asked |= {"namespace": request.namespace, "name": request.name}
    spec = {"user": account.user, "groups": account.groups, "resourceAttributes": asked}
    answer = await client.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", json={"spec": spec})
    return bool(answer.raise_for_status().json()["status"]["allowed"])


async def test_the_api_server_comes_to_the_rights_of_the_table(
    cluster: ControlPlane, objects: list[Object]
) -> None:
    asked, granted = list(requests(objects)), 0
    async with http_client(cluster.admin, None) as client:
        for account in rights.accounts(objects):
            derived = rights.rights(account, objects)
            assert await rules_of(client, account) == derived, account
            answers = [
                await asyncio.gather(*(is_allowed(client, account, request) for request in some))
                for some in (asked[start : start + AT_A_TIME] for start in range(0, len(asked), AT_A_TIME))
            ]
            for request, allowed in zip(asked, itertools.chain.from_iterable(answers), strict=True):
                covering = {
                    request._replace(namespace=namespace, name=name)
                    for namespace in {"", request.namespace}
                    for name in {"", request.name}
                }
                assert allowed == bool(derived & covering), (account, request)
                granted += allowed
    assert granted > 50, "the accounts have the rights that they need"
