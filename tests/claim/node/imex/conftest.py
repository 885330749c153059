"""A node with IMEX, and the part of the cluster around it that brings its daemons."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

from rackloom.claim.kube.api import NotFound
from rackloom.claim.node.cdi import CdiDirectory, DriverSpec, ImexKernel, daemon_edits
from rackloom.claim.node.fabric import FabricMonitor, read_declared_fabric
from rackloom.claim.node.imex.devices import ImexSettings
from rackloom.claim.node.imex.domains import HostImexDaemon
from rackloom.claim.node.imex.plugin import ImexPlugin
from rackloom.core.cluster import device_configs, names
from rackloom.core.cluster.domain_objects import ComputeDomainClique, DaemonInfo, Readiness, clique_json
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, COMPUTE_DOMAIN_CLIQUE, NODE, RESOURCE_CLAIM
from rackloom.lab.nodes.dra_manager import PodClaim, pod_claim

CLUSTER = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"
CLIQUE = f"{CLUSTER}.1"
GPUS = [
    {
        "uuid": f"GPU-0000000{module}",
        "chassisSerial": "1820325190001",
        "slot": 3,
        "tray": 2,
        "moduleId": module,
        "fabricGuid": f"0x7c0a00000000000{module}",
        "health": "Healthy",
    }
    for module in (1, 2, 3, 4)
]
PROC_DEVICES = (
    "Character devices:\n  1 mem\n235 nvidia-caps-imex-channels\n236 nvidia-caps\n\nBlock devices:\n  8 sd\n"
)
CAPABILITY = "DeviceFileMinor: 512\nDeviceFileMode: 438\nDeviceFileModify: 1\n"


class ImexKit:
    cluster, clique, namespace = CLUSTER, CLIQUE, "rackloom-imex"

    def __init__(self, kit: Any, root: Path) -> None:
        self.kit, self.api, self.root = kit, kit.api, root
        (root / "devices").write_text(PROC_DEVICES)
        (root / "capability").write_text(CAPABILITY)
        self.declare(clusterUUID=CLUSTER, cliqueId=1, driverVersion="580.95.05", gpus=GPUS)

    def declare(self, **fabric: Any) -> None:
        (self.root / "fabric.json").write_text(json.dumps(fabric))

    def install_driver(self) -> None:
        """Write the driver's files that a daemon gets."""
        for path in ("usr/bin/nvidia-imex", "usr/lib64/libnvidia-ml.so.580.95.05"):
            file = self.root / "driver" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()

    def view(self) -> FabricMonitor:
        return FabricMonitor(lambda: read_declared_fabric(self.root / "fabric.json"), lambda: self.kit.now)

    def settings(self, **changes: Any) -> ImexSettings:
        plain = {
            "node": self.kit.node,
            "namespaces": (self.namespace,),
            "domains": self.kit.places.home(names.IMEX_DRIVER) / "domains",
            "kernel": ImexKernel(
                proc_devices=self.root / "devices", imex_capability=self.root / "capability"
            ),
        }
        return ImexSettings(**{**plain, **changes})

    def plugin(self, api: Any = None, **changes: Any) -> ImexPlugin:
        host = HostImexDaemon(root=self.root)
        cdi = CdiDirectory(self.kit.places.cdi, names.IMEX_DRIVER)
        driver = DriverSpec(cdi, daemon_edits, base=self.root / "driver", required=False)
        return ImexPlugin(api or self.api, self.settings(**changes), self.view(), host, driver)

    async def domain(self, name: str = "cd", namespace: str = "default") -> str:
        """Make a ComputeDomain. Returns its UID."""
        spec = {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": "t"}}}
        made = await self.api.create(
            COMPUTE_DOMAIN,
            {
                "apiVersion": names.API_VERSION,
                "kind": "ComputeDomain",
                "metadata": {"name": name, "namespace": namespace},
                "spec": spec,
            },
        )
        return str(made["metadata"]["uid"])

    async def channel(self, name: str, uid: str, mode: str | None = None, **others: Any) -> PodClaim:
        config = {"apiVersion": names.API_VERSION, "kind": "ComputeDomainChannelConfig", "domainID": uid}
        parameters = config if mode is None else {**config, "allocationMode": mode}
        return await self.claim(name, "default", names.CHANNEL_DEVICE, parameters, **others)

    async def daemon(self, name: str, uid: str, namespace: str = "rackloom-imex") -> PodClaim:
        parameters = device_configs.imex_config_json(device_configs.DaemonConfig(domain_id=uid))
        return await self.claim(name, namespace, names.DAEMON_DEVICE, parameters)

    async def isolated(self, name: str, uid: str, channel: int, **metadata: Any) -> PodClaim:
        parameters = device_configs.imex_config_json(device_configs.ChannelConfig(domain_id=uid))
        device, pool = names.channel_device_name(channel), names.channel_pool_name(CLIQUE)
        return await self.claim(name, "default", device, parameters, pool=pool, **metadata)

    async def claim(
        self, name: str, namespace: str, device: str, parameters: Any, pool: str = "", **metadata: Any
    ) -> PodClaim:
        driver = names.IMEX_DRIVER
        result = {"request": "r", "driver": driver, "pool": pool or self.kit.node, "device": device}
        config = {"source": "FromClaim", "opaque": {"driver": driver, "parameters": parameters}}
        made = await self.api.create(
            RESOURCE_CLAIM,
            {
                "apiVersion": RESOURCE_CLAIM.api_version,
                "kind": "ResourceClaim",
                "metadata": {"name": name, "namespace": namespace, **metadata},
                "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "c"}}]}},
            },
        )
        status = {"allocation": {"devices": {"results": [result], "config": [config]}}}
        return pod_claim(
            await self.api.replace(RESOURCE_CLAIM, {**made, "status": status}, subresource="status")
        )

    async def ready(self, uid: str, *, status: Readiness = Readiness.READY) -> None:
        """The daemon of a ComputeDomain reports READY on this node."""
        entry = DaemonInfo(node_name=self.kit.node, ip_address="10.0.0.1", clique_id=CLIQUE, status=status)
        value = ComputeDomainClique(compute_domain=uid, clique_id=CLIQUE, daemons=(entry,))
        try:
            read = await self.api.get(COMPUTE_DOMAIN_CLIQUE, value.name, self.namespace)
            await self.api.replace(COMPUTE_DOMAIN_CLIQUE, clique_json(value, self.namespace, read))
        except NotFound:
            await self.api.create(COMPUTE_DOMAIN_CLIQUE, clique_json(value, self.namespace))

    async def label(self) -> str | None:
        node = await self.api.get(NODE, self.kit.node)
        found = node["metadata"].get("labels", {}).get(names.COMPUTE_DOMAIN_LABEL)
        return None if found is None else str(found)

    async def labelled(self, uid: str) -> None:
        """Return once the node has the label, as the DaemonSet controller sees it."""

        async def look() -> bool:
            return await self.label() == uid

        await until(look, f"the node has the label of {uid}")

    def edits(self, uid: str) -> Any:
        """The containerEdits of a claim's CDI spec."""
        spec = self.kit.places.cdi / f"k8s.{names.IMEX_DRIVER}-claim_{uid}.yaml"
        return json.loads(spec.read_bytes())["devices"][0]["containerEdits"]


@pytest.fixture
def imex(kit: Any, tmp_path: Path) -> ImexKit:
    return ImexKit(kit, tmp_path)


@pytest.fixture
def make_imex(kit: Any, tmp_path: Path) -> Callable[[], ImexKit]:
    """Nodes that have nothing in common."""
    numbers = itertools.count()

    def make() -> ImexKit:
        root = tmp_path / f"node-{next(numbers)}"
        root.mkdir()
        return ImexKit(type(kit)(root), root)

    return make
