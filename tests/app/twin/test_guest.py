"""Simulated trays in a foreign cluster: marked, used, refused if unwanted, and gone at the end."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
import yaml
from tests.proxies import with_dead_proxies
from tests.waiting import until

from rackloom.app.demo.story import example_directory
from rackloom.app.home import Home
from rackloom.app.process import background_task
from rackloom.app.twin.cluster import installed_device_classes, kubernetes_controllers, run_together
from rackloom.app.twin.control import tray_reports
from rackloom.app.twin.guest import SITE_LABEL, guest_racks, site_id
from rackloom.app.twin.site import TwinSite, open_embedded_home
from rackloom.app.twin.up import served_api
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.client import connect
from rackloom.core.cluster.names import GPU_CLIQUE_LABEL, GPU_DRIVER, SIMULATED_LABEL
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    CRD,
    DEVICE_CLASS,
    LEASE,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_SLICE,
    Object,
)
from rackloom.errors import Refused
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.kubelets import LEASE_NAMESPACE
from rackloom.lab.scenario.controllers import real_clock_and_random

TRAYS = 18
TOLERATION = {"key": SIMULATED_LABEL, "operator": "Exists", "effect": "NoSchedule"}
OTHERS_NODE: Object = {"metadata": {"name": "theirs", "labels": {"kubernetes.io/os": "linux"}}}


@asynccontextmanager
async def their_cluster(folder: Path) -> AsyncIterator[tuple[FakeKube, KubeApi]]:
    """Somebody's cluster with a node and a DeviceClass, and an administrator's client over TLS."""
    kube = FakeKube(seed=1, now=time.time)
    admin = DirectApi(kube, "admin")
    await admin.create(NODE, OTHERS_NODE)
    await admin.create(DEVICE_CLASS, {"metadata": {"name": "dranet.net"}, "spec": {}})
    kubeconfig = folder / "kubeconfig"
    controllers = run_together(*kubernetes_controllers(kube, real_clock_and_random()))
    async with (
        background_task(controllers),
        served_api(kube, "admin", kubeconfig),
        connect(kubeconfig) as api,
    ):
        yield kube, api


@asynccontextmanager
async def racks(folder: Path, seed: str = "7") -> AsyncIterator[TwinSite]:
    opened = open_embedded_home(Home(folder), racks=1, profile="gb200-nvl72", seed=seed, log=lambda _: None)
    async with opened as (_, twin):
        yield twin


async def everything(api: KubeApi) -> set[tuple[str, str]]:
    kinds = (NODE, RESOURCE_SLICE, DEVICE_CLASS, CRD, NAMESPACE)
    return {
        (kind.kind, item["metadata"]["name"]) for kind in kinds for item in (await api.list(kind)).items
    } | {("Lease", item["metadata"]["name"]) for item in (await api.list(LEASE, LEASE_NAMESPACE)).items}


def workload() -> tuple[Object, Object]:
    text = (example_directory("imex-minimal") / "compute-domain.yaml").read_text()
    domain, pod = yaml.safe_load_all(text)
    for made in (domain, pod):
        made["metadata"]["namespace"] = "default"
    pod["spec"]["tolerations"] = [TOLERATION]
    return domain, pod


@pytest.mark.slow
def test_trays_work_in_the_cluster_and_leave_nothing(tmp_path: Path) -> None:
    announced: list[str] = []

    async def run() -> None:
        async with their_cluster(tmp_path) as (_, api), racks(tmp_path / "home") as twin:
            before = await everything(api)
            domain, pod = workload()

            async def published() -> bool:
                nodes = (await api.list(NODE, labels=f"{SIMULATED_LABEL}=true,{GPU_CLIQUE_LABEL}")).items
                slices = (await api.list(RESOURCE_SLICE, fields=f"spec.driver={GPU_DRIVER}")).items
                return len(nodes) == len(slices) == TRAYS

            async def is_ready() -> bool:
                found = await api.get(COMPUTE_DOMAIN, domain["metadata"]["name"], "default")
                return found.get("status", {}).get("status") == "Ready"

            async def runs() -> bool:
                found = await api.get(POD, pod["metadata"]["name"], "default")
                return found["status"].get("phase") == "Running"

            async def is_gone() -> bool:
                return not (await api.list(COMPUTE_DOMAIN)).items

            async with guest_racks(twin, tmp_path / "files", api, announced.append) as guests:
                await until(published, "every tray is published with its clique")
                (node,) = (await api.list(NODE, labels=f"{SITE_LABEL}={site_id(twin)}")).items[:1]
                taint = {"key": SIMULATED_LABEL, "value": "true", "effect": "NoSchedule"}
                assert node["spec"]["taints"] == [taint]
                classes = (await api.list(DEVICE_CLASS, labels=SITE_LABEL)).items
                assert "dranet.net" not in {klass["metadata"]["name"] for klass in classes}
                await api.create(COMPUTE_DOMAIN, domain)
                await api.create(POD, pod)
                await until(runs, "the pod runs on a simulated tray")
                await until(is_ready, "its ComputeDomain is Ready")
                await api.delete(POD, pod["metadata"]["name"], "default")
                await api.delete(COMPUTE_DOMAIN, domain["metadata"]["name"], "default")
                await until(is_gone, "the ComputeDomain is taken apart")
                assert not guests.nodes.work.done()
                assert not guests.controlling.done()
            assert await everything(api) == before

    uvloop.run(run())
    assert announced == []


@pytest.mark.slow
def test_what_others_made_of_our_types_stays_and_is_named(tmp_path: Path) -> None:
    announced: list[str] = []

    async def run() -> None:
        async with their_cluster(tmp_path) as (_, api), racks(tmp_path / "home") as twin:
            domain, _ = workload()
            async with guest_racks(twin, tmp_path / "files", api, announced.append):
                await api.create(COMPUTE_DOMAIN, domain)
            kinds = {item["spec"]["names"]["kind"] for item in (await api.list(CRD)).items}
            assert "ComputeDomain" in kinds
            assert await api.get(COMPUTE_DOMAIN, domain["metadata"]["name"], "default")
            assert {item["metadata"]["name"] for item in (await api.list(NODE)).items} == {"theirs"}

    uvloop.run(run())
    assert [
        line for line in announced if "computedomains.resource.nvidia.com stays: 1 computedomains" in line
    ]


@pytest.mark.slow
def test_what_a_killed_guest_left_is_taken_over_and_removed(tmp_path: Path) -> None:
    async def run() -> None:
        async with their_cluster(tmp_path) as (_, api), racks(tmp_path / "home") as twin:
            before = await everything(api)
            labels = {SITE_LABEL: site_id(twin), SIMULATED_LABEL: "true"}
            (klass, *_) = installed_device_classes()
            await api.create(DEVICE_CLASS, {**klass, "metadata": {**klass["metadata"], "labels": labels}})
            async with guest_racks(twin, tmp_path / "files", api, lambda _: None) as guests:
                await guests.nodes.nodes.up.wait()
            assert await everything(api) == before

    uvloop.run(run())


def test_a_proxy_is_not_asked_for_a_cluster_on_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_dead_proxies(monkeypatch)

    async def run() -> list[Object]:
        async with their_cluster(tmp_path) as (_, api):
            return list((await api.list(NODE)).items)

    assert [node["metadata"]["name"] for node in uvloop.run(run())] == ["theirs"]


Spoil = Callable[[FakeKube, KubeApi, TwinSite], Any]


async def with_real_gpus(_: FakeKube, api: KubeApi, __: TwinSite) -> None:
    pool = {"name": "theirs", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": GPU_DRIVER, "nodeName": "theirs", "pool": pool, "devices": [{"name": "gpu-0"}]}
    await api.create(RESOURCE_SLICE, {"metadata": {"name": "theirs"}, "spec": spec})


async def with_devices_of_no_node(_: FakeKube, api: KubeApi, __: TwinSite) -> None:
    pool = {"name": "theirs", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": GPU_DRIVER, "allNodes": True, "pool": pool, "devices": [{"name": "gpu-0"}]}
    await api.create(RESOURCE_SLICE, {"metadata": {"name": "theirs"}, "spec": spec})


async def with_a_node_of_our_name(_: FakeKube, api: KubeApi, twin: TwinSite) -> None:
    await api.create(NODE, {"metadata": {"name": tray_reports(twin)[0].node}})


async def without_rights(kube: FakeKube, _: KubeApi, __: TwinSite) -> None:
    kube.faults.add(RequestFault(verb="list", code=403, reason="Forbidden"))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (with_real_gpus, "devices of gpu.nvidia.com on node theirs, which is not simulated.*of its own"),
        (with_devices_of_no_node, "devices of gpu.nvidia.com for several nodes: its.*of its own"),
        (with_a_node_of_our_name, "a node node-[0-9a-f]+ that this site did not make.*--seed"),
        (without_rights, "forbids to list nodes and resource slices.*cluster administrator"),
    ],
)
def test_a_cluster_with_something_foreign_is_refused_untouched(
    tmp_path: Path, spoil: Spoil, why: str
) -> None:
    async def run() -> None:
        async with their_cluster(tmp_path) as (kube, api), racks(tmp_path / "home") as twin:
            await spoil(kube, api, twin)
            version = kube.store.version
            with pytest.raises(Refused, match=why):
                async with guest_racks(twin, tmp_path / "files", api, lambda _: None):
                    pass
            assert kube.store.version == version
            kube.faults.clear()

    uvloop.run(run())
