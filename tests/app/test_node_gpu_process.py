"""The GPU plugin as `rackloom node gpu` composes it."""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx2
import msgspec
import pynvml
import pytest
from tests.claim.node.gpu.test_gpu_nvml import Library
from tests.claim.node.plugin_manager import PluginManagerTiming, plugin_manager_on
from tests.ports import reserved_ports
from tests.waiting import PATIENCE, until

from rackloom.app.node.gpu import GpuOptions, gpu_node
from rackloom.app.node.process import NodeOptions
from rackloom.claim.node.gpu.plugin import GPU_DRIVER
from rackloom.claim.node.run import PluginDirectories
from rackloom.core.cluster.objects import NODE, RESOURCE_CLAIM, RESOURCE_SLICE
from rackloom.errors import Refused
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.dra_manager import pod_claim
from rackloom.lab.nodes.host_files import declared_inventory, host_files, write_sysroot
from rackloom.topology import profiles

PROFILE = "oci-bm.gpu.gb200-v3.4"


@pytest.fixture
def host():
    """The files of a node that only looks as if it had GPUs, below a short directory."""
    with tempfile.TemporaryDirectory(prefix="rl") as name:
        root = Path(name)
        machine = profiles.load_machine(PROFILE)
        write_sysroot(host_files(machine), root)
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        (root / "proc/sys/kernel/random/boot_id").write_text("boot-1\n")
        (root / "proc/devices").write_text("Character devices:\n195 nvidia\n\nBlock devices:\n")
        (root / "inventory.json").write_bytes(msgspec.json.encode(declared_inventory(machine)))
        (root / "usr/lib64").mkdir(parents=True)
        (root / "usr/lib64/libcuda.so.1").touch()
        yield root


def options(host):
    places = PluginDirectories(registry=host / "reg", plugins=host / "plug", cdi=host / "cdi")
    common = NodeOptions(node="n1", directories=places, sysroot=host)
    return common, GpuOptions(inventory_file=host / "inventory.json", driver_root=host, vfio=True)


async def a_node():
    api = DirectApi(FakeKube(namespaces=("default", "rackloom-system"), seed=1), "plugin")
    await api.create(NODE, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}})
    return api


@pytest.mark.slow
def test_it_registers_and_publishes_what_is_declared(host):
    async def story():
        api = await a_node()
        async with plugin_manager_on(
            host / "reg", api, "n1", timing=PluginManagerTiming(scan=0.01)
        ) as kubelet:
            async with gpu_node(*options(host), api) as node:
                await kubelet.registered(GPU_DRIVER)
                await node.publisher.published.wait()
                (found,) = (await api.list(RESOURCE_SLICE)).items
                names = [device["name"] for device in found["spec"]["devices"]]
                assert names == ["gpu-0", "gpu-1", "gpu-2", "gpu-3"]
                (spec,) = (host / "cdi").iterdir()
                base = json.loads(spec.read_bytes())
                assert base["kind"] == "k8s.gpu.nvidia.com/device"
                mounts = base["devices"][0]["containerEdits"]["mounts"]
                assert mounts[0]["containerPath"] == "/usr/lib64/libcuda.so.1"
            await kubelet.gone(GPU_DRIVER)

    asyncio.run(asyncio.wait_for(story(), 120))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "truncated"),
        ('{"gpus": [{"minor": 0}]}', "uuid"),
        ('{"gpu": []}', "unknown field `gpu`"),
        (
            '{"gpus": [{"minor": 0, "uuid": "GPU-1", "pciAddress": "0000:01:00.0", "product": "",'
            ' "memoryBytes": 1, "recovery": "magic"}]}',
            "magic",
        ),
    ],
)
def test_a_declaration_that_cannot_be_used_is_refused_at_the_start(host, content, complaint):
    (host / "inventory.json").write_text(content)

    async def start():
        async with gpu_node(*options(host), await a_node()):
            raise AssertionError("nothing to serve")

    with pytest.raises(Refused, match=r"docs/gpus\.md") as refused:
        asyncio.run(start())
    assert complaint in str(refused.value)


