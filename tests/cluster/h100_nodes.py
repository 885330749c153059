"""Nodes as the H100 machine of the NIXL example, with our GPU and NIC plugins at work on its files."""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from tests.claim.node.plugin_manager import KubeletPluginManager, plugin_manager_on

from rackloom.app.node.gpu import GpuOptions, gpu_node
from rackloom.app.node.nic import NicOptions, nic_node
from rackloom.app.node.process import NodeOptions
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.gpu.inventory import DeclaredInventory, ShareSettings
from rackloom.claim.node.gpu.plugin import GPU_DRIVER
from rackloom.claim.node.nic.plugin import NIC_DRIVER
from rackloom.claim.node.run import PluginDirectories
from rackloom.lab.nodes.host_files import declared_inventory, host_files, write_sysroot
from rackloom.topology import profiles
from rackloom.topology.nics import DEFAULT_EXCLUSION_POLICY, ExclusionPolicy

MACHINE = profiles.load_machine("azure-nd96isr-h100-v5")
PROC_DEVICES = "Character devices:\n195 nvidia\n507 nvidia-uvm\n\nBlock devices:\n"
ALONE = ShareSettings()
_HARDWARE = ""
"""Kind of an interface that nothing made: those of the machine under the tests are none of the node's."""


class Files:
    """The files that plugins read of a node."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.inventory = root / "inventory.json"
        self.nccl = root / "nccl.xml"
        self.places = PluginDirectories(registry=root / "reg", plugins=root / "plug", cdi=root / "cdi")
        files = host_files(MACHINE)
        write_sysroot(files, root)
        self.nccl.write_text(files.nccl_topology or "")
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        (root / "proc/sys/kernel/random/boot_id").write_text("boot-1\n")
        (root / "proc/devices").write_text(PROC_DEVICES)
        self.declare(declared_inventory(MACHINE))

    def declare(self, inventory: DeclaredInventory) -> None:
        """Replace the file atomically, because the plugin may read it at any time."""
        partial = self.inventory.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(inventory))
        partial.replace(self.inventory)

    def first_gpu(self, **changes: Any) -> None:
        """The first GPU becomes another."""
        known = declared_inventory(MACHINE)
        first = msgspec.structs.replace(known.gpus[0], **changes)
        self.declare(msgspec.structs.replace(known, gpus=(first, *known.gpus[1:])))

    def specs(self) -> dict[str, Any]:
        """CDI specs of claims, by file name."""
        return {
            file.name: msgspec.json.decode(file.read_bytes()) for file in self.places.cdi.glob("*claim_*")
        }


async def plug_gpus(
    stack: AsyncExitStack, api: KubeApi, node: str, files: Files, shares: ShareSettings = ALONE
) -> None:
    """Start the GPU plugin on a node, and wait for its slices."""
    options = GpuOptions(
        inventory_file=files.inventory, nccl_topology=files.nccl, driver_root=files.root, shares=shares
    )
    common = NodeOptions(node=node, directories=files.places, sysroot=files.root)
    plugin = await stack.enter_async_context(gpu_node(common, options, api))
    await plugin.publisher.published.wait()


async def plug_nics(stack: AsyncExitStack, api: KubeApi, node: str, files: Files) -> None:
    """Start the NIC plugin on a node, and wait for its slices. No runtime: the NICs have no netdev."""
    options = NicOptions(
        nri_socket=files.root / "nri.sock",
        left_out=ExclusionPolicy(kinds=DEFAULT_EXCLUSION_POLICY.kinds | {_HARDWARE}),
        nccl_topology=files.nccl,
    )
    common = NodeOptions(node=node, directories=files.places, sysroot=files.root)
    plugin = await stack.enter_async_context(nic_node(common, options, api))
    await plugin.publisher.published.wait()


async def plug_kubelet(
    stack: AsyncExitStack, api: KubeApi, node: str, files: Files, drivers: tuple[str, ...]
) -> KubeletPluginManager:
    """A kubelet with which the drivers' plugins have registered."""
    kubelet = await stack.enter_async_context(plugin_manager_on(files.places.registry, api, node))
    for driver in drivers:
        await kubelet.registered(driver)
    return kubelet


async def plug(stack: AsyncExitStack, api: KubeApi, node: str, files: Files) -> KubeletPluginManager:
    """Both plugins and the kubelet of a node."""
    await plug_gpus(stack, api, node, files)
    await plug_nics(stack, api, node, files)
    return await plug_kubelet(stack, api, node, files, (GPU_DRIVER, NIC_DRIVER))


def device_nodes(specs: Mapping[str, Any]) -> set[str]:
    """Paths of all device files that specs give to containers."""
    edits = [device["containerEdits"] for spec in specs.values() for device in spec["devices"]]
    return {node["path"] for edit in edits for node in edit.get("deviceNodes", ())}
