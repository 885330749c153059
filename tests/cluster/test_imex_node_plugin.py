"""`rackloom node imex` on a real API server: published, allocated by its scheduler, prepared, given back."""

import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.claim.node.plugin_manager import KubeletPluginManager, SocketDraManager, plugin_manager_on
from tests.cluster.conftest import AddNodes
from tests.cluster.custom import serve, withdraw
from tests.waiting import until

from rackloom.app.node.imex import ImexOptions, imex_node
from rackloom.app.node.process import NodeOptions
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.run import PluginDirectories
from rackloom.core.cluster import names
from rackloom.core.cluster.device_configs import ChannelConfig, imex_config_json
from rackloom.core.cluster.domain_objects import ComputeDomainClique, DaemonInfo, Readiness, clique_json
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DEVICE_CLASS,
    NODE,
    POD,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    Object,
)

pytestmark = pytest.mark.anyio
CLUSTER_UUID = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"
CLIQUE = f"{CLUSTER_UUID}.1"
PROC_DEVICES = "Character devices:\n235 nvidia-caps-imex-channels\n236 nvidia-caps\n\nBlock devices:\n"
GPUS = [
    {"uuid": f"GPU-{n}", "chassisSerial": "1820", "slot": 3, "tray": 2, "moduleId": n, "fabricGuid": f"0x{n}"}
    for n in range(1, 9)
]


def a_host(root: Path) -> Path:
    """The files that the plugin reads of a node."""
    random = root / "proc/sys/kernel/random"
    random.mkdir(parents=True)
    (random / "boot_id").write_text("boot-1\n")
    (root / "proc/devices").write_text(PROC_DEVICES)
    fabric = {"clusterUUID": CLUSTER_UUID, "cliqueId": 1, "gpus": GPUS}
    (root / "fabric.json").write_text(json.dumps(fabric))
    return root


@pytest.fixture
def devices(kubelets_of_plugins: dict[str, KubeletPluginManager]) -> SocketDraManager:
    return SocketDraManager(kubelets_of_plugins)


@pytest.fixture
async def imex_node_name(
    api: KubeApi, add_nodes: AddNodes, kubelets_of_plugins: dict[str, KubeletPluginManager]
) -> AsyncIterator[str]:
    """A node with the plugin, and the types that it needs."""
    for kind in (COMPUTE_DOMAIN, COMPUTE_DOMAIN_CLIQUE):
        await serve(api, kind)
    (node,) = await add_nodes(1)
    async with AsyncExitStack() as stack:
        root = a_host(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl"))))
        places = PluginDirectories(registry=root / "reg", plugins=root / "plug", cdi=root / "cdi")
        common = NodeOptions(node=node, directories=places, sysroot=root)
        # Daemon namespace of this test: clique objects are written there by hand.
        options = ImexOptions(
            namespaces=("default",), clique_label=True, fabric_file=root / "fabric.json", driver_root=root
        )
        plugin = await stack.enter_async_context(imex_node(common, options, api))
        kubelets_of_plugins[node] = await stack.enter_async_context(
            plugin_manager_on(places.registry, api, node)
        )
        await kubelets_of_plugins[node].registered(names.IMEX_DRIVER)
        await plugin.publisher.published.wait()
        yield node
    await withdraw(api, COMPUTE_DOMAIN, COMPUTE_DOMAIN_CLIQUE)


async def test_a_channel_is_allocated_by_the_scheduler_and_prepared_when_its_daemon_is_ready(
    api: KubeApi, imex_node_name: str, namespace: str
) -> None:
    node = imex_node_name
    (found,) = (await api.list(RESOURCE_SLICE, fields=f"spec.nodeName={node}")).items
    (channel,) = (device for device in found["spec"]["devices"] if device["name"] == names.CHANNEL_DEVICE)
    assert channel["attributes"]["clique"] == {"string": CLIQUE}
    assert channel["attributes"]["module8FabricGUID"] == {"string": "0x0000000000000008"}

    async def labels() -> dict[str, str]:
        return dict((await api.get(NODE, node))["metadata"]["labels"])

    async def has_clique() -> bool:
        return (await labels()).get(names.GPU_CLIQUE_LABEL) == CLIQUE

    await until(has_clique, "the clique label")
    uid = await _domain(api, namespace)
    await _job(api, namespace, uid)

    async def labelled() -> bool:
        return (await labels()).get(names.COMPUTE_DOMAIN_LABEL) == uid

    await until(labelled, "the node belongs to the ComputeDomain")
    daemon = DaemonInfo(node_name=node, ip_address="10.0.0.1", clique_id=CLIQUE, status=Readiness.READY)
    ready = ComputeDomainClique(compute_domain=uid, clique_id=CLIQUE, daemons=(daemon,))
    await api.create(COMPUTE_DOMAIN_CLIQUE, clique_json(ready, "default"))

    async def runs() -> bool:
        return bool((await api.get(POD, "worker", namespace))["status"]["phase"] == "Running")

    await until(runs, "the pod runs")
    await api.delete(POD, "worker", namespace)

    async def left() -> bool:
        return names.COMPUTE_DOMAIN_LABEL not in await labels()

    await until(left, "the node is free again")
    await api.delete(DEVICE_CLASS, names.CHANNEL_CLASS)


async def _domain(api: KubeApi, namespace: str) -> str:
    made = await api.create(
        COMPUTE_DOMAIN,
        {
            "metadata": {"name": "cd", "namespace": namespace},
            "spec": {"channel": {"resourceClaimTemplate": {"name": "channel"}}},
        },
    )
    return str(made["metadata"]["uid"])


async def _job(api: KubeApi, namespace: str, uid: str) -> None:
    """The controller's objects for a ComputeDomain, and a pod that uses it."""
    expression = f"device.driver == '{names.IMEX_DRIVER}' && device.attributes['{names.IMEX_DRIVER}']"
    selector = {"cel": {"expression": f"{expression}.type == 'channel'"}}
    await api.create(
        DEVICE_CLASS, {"metadata": {"name": names.CHANNEL_CLASS}, "spec": {"selectors": [selector]}}
    )
    opaque = {"driver": names.IMEX_DRIVER, "parameters": imex_config_json(ChannelConfig(domain_id=uid))}
    claim: Object = {
        "devices": {
            "requests": [{"name": "channel", "exactly": {"deviceClassName": names.CHANNEL_CLASS}}],
            "config": [{"requests": ["channel"], "opaque": opaque}],
        }
    }
    meta = {"name": "channel", "namespace": namespace}
    await api.create(RESOURCE_CLAIM_TEMPLATE, {"metadata": meta, "spec": {"spec": claim}})
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "channel"}]}}
    claims = [{"name": "channel", "resourceClaimTemplateName": "channel"}]
    spec = {"containers": [container], "resourceClaims": claims}
    await api.create(POD, {"metadata": {"name": "worker", "namespace": namespace}, "spec": spec})
