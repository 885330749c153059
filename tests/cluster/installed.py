"""deploy/kubernetes on a real control plane: as it is installed, with the webhook asked by address.

The API server runs on this machine without a pod network, so it is told to call the webhook by address, not
by its service; our programs have just the rights that deploy/kubernetes gives them.
"""

import asyncio
import contextlib
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from tests.cluster.control_plane import ControlPlane
from tests.cluster.waiting import LEAVE, until

from rackloom.app.controller import Leadership
from rackloom.app.webhook import Options, webhook
from rackloom.claim.cluster.admission.desk import AdmissionSettings
from rackloom.claim.cluster.settings import DaemonSettings, Settings
from rackloom.claim.kube.api import Kind, KubeApi, KubeError, Object
from rackloom.claim.kube.kinds import MUTATING_WEBHOOK, POD, VALIDATING_WEBHOOK
from rackloom.claim.kube.lightkube_api import connect

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "kubernetes"
DRIVER = "rackloom-system"
HOOKS = {
    "MutatingWebhookConfiguration": MUTATING_WEBHOOK,
    "ValidatingWebhookConfiguration": VALIDATING_WEBHOOK,
}


@contextlib.asynccontextmanager
async def installed(
    cluster: ControlPlane, api: KubeApi, settings: AdmissionSettings, *kinds: Kind
) -> AsyncIterator[None]:
    """Everything is installed while the context is entered, `kinds` are served, and the webhook answers."""
    rest, hooks = await asyncio.to_thread(shipped)
    await asyncio.to_thread(kubectl, cluster, "apply", "--server-side", "-k", str(DEPLOY / "base"))
    await asyncio.to_thread(kubectl, cluster, "apply", "--server-side", "-f", "-", given=rest)
    await until(lambda: is_served(api, *kinds), "the new types are served")
    async with as_account(api, cluster, "rackloom-webhook") as own:
        options = Options(identity="test", listen="127.0.0.1:0", dns_names=("localhost",))
        async with webhook(own, settings, options) as port:
            for one in hooks:
                await api.create(HOOKS[one["kind"]], called_at(one, port))
            await until(lambda: is_trusted(api), "the webhook has its certificate")
            yield
            for one in hooks:
                await api.delete(HOOKS[one["kind"]], one["metadata"]["name"])
    await asyncio.to_thread(kubectl, cluster, "delete", "-f", "-", *LEAVE, given=rest)
    await asyncio.to_thread(kubectl, cluster, "delete", "-k", str(DEPLOY / "base"), *LEAVE)
    await asyncio.to_thread(kubectl, cluster, "wait", "--for=delete", f"namespace/{DRIVER}", "--timeout=120s")


@contextlib.asynccontextmanager
async def led(api: KubeApi, cluster: ControlPlane) -> AsyncIterator[None]:
    """A replica of our controller that leads."""
    async with as_account(api, cluster, "rackloom-controller") as own:
        settings = Settings(daemon=DaemonSettings(image="rackloom:test"))
        task = asyncio.create_task(Leadership(own, settings, "test").lead())
        try:
            yield
        finally:
            assert not task.done(), task.exception()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def kubectl(cluster: ControlPlane, *words: str, given: str | None = None) -> str:
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("there is no kubectl on the PATH")
    command = [program, "--kubeconfig", str(cluster.admin), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, input=given)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shipped() -> tuple[str, list[Object]]:
    """What is installed, apart: the webhook configurations, and the rest as YAML."""
    built = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / "webhook")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    documents = [one for one in yaml.safe_load_all(built.stdout) if one]
    hooks = [one for one in documents if one["kind"] in HOOKS]
    return yaml.safe_dump_all([one for one in documents if one not in hooks]), hooks


def called_at(configuration: Object, port: int) -> Object:
    """The configuration with an address for the service."""
    for hook in configuration["webhooks"]:
        path = hook["clientConfig"].pop("service")["path"]
        hook["clientConfig"]["url"] = f"https://localhost:{port}{path}"
    return configuration


async def pod_of(api: KubeApi, prefix: str) -> Object:
    async def running() -> Object | None:
        for pod in (await api.list(POD, DRIVER)).items:
            if pod["metadata"]["name"].startswith(prefix) and pod["status"]["phase"] == "Running":
                return pod
        return None

    pod = await until(running, f"a pod {prefix}* runs")
    assert pod is not None
    return pod


@contextlib.asynccontextmanager
async def as_account(api: KubeApi, cluster: ControlPlane, name: str) -> AsyncIterator[KubeApi]:
    """What the pods of a Deployment may do: its name is that of its service account."""
    token = await asyncio.to_thread(cluster.bound_token, await pod_of(api, name), name)
    async with connect(cluster.kubeconfig_of_token(f"{name}-{time.monotonic_ns()}", token)) as own:
        yield own


async def is_served(api: KubeApi, *kinds: Kind) -> bool:
    """A type that was just installed answers "storage is (re)initializing" for a moment."""
    try:
        for kind in kinds:
            await api.list(kind)
    except KubeError:
        return False
    return True


async def is_trusted(api: KubeApi) -> bool:
    found = [
        hook for kind in HOOKS.values() for hook in (await api.get(kind, "rackloom-webhook"))["webhooks"]
    ]
    return all(hook["clientConfig"].get("caBundle") for hook in found)
