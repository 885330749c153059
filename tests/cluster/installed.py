"""deploy/kubernetes on a real control plane: an overlay as it is, or with the webhook at an address.

The API server runs on this machine without a pod network, so it must call the webhook by address, not by
its service. Our programs have only the rights that deploy/kubernetes gives them.
"""

import asyncio
import contextlib
import random
import subprocess
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.control_plane import ControlPlane
from tests.cluster.custom import is_served, none_is_going
from tests.cluster.kubectl import LEAVE, kubectl
from tests.cluster.policies import DAEMONS, DRIVER, policies_count
from tests.waiting import until

from rackloom.app.controller import Leadership
from rackloom.app.webhook import WebhookOptions, webhook
from rackloom.claim.cluster.admission.serving_certificate import ISSUER_NAME, CertificateIssuer
from rackloom.claim.cluster.admission.webhook import AdmissionSettings
from rackloom.claim.cluster.domain_controller import DomainController
from rackloom.claim.kube.api import EventRecorder, KubeApi, KubeError, NotFound
from rackloom.claim.kube.client import connect
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    CRD,
    MUTATING_WEBHOOK,
    NAMESPACE,
    POD,
    VALIDATING_WEBHOOK,
    Object,
    ResourceKind,
)
from rackloom.core.domains.settings import ControllerSettings, ImexDaemonSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "kubernetes"
HOOKS = {
    "MutatingWebhookConfiguration": MUTATING_WEBHOOK,
    "ValidatingWebhookConfiguration": VALIDATING_WEBHOOK,
}
PROBE: Object = {
    "metadata": {"name": "probe", "namespace": "default"},
    "spec": {
        "containers": [{"name": "main", "image": "none", "resources": {"claims": [{"name": "channel"}]}}],
        "resourceClaims": [{"name": "channel", "resourceClaimTemplateName": "none-such"}],
    },
}
"""The webhook gates it."""
SETTINGS = ControllerSettings(daemon=ImexDaemonSettings(image="rackloom:0.1.0"))
"""With the image that deploy/kubernetes/base names, for no other may be run as a daemon."""


@contextlib.asynccontextmanager
async def applied(cluster: ControlPlane, api: KubeApi, overlay: str) -> AsyncIterator[None]:
    """The objects of `kubectl apply -k deploy/kubernetes/<overlay>`, once in effect. Removed at the end."""
    folder = str(DEPLOY / overlay)
    await asyncio.to_thread(kubectl, cluster, "apply", "--server-side", "-k", folder)
    await until(lambda: is_served(api, COMPUTE_DOMAIN, COMPUTE_DOMAIN_CLIQUE), "the new types are served")
    await until(lambda: policies_count(cluster), "the policies count")
    yield
    await _taken_back(cluster, api, "-k", folder)


@contextlib.asynccontextmanager
async def installed(
    cluster: ControlPlane, api: KubeApi, settings: AdmissionSettings, *kinds: ResourceKind
) -> AsyncIterator[None]:
    """Everything is installed while the context is entered, `kinds` are served, and the webhook answers."""
    rest, hooks = await asyncio.to_thread(shipped)
    await asyncio.to_thread(kubectl, cluster, "apply", "--server-side", "-k", str(DEPLOY / "base"))
    await asyncio.to_thread(kubectl, cluster, "apply", "--server-side", "-f", "-", given=rest)
    await until(lambda: is_served(api, *kinds), "the new types are served")
    async with (
        as_account(api, cluster, "rackloom-webhook") as own,
        as_account(api, cluster, ISSUER_NAME) as job,
    ):
        options = WebhookOptions(identity="test", listen="127.0.0.1:0")
        async with webhook(own, settings, options) as port:
            for hook in hooks:
                await api.create(HOOKS[hook["kind"]], called_at(hook, port))
            await CertificateIssuer(job, DRIVER, ("localhost",), time.time).run()
            await until(lambda: is_asked(api), "the webhook is asked")
            yield
            for hook in hooks:
                with contextlib.suppress(NotFound):  # A test may have uninstalled it all.
                    await api.delete(HOOKS[hook["kind"]], hook["metadata"]["name"])
    await asyncio.to_thread(kubectl, cluster, "delete", "-f", "-", *LEAVE, given=rest)
    await _taken_back(cluster, api, "-k", str(DEPLOY / "base"))


