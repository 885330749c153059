"""The chart on a real control plane: install, upgrade, go back, uninstall, take over (docs/install.md)."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.cluster.build import HELM, Tools
from tests.cluster.control_plane import ControlPlane
from tests.cluster.custom import is_served
from tests.cluster.installed import DEPLOY
from tests.cluster.policies import DRIVER
from tests.cluster.test_uninstall import uninstall
from tests.cluster.test_upgrade import images, no_domains, of_programs
from tests.cluster.uninstalled import remains
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    CRD,
    DAEMON_SET,
    DEPLOYMENT,
    JOB,
    MUTATING_WEBHOOK,
    SECRET,
    Object,
)

pytestmark = pytest.mark.anyio
CHARTS = DEPLOY.parent / "helm"
CHART = str(CHARTS / "rackloom")
DEFINITION = "computedomains.resource.nvidia.com"
Helm = Callable[..., "asyncio.Future[str]"]


@pytest.fixture
def helm(binaries: Callable[[Tools], Path], cluster: ControlPlane, tmp_path: Path) -> Helm:
    """Runs Helm as the administrator and returns its output."""
    program = binaries(HELM) / "helm"
    homes = {f"HELM_{kind}_HOME": str(tmp_path / kind) for kind in ("CACHE", "CONFIG", "DATA")}
    env = {**os.environ, **homes, "KUBECONFIG": str(cluster.admin)}

    def call(*words: str) -> str:
        done = subprocess.run(
            [program, *words], env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return lambda *words: asyncio.ensure_future(asyncio.to_thread(call, *words))


@pytest.fixture
async def clean(cluster: ControlPlane, api: KubeApi) -> AsyncIterator[None]:
    """Removes all of Rackloom for the next test, even if a test has left objects."""
    yield
    code, outcome, complaint = await uninstall(cluster, "--helm-release", "rackloom", "--yes")
    assert (code, outcome["rest"]["steps"]) == (0, []), complaint
    assert await remains(api) == []


async def definition(api: KubeApi) -> dict[str, str]:
    """Helm's annotations on the definition of ComputeDomains."""
    notes: dict[str, str] = (await api.get(CRD, DEFINITION))["metadata"].get("annotations") or {}
    return notes


async def tags(api: KubeApi) -> set[str]:
    return {image.rpartition(":")[2] for image in (await images(api)).values()}


async def specs(api: KubeApi) -> dict[str, Object]:
    """The specs of our programs. A Deployment's generation would also count changes of its annotations."""
    found = [*(await api.list(DEPLOYMENT, DRIVER)).items, *(await api.list(DAEMON_SET, DRIVER)).items]
    return {program["metadata"]["name"]: program["spec"] for program in found}


async def test_install_upgrade_go_back_and_uninstall(
    helm: Helm, cluster: ControlPlane, api: KubeApi, namespace: str, clean: None
) -> None:
    await helm("install", "rackloom", CHART, "--values", str(CHARTS / "webhook.yaml"))
    await until(lambda: is_served(api, COMPUTE_DOMAIN), "ComputeDomains are served")
    domain = {"metadata": {"name": "cd", "namespace": namespace}}
    spec = {"channel": {"resourceClaimTemplate": {"name": "channel"}}}
    uid = (await api.create(COMPUTE_DOMAIN, domain | {"spec": spec}))["metadata"]["uid"]
    # The writes of the Job that issues the webhook's certificate.
    bundle = {"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": "Q0E="}
    await api.patch(MUTATING_WEBHOOK, "rackloom-webhook", None, (bundle,))
    await api.patch(SECRET, "rackloom-webhook-tls", DRIVER, {"data": {"tls.key": "S0VZ"}})
    before = await of_programs(api)

    await helm("upgrade", "rackloom", CHART, "--reuse-values", "--set", "image.tag=9.9.9")
    assert await tags(api) == {"9.9.9"}
    # The pod template of a Job never changes, so each revision has another one.
    jobs = {job["metadata"]["name"]: job for job in (await api.list(JOB, DRIVER)).items}
    issuer = jobs.pop("rackloom-webhook-certificates-2")["spec"]["template"]["spec"]
    assert issuer["containers"][0]["image"] == "rackloom:9.9.9"
    assert "rackloom-webhook-certificates-1" not in jobs
    assert (await api.get(COMPUTE_DOMAIN, "cd", namespace))["metadata"]["uid"] == uid
    hooks = (await api.get(MUTATING_WEBHOOK, "rackloom-webhook"))["webhooks"]
    assert hooks[0]["clientConfig"]["caBundle"] == "Q0E="
    assert (await api.get(SECRET, "rackloom-webhook-tls", DRIVER))["data"] == {"tls.key": "S0VZ"}

    await helm("rollback", "rackloom", "1")
    assert await tags(api) == {"0.1.0"}
    assert {name for name, number in (await of_programs(api)).items() if number != before[name] + 2} == set()

    await helm("upgrade", "rackloom", CHART, "--reuse-values", "--set", "crds.install=false,image.tag=0.0.9")
    assert await tags(api) == {"0.0.9"}
    assert (await definition(api))["helm.sh/resource-policy"] == "keep"
    assert (await api.get(COMPUTE_DOMAIN, "cd", namespace))["metadata"]["uid"] == uid
    await helm("upgrade", "rackloom", CHART, "--reuse-values", "--set", "crds.install=true")

    code, planned, _ = await uninstall(cluster)
    assert "belongs to the Helm release rackloom" in {entry["why"] for entry in planned["left"]}
    code, outcome, complaint = await uninstall(cluster, "--helm-release", "rackloom", "--yes")
    assert (code, outcome["rest"]["steps"]) == (0, []), complaint
    assert await remains(api) == []
    assert "uninstalled" in await helm("uninstall", "rackloom")


async def test_an_installation_of_kubectl_becomes_one_of_helm_and_nothing_restarts(
    helm: Helm, cluster: ControlPlane, api: KubeApi, clean: None, base_applied: None
) -> None:
    before = await specs(api)
    await helm("install", "rackloom", CHART, "--take-ownership", "--force-conflicts")
    assert await specs(api) == before
    notes = (await api.get(DEPLOYMENT, "rackloom-controller", DRIVER))["metadata"]["annotations"]
    assert notes["meta.helm.sh/release-name"] == "rackloom"
    await helm("uninstall", "rackloom")
    assert await of_programs(api) == {}
    assert (await definition(api))["helm.sh/resource-policy"] == "keep"
    assert await no_domains(api)
