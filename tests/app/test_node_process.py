"""The IMEX plugin as `rackloom node imex` composes it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import grpc.aio
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.ports import reserved_ports
from tests.waiting import PATIENCE, until

from rackloom.app.node import NodeOptions, until_stopped
from rackloom.app.node_imex import ImexOptions, imex_node
from rackloom.claim.domain.names import GPU_CLIQUE_LABEL, IMEX_DRIVER, ISOLATION_LABEL
from rackloom.claim.kube.kinds import NODE, RESOURCE_SLICE
from rackloom.claim.node.imex.plugin import ImexPlugin
from rackloom.claim.node.run import Places
from rackloom.errors import Refused
from rackloom.twin.kube import DirectApi, FakeKube
from rackloom.twin.kubelet.kubelet import Timing, kubelet_on

CLUSTER = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"
PROC_DEVICES = "Character devices:\n235 nvidia-caps-imex-channels\n236 nvidia-caps\n\nBlock devices:\n"


@pytest.fixture
def host():
    """The files of a node without a GPU, below a short directory (socket paths are limited)."""
    with tempfile.TemporaryDirectory(prefix="rl") as name:
        root = Path(name)
        for path in ("proc/sys/kernel/random", "proc/driver/nvidia/capabilities"):
            (root / path).mkdir(parents=True)
        (root / "proc/sys/kernel/random/boot_id").write_text("boot-1\n")
        (root / "proc/devices").write_text(PROC_DEVICES)
        (root / "fabric.json").write_text(
            json.dumps({"clusterUUID": CLUSTER, "cliqueId": 1, "driverVersion": "580.95.05", "gpus": [{}]})
        )
        yield root


def options(host, **changes):
    common = NodeOptions(
        node="n1",
        places=Places(registry=host / "reg", plugins=host / "plug", cdi=host / "cdi"),
        sysroot=host,
        listen=changes.pop("listen", None),
        health_listen=changes.pop("health_listen", None),
    )
    imex = ImexOptions(
        namespaces=("rackloom-imex",),
        driver_root=host / "driver",
        fabric_file=host / "fabric.json",
        **changes,
    )
    return common, imex


async def a_node(labels=None):
    api = DirectApi(FakeKube(namespaces=("rackloom-imex",), seed=1), "plugin")
    meta = {"name": "n1", "labels": labels or {}}
    await api.create(NODE, {"apiVersion": "v1", "kind": "Node", "metadata": meta})
    return api


def test_it_registers_publishes_labels_and_answers_probes(host):
    async def story(listen, health):
        api = await a_node()
        common, imex = options(host, clique_label=True, listen=listen, health_listen=health)
        timing = Timing(look=0.01)
        async with kubelet_on(host / "reg", api, "n1", timing=timing) as kubelet:
            async with imex_node(common, imex, api) as one, httpx2.AsyncClient(timeout=PATIENCE) as http:
                await kubelet.registered(IMEX_DRIVER)
                await one.publisher.published.wait()
                (found,) = (await api.list(RESOURCE_SLICE)).items
                assert len(found["spec"]["devices"]) == 2
                await until(lambda: is_labelled(api), "the node has its clique label")
                assert (await http.get(f"http://{listen}/healthz")).text == "ok\n"
                metrics = (await http.get(f"http://{listen}/metrics")).text
                assert 'nvidia_dra_prepared_devices{device_type="channel"' in metrics
                assert (await http.get(f"http://{listen}/other")).status_code == 404
                async with grpc.aio.insecure_channel(health) as channel:
                    stub = health_pb2_grpc.HealthStub(channel)
                    for name in ("", "liveness"):
                        reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
                        assert reply.status == health_pb2.HealthCheckResponse.SERVING
                    with pytest.raises(grpc.aio.AioRpcError, match="no service 'other'"):
                        await stub.Check(health_pb2.HealthCheckRequest(service="other"))
                one.registrar_socket.unlink()
                assert (await http.get(f"http://{listen}/healthz")).status_code == 503
            await kubelet.gone(IMEX_DRIVER)
        assert not await is_labelled(api)

    async def is_labelled(api):
        return GPU_CLIQUE_LABEL in (await api.get(NODE, "n1"))["metadata"].get("labels", {})

    with reserved_ports(2) as first:
        asyncio.run(story(f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"))


def test_the_label_of_the_node_chooses_the_isolation_also_later(host):
    async def published(api, wanted):
        async def look():
            found = (await api.list(RESOURCE_SLICE)).items
            return [device["name"] for one in found for device in one["spec"]["devices"]] == wanted

        await until(look, f"{wanted} are published")

    async def story():
        api = await a_node({ISOLATION_LABEL: "channel"})
        async with imex_node(*options(host), api):
            await published(api, ["daemon-0"])
            await api.patch(NODE, "n1", None, {"metadata": {"labels": {ISOLATION_LABEL: None}}})
            await published(api, ["channel-0", "daemon-0"])

    asyncio.run(asyncio.wait_for(story(), PATIENCE))


def test_a_node_whose_driver_is_too_old_or_absent_is_refused_at_the_start(host):
    async def start():
        async with imex_node(*options(host), await a_node()):
            raise AssertionError("this node cannot serve IMEX")

    (host / "proc/devices").write_text("Character devices:\n  1 mem\n\n")
    with pytest.raises(Refused, match="nvidia-caps-imex-channels"):
        asyncio.run(start())
    (host / "fabric.json").write_text('{"driverVersion": "565.57.01", "gpus": []}')
    with pytest.raises(Refused, match=r"565\.57\.01 is older"):
        asyncio.run(start())


async def until_imex_stopped(host, announce):
    common, imex = options(host)
    await until_stopped(common, IMEX_DRIVER, partial(imex_node, common, imex), announce)


def test_it_ends_in_good_order_when_it_is_told_to(host, monkeypatch):
    said = []

    async def story():
        api = await a_node()
        monkeypatch.setattr("rackloom.app.node.connect", lambda *_, **__: nullcontext(api))

        def announce(line):
            said.append(line)
            os.kill(os.getpid(), signal.SIGTERM)

        await until_imex_stopped(host, announce)
        assert list((host / "reg").iterdir()) == []

    asyncio.run(asyncio.wait_for(story(), PATIENCE))
    assert said == ["rackloom: serving compute-domain.nvidia.com on node n1"]


def test_it_ends_with_the_reason_when_a_part_of_it_fails(host, monkeypatch):
    async def story():
        api = await a_node()
        monkeypatch.setattr("rackloom.app.node.connect", lambda *_, **__: nullcontext(api))
        monkeypatch.setattr(ImexPlugin, "run", fail)
        await until_imex_stopped(host, lambda _: None)

    async def fail(*_):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(asyncio.wait_for(story(), PATIENCE))


def test_the_command_says_what_is_missing():
    command = ("node", "imex", "--node", "n1", "--kubeconfig", "/nowhere")
    ran = subprocess.run(
        [sys.executable, "-m", "rackloom.cli.main", *command],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ran.returncode == 1
    assert "rackloom: no API server from /nowhere" in ran.stderr
