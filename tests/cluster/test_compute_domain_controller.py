"""The ComputeDomain controller on a real control plane, with just the rights of deploy/kubernetes."""

import asyncio
import contextlib

import msgspec
import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.installed import SETTINGS, applied, controlled
from tests.cluster.kubectl import kubectl
from tests.cluster.policies import DAEMONS, DRIVER
from tests.waiting import until

from rackloom.claim.cluster.certificates import DaemonCertificates
from rackloom.claim.kube.api import KubeApi, NotFound, Rejected
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import read_compute_domain, read_compute_domain_status
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    DAEMON_SET,
    EVENT,
    RESOURCE_CLAIM_TEMPLATE,
    SECRET,
    Object,
    ResourceKind,
)
from rackloom.core.domains.manifests import daemon_set, daemon_template

pytestmark = pytest.mark.anyio


async def domain(api: KubeApi, namespace: str, name: str = "job") -> Object:
    spec = {"channel": {"resourceClaimTemplate": {"name": "imex-channel-0"}}}
    meta = {"name": name, "namespace": namespace}
    return await api.create(COMPUTE_DOMAIN, {"metadata": meta, "spec": spec})


async def has_reason(api: KubeApi, namespace: str, reason: str, name: str = "job") -> bool:
    status = read_compute_domain_status(await api.get(COMPUTE_DOMAIN, name, namespace))
    return any(condition.reason == reason for condition in status.conditions)


async def has_event(api: KubeApi, namespace: str, name: str, reason: str) -> bool:
    events = (await api.list(EVENT, namespace, fields=f"involvedObject.name={name}")).items
    return any(event["reason"] == reason for event in events)


async def is_gone(api: KubeApi, kind: ResourceKind, name: str, namespace: str | None) -> bool:
    try:
        await api.get(kind, name, namespace)
    except NotFound:
        return True
    return False


async def test_the_life_of_a_compute_domain_with_the_controllers_own_rights(
    cluster: ControlPlane, api: KubeApi, namespace: str, base_applied: None
) -> None:
    async with controlled(api, cluster):
        made = await domain(api, namespace)
        uid = made["metadata"]["uid"]
        await until(lambda: has_reason(api, namespace, "NoNodes"), "the status is told")
        template = await api.get(RESOURCE_CLAIM_TEMPLATE, "imex-channel-0", namespace)
        assert template["metadata"]["finalizers"] == [names.FINALIZER]
        daemons = await api.get(DAEMON_SET, names.daemon_name(uid), DAEMONS)
        assert daemons["status"]["desiredNumberScheduled"] == 0
        assert (await api.get(SECRET, names.imex_secret_name(uid), DAEMONS))["type"] == "kubernetes.io/tls"
        shown = await asyncio.to_thread(kubectl, cluster, "get", "computedomains", "-A")
        assert "NotReady" in shown
        assert "imex-channel-0" in shown

        second = await domain(api, namespace, "second")
        await until(lambda: has_reason(api, namespace, "TemplateNameTaken", "second"), "a collision is told")
        await until(lambda: has_event(api, namespace, "second", "TemplateNameTaken"), "and is an event")
        with pytest.raises(Rejected, match="immutable"):
            await api.patch(COMPUTE_DOMAIN, "second", namespace, {"spec": {"numNodes": 3}})

        await api.delete(COMPUTE_DOMAIN, "job", namespace)
        await until(lambda: is_gone(api, COMPUTE_DOMAIN, "job", namespace), "the domain is gone")
        assert await is_gone(api, DAEMON_SET, names.daemon_name(uid), DAEMONS)
        assert await is_gone(api, SECRET, names.imex_authority_name(uid), DAEMONS)

        async def healed() -> bool:
            found = await api.get(RESOURCE_CLAIM_TEMPLATE, "imex-channel-0", namespace)
            return bool(found["metadata"]["labels"][names.COMPUTE_DOMAIN_LABEL] == second["metadata"]["uid"])

        async def template_of_second() -> bool:
            with contextlib.suppress(NotFound):
                return await healed()
            return False

        await until(template_of_second, "the second gets the name when the first is gone")
        await api.delete(COMPUTE_DOMAIN, "second", namespace)
        await until(lambda: is_gone(api, COMPUTE_DOMAIN, "second", namespace), "the second is gone")


async def test_daemons_of_an_earlier_release_run_until_their_domain_is_deleted(
    cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes, namespace: str
) -> None:
    """In the namespace of our programs, in which the base gives no right over Secrets and DaemonSets."""
    await add_nodes(1)
    settings = msgspec.structs.replace(SETTINGS, additional_namespaces=(DRIVER,))
    async with applied(cluster, api, "take-over"):
        old = await domain(api, namespace)
        uid, secret = old["metadata"]["uid"], names.imex_secret_name(old["metadata"]["uid"])
        made = read_compute_domain(old)
        await api.create(RESOURCE_CLAIM_TEMPLATE, daemon_template(made, DRIVER))
        await api.create(DAEMON_SET, daemon_set(made, settings, DRIVER))
        await DaemonCertificates(api, lambda: 1.0e9).ensure(uid, DRIVER)
        expired = (await api.get(SECRET, secret, DRIVER))["data"]["tls.crt"]
        async with controlled(api, cluster, settings):
            await until(lambda: has_reason(api, namespace, "NoNodes"), "the status is told")

            async def renewed() -> bool:
                return bool((await api.get(SECRET, secret, DRIVER))["data"]["tls.crt"] != expired)

            await until(renewed, "the certificate is renewed where it is")
            assert not (await api.list(DAEMON_SET, DAEMONS)).items
            assert not (await api.list(SECRET, DAEMONS)).items
            await api.delete(COMPUTE_DOMAIN, "job", namespace)
            await until(lambda: is_gone(api, COMPUTE_DOMAIN, "job", namespace), "the domain is gone")
            for kind, name in ((DAEMON_SET, names.daemon_name(uid)), (SECRET, secret)):
                assert await is_gone(api, kind, name, DRIVER)
