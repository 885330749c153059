"""The plugin of compute-domain.nvidia.com: the channel of a ComputeDomain whose daemon is ready."""

import json
import sys
import time
from pathlib import Path
from typing import Any

# The kubelet is that of the tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

from node_kit import NODE_NAME, claim, claims_measured, cluster, host_below, row
from site_figures import resident_mib
from tests.claim.node.plugin_manager import plugin_manager_on

from rackloom.claim.node.cdi import ImexKernel
from rackloom.claim.node.fabric import FabricMonitor, read_declared_fabric
from rackloom.claim.node.imex.devices import ImexSettings
from rackloom.claim.node.imex.domains import HostImexDaemon
from rackloom.claim.node.imex.plugin import ImexPlugin
from rackloom.claim.node.run import PluginHost, run_plugin
from rackloom.core.cluster import device_configs, names
from rackloom.core.cluster.domain_objects import ComputeDomainClique, DaemonInfo, Readiness, clique_json
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, COMPUTE_DOMAIN_CLIQUE

PLUGIN = "imex"
NAMESPACE = "rackloom-imex"
CLUSTER = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"
PROC_DEVICES = "Character devices:\n235 nvidia-caps-imex-channels\n236 nvidia-caps\n\nBlock devices:\n"


async def measured(root: Path, claims: int) -> list[dict[str, Any]]:
    """Claims and memory. Each prepare labels the node and each unprepare takes the label away."""
    api, host = await cluster(), host_below(root)
    uid = await ready_domain(api)
    config = device_configs.imex_config_json(device_configs.ChannelConfig(domain_id=uid))
    made = [
        await claim(api, number, names.IMEX_DRIVER, names.CHANNEL_DEVICE, config) for number in range(claims)
    ]
    before = resident_mib()
    async with (
        run_plugin(plugin(api, root, host), api, host) as node,
        plugin_manager_on(host.directories.registry, api, NODE_NAME) as kubelet,
    ):
        await node.publisher.published.wait()
        await kubelet.registered(names.IMEX_DRIVER)
        rows = await claims_measured(PLUGIN, kubelet, made)
        return [*rows, row(PLUGIN, "memory", before_mib=before, resident_mib=resident_mib(), devices=2)]


async def ready_domain(api: Any) -> str:
    """UID of a ComputeDomain whose daemon says READY on the node."""
    made = await api.create(
        COMPUTE_DOMAIN,
        {
            "apiVersion": names.API_VERSION,
            "kind": "ComputeDomain",
            "metadata": {"name": "cd", "namespace": "default"},
            "spec": {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": "t"}}},
        },
    )
    uid, clique = str(made["metadata"]["uid"]), f"{CLUSTER}.1"
    daemon = DaemonInfo(node_name=NODE_NAME, ip_address="10.0.0.1", clique_id=clique, status=Readiness.READY)
    value = ComputeDomainClique(compute_domain=uid, clique_id=clique, daemons=(daemon,))
    await api.create(COMPUTE_DOMAIN_CLIQUE, clique_json(value, NAMESPACE))
    return uid


def plugin(api: Any, root: Path, host: PluginHost) -> ImexPlugin:
    """The plugin of a node with one GPU in the clique."""
    (root / "devices").write_text(PROC_DEVICES)
    (root / "capability").write_text("DeviceFileMinor: 512\nDeviceFileMode: 438\nDeviceFileModify: 1\n")
    gpu = {"uuid": "GPU-00000001", "health": "Healthy"}
    fabric = {"clusterUUID": CLUSTER, "cliqueId": 1, "driverVersion": "580.95.05", "gpus": [gpu]}
    (root / "fabric.json").write_text(json.dumps(fabric))
    settings = ImexSettings(
        node=NODE_NAME,
        namespaces=(NAMESPACE,),
        domains=host.directories.home(names.IMEX_DRIVER) / "domains",
        kernel=ImexKernel(proc_devices=root / "devices", imex_capability=root / "capability"),
    )
    view = FabricMonitor(lambda: read_declared_fabric(root / "fabric.json"), time.time)
    return ImexPlugin(api, settings, view, HostImexDaemon(root=root))