def test_a_driver_that_comes_later_is_waited_for(host, monkeypatch):
    library = Library(monkeypatch)
    start = pynvml.nvmlInitWithFlags
    (host / "usr/lib64/libcuda.so.1").unlink()

    def missing(_flags):
        raise pynvml.NVMLError_DriverNotLoaded

    monkeypatch.setattr(pynvml, "nvmlInitWithFlags", missing)
    monkeypatch.setattr("rackloom.claim.node.gpu.plugin.DRIVER_SECONDS", 0.02)

    async def names(api):
        found = (await api.list(RESOURCE_SLICE)).items
        return [device["name"] for slice_ in found for device in slice_["spec"].get("devices", ())]

    async def story(listen):
        api = await a_node()
        common, gpus = options(host)
        common = msgspec.structs.replace(common, listen=listen)
        gpus = msgspec.structs.replace(gpus, inventory_file=None, vfio=False)
        async with (
            plugin_manager_on(host / "reg", api, "n1", timing=PluginManagerTiming(scan=0.01)) as kubelet,
            gpu_node(common, gpus, api) as node,
            httpx2.AsyncClient(timeout=PATIENCE) as http,
        ):
            await kubelet.registered(GPU_DRIVER)
            await node.publisher.published.wait()
            assert await names(api) == []
            answer = await http.get(f"http://{listen}/readyz")
            assert (answer.status_code, "NVIDIA's driver" in answer.text) == (503, True)
            assert (await http.get(f"http://{listen}/healthz")).status_code == 200
            (host / "run/nvidia/driver/usr/lib64").mkdir(parents=True)
            (host / "run/nvidia/driver/usr/lib64/libcuda.so.580.95.05").touch()
            monkeypatch.setattr(pynvml, "nvmlInitWithFlags", start)

            async def published():
                return await names(api) == ["gpu-0", "gpu-1-mig-1g10gb-19-6"]

            await until(published, "the GPUs are published")

            async def ready():
                return (await http.get(f"http://{listen}/readyz")).status_code == 200

            await until(ready, "ready")
            claim = await a_claim(api, "gpu-0")
            (device,) = (await kubelet.prepare(claim))[claim.uid]
            assert device.cdi_ids[0] == "k8s.gpu.nvidia.com/device=all"
            base = json.loads((host / "cdi/k8s.gpu.nvidia.com-device_base.yaml").read_bytes())
            mounts = base["devices"][0]["containerEdits"]["mounts"]
            path = "/usr/lib64/libcuda.so.580.95.05"
            assert (mounts[0]["containerPath"], mounts[0]["hostPath"]) == (path, f"/run/nvidia/driver{path}")
        assert library.sessions == 0

    with reserved_ports(1) as first:
        asyncio.run(asyncio.wait_for(story(f"127.0.0.1:{first}"), PATIENCE))


async def a_claim(api, device):
    """A claim of a pod, with the device of this node."""
    result = {"request": "r", "driver": GPU_DRIVER, "pool": "n1", "device": device}
    made = await api.create(
        RESOURCE_CLAIM,
        {
            "apiVersion": RESOURCE_CLAIM.api_version,
            "kind": "ResourceClaim",
            "metadata": {"name": "c", "namespace": "default"},
            "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "c"}}]}},
        },
    )
    status = {"allocation": {"devices": {"results": [result]}}}
    return pod_claim(await api.replace(RESOURCE_CLAIM, {**made, "status": status}, subresource="status"))


def test_the_command_explains_itself():
    done = subprocess.run(
        [sys.executable, "-m", "rackloom.cli.main", "node", "gpu", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "gpu.nvidia.com" in done.stdout
    assert "--inventory-file" in done.stdout
