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
from grpc_health.v1 import (
    health_pb2,  # type: ignore[import-untyped]
    health_pb2_grpc,
)
from tests.attacks import grpc_is_bounded, http_is_bounded
from tests.claim.node.plugin_manager import PluginManagerTiming, plugin_manager_on
from tests.ports import reserved_ports
from tests.waiting import PATIENCE, until

from rackloom.app.node.imex import ImexOptions, imex_node
from rackloom.app.node.process import NodeOptions, serve_plugin
from rackloom.claim.node.imex.plugin import ImexPlugin
from rackloom.claim.node.run import PluginDirectories
from rackloom.claim.node.wire import registration_pb2, registration_pb2_grpc
from rackloom.core.cluster.names import GPU_CLIQUE_LABEL, IMEX_DRIVER, ISOLATION_LABEL
from rackloom.core.cluster.objects import NODE, RESOURCE_SLICE
from rackloom.errors import Refused
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.serving.limits import HEALTH, PROBES

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
        directories=PluginDirectories(registry=host / "reg", plugins=host / "plug", cdi=host / "cdi"),
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
        timing = PluginManagerTiming(scan=0.01)
        async with plugin_manager_on(host / "reg", api, "n1", timing=timing) as kubelet:
            async with imex_node(common, imex, api) as node, httpx2.AsyncClient(timeout=PATIENCE) as http:
                await kubelet.registered(IMEX_DRIVER)
                await node.publisher.published.wait()
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
                node.registrar_socket.unlink()
                assert (await http.get(f"http://{listen}/healthz")).status_code == 503
            await kubelet.gone(IMEX_DRIVER)
        assert not await is_labelled(api)

    async def is_labelled(api):
        return GPU_CLIQUE_LABEL in (await api.get(NODE, "n1"))["metadata"].get("labels", {})

    with reserved_ports(2) as first:
        asyncio.run(story(f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"))


def test_strangers_cannot_take_its_probes(host):
    async def story(listen, health):
        async with imex_node(*options(host, listen=listen, health_listen=health), await a_node()):

            async def ask():
                async with grpc.aio.insecure_channel(health) as channel:
                    return await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())

            await http_is_bounded(int(listen.rpartition(":")[2]), PROBES, "/metrics")
            await grpc_is_bounded(int(health.rpartition(":")[2]), HEALTH, ask)

    with reserved_ports(2) as first:
        asyncio.run(story(f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"))


def test_the_label_of_the_node_chooses_the_isolation_also_later(host):
    async def published(api, wanted):
        async def look():
            found = (await api.list(RESOURCE_SLICE)).items
            return [device["name"] for slice_ in found for device in slice_["spec"]["devices"]] == wanted

        await until(look, f"{wanted} are published")

    async def story():
        api = await a_node({ISOLATION_LABEL: "channel"})
        async with imex_node(*options(host), api):
            await published(api, ["daemon-0"])
            await api.patch(NODE, "n1", None, {"metadata": {"labels": {ISOLATION_LABEL: None}}})
            await published(api, ["channel-0", "daemon-0"])

    asyncio.run(asyncio.wait_for(story(), PATIENCE))


@pytest.fixture
def quick_looks(monkeypatch):
    """A driver that is missing is looked for at once."""
    monkeypatch.setattr("rackloom.claim.node.imex.plugin.DRIVER_SECONDS", 0.02)


async def readiness(http, listen):
    """The answer to a readiness probe, and that of liveness, which must not depend on a driver."""
    ready, alive = [await http.get(f"http://{listen}/{page}") for page in ("readyz", "healthz")]
    assert alive.status_code == 200
    return ready.status_code, ready.text.strip()


async def until_ready(http, listen, reason=None):
    """Wait until the plugin is ready, or is not for `reason`."""

    async def look():
        code, text = await readiness(http, listen)
        return (code == 200) if reason is None else (code == 503 and reason in text)

    await until(look, f"ready, or not: {reason}")


async def devices(api):
    found = (await api.list(RESOURCE_SLICE)).items
    return [device["name"] for slice_ in found for device in slice_["spec"].get("devices", ())]


def test_a_driver_that_comes_later_or_becomes_newer_is_waited_for(host, quick_looks):
    loaded = (host / "proc/devices").read_text()
    fabric = (host / "fabric.json").read_text()
    (host / "proc/devices").write_text("Character devices:\n  1 mem\n\n")
    (host / "fabric.json").write_text('{"driverVersion": "565.57.01", "gpus": [{}]}')

    async def story(listen):
        api = await a_node()
        common, imex = options(host, listen=listen)
        async with (
            plugin_manager_on(host / "reg", api, "n1", timing=PluginManagerTiming(scan=0.01)) as kubelet,
            imex_node(common, imex, api) as node,
            httpx2.AsyncClient(timeout=PATIENCE) as http,
        ):
            await until_ready(http, listen, "lists no character device nvidia-caps-imex-channels")
            # Kubelet gives back claims of before, whether there is a driver or not.
            await kubelet.registered(IMEX_DRIVER)
            await node.publisher.published.wait()
            assert await devices(api) == []
            (host / "proc/devices").write_text(loaded)
            await until_ready(http, listen, "565.57.01 is older than 570.158.01")
            assert await devices(api) == []
            (host / "fabric.json").write_text(fabric)
            await until_ready(http, listen)

            async def published():
                return await devices(api) == ["channel-0", "daemon-0"]

            await until(published, "the devices are published")
            # The module is unloaded under the running plugin, as for an upgrade.
            (host / "proc/devices").write_text("Character devices:\n  1 mem\n\n")
            await until_ready(http, listen, "lists no character device nvidia-caps-imex-channels")

            async def withdrawn():
                return await devices(api) == []

            await until(withdrawn, "nothing is published")

    with reserved_ports(1) as first:
        asyncio.run(asyncio.wait_for(story(f"127.0.0.1:{first}"), PATIENCE))


def test_a_fabric_file_that_cannot_be_used_is_refused_at_the_start(host):
    (host / "fabric.json").write_text("{")

    async def start():
        async with imex_node(*options(host), await a_node()):
            raise AssertionError("this node cannot serve IMEX")

    with pytest.raises(Refused, match="cannot use fabric file"):
        asyncio.run(start())


def test_it_is_ready_while_kubelet_has_it_registered(host, quick_looks):
    async def story(listen):
        api = await a_node()
        common, imex = options(host, listen=listen)
        async with imex_node(common, imex, api) as node, httpx2.AsyncClient(timeout=PATIENCE) as http:
            await node.publisher.published.wait()
            assert await readiness(http, listen) == (503, "kubelet has not registered the plugin yet")
            async with plugin_manager_on(
                host / "reg", api, "n1", timing=PluginManagerTiming(scan=0.01)
            ) as kubelet:
                await kubelet.registered(IMEX_DRIVER)
                await until_ready(http, listen)
            async with grpc.aio.insecure_channel(f"unix:{node.registrar_socket}") as channel:
                stub = registration_pb2_grpc.RegistrationStub(channel)
                refusal = registration_pb2.RegistrationStatus(
                    plugin_registered=False, error="no such version"
                )
                await stub.NotifyRegistrationStatus(refusal)
            reason = "kubelet does not register the plugin: no such version"
            assert await readiness(http, listen) == (503, reason)
            node.registrar_socket.unlink()
            assert "is gone" in (await http.get(f"http://{listen}/readyz")).text

    with reserved_ports(1) as first:
        asyncio.run(asyncio.wait_for(story(f"127.0.0.1:{first}"), PATIENCE))


async def until_imex_stopped(host, announce):
    common, imex = options(host)
    await serve_plugin(common, IMEX_DRIVER, partial(imex_node, common, imex), announce)


def test_it_ends_in_good_order_when_it_is_told_to(host, monkeypatch):
    lines = []

    async def story():
        api = await a_node()
        monkeypatch.setattr("rackloom.app.node.process.connect", lambda *_, **__: nullcontext(api))

        def announce(line):
            lines.append(line)
            os.kill(os.getpid(), signal.SIGTERM)

        await until_imex_stopped(host, announce)
        assert list((host / "reg").iterdir()) == []

    asyncio.run(asyncio.wait_for(story(), PATIENCE))
    assert lines == ["rackloom: serving compute-domain.nvidia.com on node n1"]


def test_it_ends_with_the_reason_when_a_part_of_it_fails(host, monkeypatch):
    async def story():
        api = await a_node()
        monkeypatch.setattr("rackloom.app.node.process.connect", lambda *_, **__: nullcontext(api))
        monkeypatch.setattr(ImexPlugin, "run", fail)
        await until_imex_stopped(host, lambda _: None)

    async def fail(*_):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(asyncio.wait_for(story(), PATIENCE))


@pytest.mark.slow
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