async def _taken_back(cluster: ControlPlane, api: KubeApi, *what: str) -> None:
    """Gone, not only deleted: the next test installs the same again."""
    await asyncio.to_thread(kubectl, cluster, "delete", *what, *LEAVE)
    await until(lambda: none_is_going(api, CRD), "deleted definitions are gone")
    await until(lambda: _has_no_namespace(api), "our namespaces are gone")


async def _has_no_namespace(api: KubeApi) -> bool:
    return all(
        item["metadata"]["name"] not in (DRIVER, DAEMONS) for item in (await api.list(NAMESPACE)).items
    )


@contextlib.asynccontextmanager
async def led(api: KubeApi, cluster: ControlPlane) -> AsyncIterator[None]:
    """A replica of our controller that leads."""
    async with (
        as_account(api, cluster, "rackloom-controller") as own,
        _beside(Leadership(own, SETTINGS, "test").lead()),
    ):
        yield


@contextlib.asynccontextmanager
async def controlled(
    api: KubeApi, cluster: ControlPlane, settings: ControllerSettings = SETTINGS
) -> AsyncIterator[None]:
    """The ComputeDomain controller alone, with its pod's token."""
    async with as_account(api, cluster, "rackloom-controller") as own:
        recorder = EventRecorder(own, "rackloom-controller", "test", time.time)
        async with _beside(DomainController(own, settings, recorder, time.time, random.Random(1)).run()):
            yield


@contextlib.asynccontextmanager
async def _beside(program: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(program)
    try:
        yield
    finally:
        assert not task.done(), task.exception()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def shipped() -> tuple[str, list[Object]]:
    """The installed objects in two parts: the rest as YAML, and the webhook configurations."""
    built = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / "webhook")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    documents = [document for document in yaml.safe_load_all(built.stdout) if document]
    hooks = [document for document in documents if document["kind"] in HOOKS]
    return yaml.safe_dump_all([document for document in documents if document not in hooks]), hooks


def called_at(configuration: Object, port: int) -> Object:
    """The configuration with an address for the service."""
    for hook in configuration["webhooks"]:
        path = hook["clientConfig"].pop("service")["path"]
        hook["clientConfig"]["url"] = f"https://localhost:{port}{path}"
    return configuration


async def pod_of(api: KubeApi, prefix: str, namespace: str = DRIVER, account: str = "") -> Object:
    async def running() -> Object | None:
        for pod in (await api.list(POD, namespace)).items:
            runs = pod["metadata"]["name"].startswith(prefix) and pod["status"]["phase"] == "Running"
            if runs and account in ("", pod["spec"]["serviceAccountName"]):
                return pod
        return None

    pod = await until(running, f"a pod {prefix}* runs")
    assert pod is not None
    return pod


@contextlib.asynccontextmanager
async def as_account(
    api: KubeApi, cluster: ControlPlane, name: str, pod: str | None = None, namespace: str = DRIVER
) -> AsyncIterator[KubeApi]:
    """A client with the rights of a pod of that account. Names of a Deployment's pods begin with its name."""
    found = await pod_of(api, pod or name, namespace, name)
    token = await asyncio.to_thread(cluster.bound_token, found, name)
    async with connect(cluster.kubeconfig_of_token(f"{name}-{time.monotonic_ns()}", token)) as own:
        yield own


async def is_asked(api: KubeApi) -> bool:
    """The API server uses webhooks, and their certificate, only a moment after they were written."""
    try:
        pod = await api.create(POD, PROBE, dry_run=True)
    except KubeError:
        return False
    return bool(pod["spec"].get("schedulingGates"))


async def is_trusted(api: KubeApi) -> bool:
    found = [
        hook for kind in HOOKS.values() for hook in (await api.get(kind, "rackloom-webhook"))["webhooks"]
    ]
    return all(hook["clientConfig"].get("caBundle") for hook in found)
