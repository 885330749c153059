"""The three plugins of a node in one process: each for kubelet, one answer for probes and Prometheus."""

import asyncio
import json
import re
import socket
import tempfile
from pathlib import Path

import httpx2
import msgspec
import pytest

from rackloom.app.node.gpu import GpuOptions
from rackloom.app.node.imex import ImexOptions
from rackloom.app.node.nic import NicOptions
from rackloom.app.node.process import NodeOptions
from rackloom.app.node.together import all_nodes
from rackloom.claim.node.run import PluginDirectories
from rackloom.core.cluster.objects import NODE
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.host_files import declared_inventory, host_files, write_sysroot
from rackloom.topology import profiles

DEVICES = "Character devices:\n195 nvidia\n235 nvidia-caps-imex-channels\n\nBlock devices:\n"
DRIVERS = ("compute-domain.nvidia.com", "gpu.nvidia.com", "dra.net")


@pytest.mark.slow
def test_three_plugins_answer_at_one_address() -> None:
    asyncio.run(asked_as_probes_do())


async def asked_as_probes_do() -> None:
    """Start the three, and send requests to the one address."""
    with tempfile.TemporaryDirectory(prefix="rl") as name:
        root = Path(name)
        machine = profiles.load_machine("oci-bm.gpu.gb200-v3.4")
        write_sysroot(host_files(machine), root)
        for folder in ("proc/sys/kernel/random", "proc/driver/nvidia/capabilities", "usr/lib64"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        (root / "proc/sys/kernel/random/boot_id").write_text("boot-1\n")
        (root / "proc/devices").write_text(DEVICES)
        (root / "usr/lib64/libcuda.so.1").touch()
        fabric = {"clusterUUID": "7b968a6d-c8aa-45e1-9e07-e1e51be99c31", "cliqueId": 1, "gpus": [{}]}
        (root / "fabric.json").write_text(json.dumps(fabric | {"driverVersion": "580.95.05"}))
        (root / "inventory.json").write_bytes(msgspec.json.encode(declared_inventory(machine)))
        api = DirectApi(FakeKube(namespaces=("default", "rackloom-imex"), seed=1), "plugin")
        await api.create(NODE, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}})
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = NodeOptions(
            node="n1",
            directories=PluginDirectories(registry=root / "reg", plugins=root / "plug", cdi=root / "cdi"),
            sysroot=root,
            listen=f"127.0.0.1:{port}",
        )
        imex = ImexOptions(driver_root=root, fabric_file=root / "fabric.json")
        gpu = GpuOptions(inventory_file=root / "inventory.json", driver_root=root)
        nic = NicOptions(nri_socket=root / "nri.sock")
        async with (
            all_nodes(common, imex, gpu, nic, api) as node,
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as http,
        ):
            health, ready, page = [await http.get(path) for path in ("/healthz", "/readyz", "/metrics")]
            sockets = [plugin.dra_socket for plugin in node.plugins]
            assert all(path.is_socket() for path in sockets)
        assert health.status_code == 200
        # No kubelet has registered any of them, and each reports it.
        assert ready.status_code == 503
        assert ready.text.count("kubelet has not registered the plugin yet") >= 1
        requests = re.findall(
            r'^nvidia_dra_requests_total\{driver="([^"]+)",operation="prepare"\}', page.text, re.MULTILINE
        )
        assert sorted(requests) == sorted(DRIVERS)
        assert page.text.count("# TYPE nvidia_dra_requests_total counter") == 1
        assert "rackloom_nics_lent 0.0" in page.text
        assert not any(path.exists() for path in sockets)
