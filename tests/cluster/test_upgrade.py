"""An upgrade and the way back, as docs/install.md has them, under a job that runs."""

import asyncio
from pathlib import Path

import pytest
import yaml
from tests.cluster.control_plane import ControlPlane
from tests.cluster.installed import DEPLOY, controlled
from tests.cluster.kubectl import kubectl
from tests.cluster.policies import DAEMONS, DRIVER
from tests.cluster.test_uninstall import live_domain, nodes, plugin, publish  # noqa: F401
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, DAEMON_SET, DEPLOYMENT, POD

pytestmark = pytest.mark.anyio
PLUGINS = "node-imex, node-gpu, node-nic, node-all"
PART_OF = "app.kubernetes.io/part-of"


def release(folder: Path, tag: str) -> Path:
    """The base with images of another release."""
    folder = folder / tag
    folder.mkdir()
    up = "../" * (len(folder.resolve().parts) - 1)
    overlay = {
        "resources": [f"{up}{DEPLOY.relative_to('/')}/base"],
        "images": [{"name": "rackloom", "newTag": tag}],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    return folder


async def images(api: KubeApi) -> dict[str, str]:
    found = [*(await api.list(DEPLOYMENT, DRIVER)).items, *(await api.list(DAEMON_SET, DRIVER)).items]
    return {
        deployed["metadata"]["name"]: deployed["spec"]["template"]["spec"]["containers"][0]["image"]
        for deployed in found
    }


async def untouched(api: KubeApi, namespace: str) -> set[str]:
    """The objects of a running job: its pods, its daemons and their DaemonSets, with their generations."""
    found = [*(await api.list(POD, namespace)).items, *(await api.list(POD, DAEMONS)).items]
    found += (await api.list(DAEMON_SET, DAEMONS)).items
    return {f"{obj['metadata']['uid']} {obj['metadata'].get('generation')}" for obj in found}


@pytest.fixture
async def earlier(
    cluster: ControlPlane,
    api: KubeApi,
    nodes: list[str],  # noqa: F811
    base_applied: None,
) -> None:
    """The base, as it was applied before its objects carried the label."""
    for kind in ("deployment", "daemonset", "serviceaccount"):
        await asyncio.to_thread(kubectl, cluster, "label", kind, "-n", DRIVER, "--all", f"{PART_OF}-")


async def test_an_upgrade_and_the_way_back_leave_a_running_job_alone(
    cluster: ControlPlane,
    api: KubeApi,
    plugin: KubeApi,  # noqa: F811
    nodes: list[str],  # noqa: F811
    earlier: None,
    namespace: str,
    tmp_path: Path,
) -> None:
    async with controlled(api, cluster):
        await publish(plugin, nodes)
        await live_domain(api, plugin, namespace)
    before, generations = await untouched(api, namespace), await of_programs(api)

    async def apply(*words: str) -> None:
        await asyncio.to_thread(kubectl, cluster, "apply", "--server-side", *words)

    await apply("-k", str(DEPLOY / "base"))
    labelled = [item["metadata"]["labels"] for item in (await api.list(DAEMON_SET, DRIVER)).items]
    assert {labels[PART_OF] for labels in labelled} == {"rackloom"}
    assert await of_programs(api) == generations, "the label restarts nothing"

    later = str(release(tmp_path, "9.9.9"))
    await apply("-k", later, "-l", f"app.kubernetes.io/component notin ({PLUGINS})")
    tags = {name: image.rpartition(":")[2] for name, image in (await images(api)).items()}
    assert tags["rackloom-controller"] == "9.9.9"
    assert tags["rackloom-node-imex"] == "0.1.0", "the plugins come last"
    await apply("-k", later)
    assert {image.rpartition(":")[2] for image in (await images(api)).values()} == {"9.9.9"}
    assert await untouched(api, namespace) == before

    built = await asyncio.to_thread(kubectl, cluster, "kustomize", str(DEPLOY / "base"))
    rest = [
        document for document in yaml.safe_load_all(built) if document["kind"] != "CustomResourceDefinition"
    ]
    (tmp_path / "base.yaml").write_text(yaml.safe_dump_all(rest))
    await apply("-f", str(tmp_path / "base.yaml"), "-l", f"app.kubernetes.io/component in ({PLUGINS})")
    tags = {name: image.rpartition(":")[2] for name, image in (await images(api)).items()}
    assert (tags["rackloom-node-imex"], tags["rackloom-controller"]) == ("0.1.0", "9.9.9")
    await apply("-f", str(tmp_path / "base.yaml"))
    assert {image.rpartition(":")[2] for image in (await images(api)).values()} == {"0.1.0"}
    assert await untouched(api, namespace) == before

    await api.delete(POD, "worker", namespace)
    await api.delete(COMPUTE_DOMAIN, "cd", namespace)
    async with controlled(api, cluster):
        await until(lambda: no_domains(api), "the controller takes it apart")


async def of_programs(api: KubeApi) -> dict[str, int]:
    found = [*(await api.list(DEPLOYMENT, DRIVER)).items, *(await api.list(DAEMON_SET, DRIVER)).items]
    return {crd["metadata"]["name"]: crd["metadata"]["generation"] for crd in found}


async def no_domains(api: KubeApi) -> bool:
    return not (await api.list(COMPUTE_DOMAIN)).items
