"""A stand-in for NVIDIA's DRA driver on one real node, as kubelet, the API server and the disk see it.

python -m tests.node.nvidia_driver DRIVER NODE ROOT KUBECONFIG RELEASE

It registers with the node's kubelet, publishes slices, answers the calls for claims, labels the node, writes
CDI files, and keeps the checkpoint of release 0.4 or 0.5, all from the facts of their formats. NVIDIA's own
program is not here, so a test with this one does not show what happens between these edges. `ROOT` is the
root of the node's files, as this process sees it. SIGTERM ends it as the driver ends: its registration
socket goes, and its slices, checkpoint and CDI files stay.
"""

import asyncio
import fcntl
import hashlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from tests.claim.node.takeover.nvidia_files import COMPLETED, STARTED, checkpoint_file
from tests.node.workloads import IMAGE

from rackloom.claim.kube.api import KubeApi, KubeError
from rackloom.claim.kube.client import connect
from rackloom.claim.node.wire import dra_v1_pb2, dra_v1_pb2_grpc, registration_pb2, registration_pb2_grpc
from rackloom.core.cluster.names import COMPUTE_DOMAIN_LABEL, GPU_DRIVER, IMEX_DRIVER
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DEPLOYMENT,
    NODE,
    RESOURCE_CLAIM,
    RESOURCE_SLICE,
)

NAMESPACE = "nvidia-dra-driver-gpu"
"""The namespace of NVIDIA's chart in its guide, and of its IMEX daemons."""
ATTEMPT_SECONDS = 0.5
PREPARE_SECONDS = 40.0
CHANNELS = "nvidia-caps-imex-channels"
GPUS = 8
Value = dict[str, Any]


MPS_PROGRAM = "usr/bin/nvidia-cuda-mps-control"
MPS_PIPES = "/tmp/nvidia-mps"


class NotYet(Exception):
    """Another attempt may succeed."""


class Plugin:
    """One of the two plugins."""

    def __init__(self, api: KubeApi, driver: str, node: str, root: Path, release: str) -> None:
        self.api, self.driver, self.node, self.root, self.release = api, driver, node, root, release
        self.home = root / f"var/lib/kubelet/plugins/{driver}"
        self.home.mkdir(parents=True, exist_ok=True)
        self.cdi = root / "run/cdi"
        self.cdi.mkdir(parents=True, exist_ok=True)
        self.vendor = f"k8s.{driver}"
        self.file = self.home / "checkpoint.json"
        self.attempts = asyncio.Lock()
        self.claims = self._read()
        self._write()

    # The checkpoint.

    def _read(self) -> dict[str, Value]:
        """Entries of another boot are forgotten, as the driver forgets them."""
        if not self.file.exists():
            return {}
        part = json.loads(self.file.read_bytes())["v2"]
        return part.get("preparedClaims", {}) if part["nodeBootID"] == self.boot_id else {}

    @property
    def boot_id(self) -> str:
        return (self.root / "proc/sys/kernel/random/boot_id").read_text().strip()

    def _write(self) -> None:
        partial = self.file.with_suffix(".tmp")
        partial.write_bytes(checkpoint_file(self.claims, self.boot_id))
        partial.replace(self.file)

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Held for one attempt, and not between two: a channel waits for its daemon's claim."""
        async with self.attempts:
            with (self.home / "pu.lock").open("w") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                yield

    # Calls of kubelet.

    async def prepare(self, ref: Any) -> list[Value]:
        """The devices of a claim, as the checkpoint lists them. Raises `NotYet` for a while."""
        known = self.claims.get(ref.uid)
        if known is None or known["checkpointState"] != COMPLETED:
            found = await self.api.get(RESOURCE_CLAIM, ref.name, ref.namespace)
            assert found["metadata"]["uid"] == ref.uid
            async with self._locked():
                known = await self._prepare_new(ref, found["status"])
        parts = [part for group in known["preparedDevices"] for part in group["devices"]]
        return [device["device"] for part in parts for device in part.values() if device]

    async def _prepare_new(self, ref: Any, status: Value) -> Value:
        named = {"name": ref.name, "namespace": ref.namespace} if self.driver == IMEX_DRIVER else {}
        self.claims[ref.uid] = {"checkpointState": STARTED, "status": status, **named}
        self._write()
        results = [
            part for part in status["allocation"]["devices"]["results"] if part["driver"] == self.driver
        ]
        made = (
            await self._gpus(ref, status, results)
            if self.driver == GPU_DRIVER
            else await self._imex(ref, status, results)
        )
        self.claims[ref.uid] = {
            "checkpointState": COMPLETED,
            "status": status,
            "preparedDevices": [made],
            **named,
        }
        self._write()
        return self.claims[ref.uid]

    async def unprepare(self, ref: Any) -> None:
        known = self.claims.get(ref.uid)
        if known is None:
            return
        async with self._locked():
            for group in known.get("preparedDevices", ()):
                if group["configState"].get("Type") == "channel":
                    await self.api.patch(NODE, self.node, None, _labels(None))
            (self.cdi / f"{self.vendor}-claim_{ref.uid}.yaml").unlink(missing_ok=True)
            del self.claims[ref.uid]
            self._write()

    def _listed(self, ref: Any, result: Mapping[str, Any], *shared: str) -> Value:
        own = f"{self.vendor}/claim={ref.uid}-{result['device']}"
        return {
            "Requests": [result["request"]],
            "PoolName": result["pool"],
            "DeviceName": result["device"],
            "CDIDeviceIDs": [*shared, own],
        }

    def _spec(self, name: str, class_: str, devices: Mapping[str, Any]) -> None:
        spec = {
            "cdiVersion": "0.5.0",
            "kind": f"{self.vendor}/{class_}",
            "devices": [{"name": device, "containerEdits": edits} for device, edits in devices.items()],
        }
        (self.cdi / f"{self.vendor}-{name}.yaml").write_text(json.dumps(spec))

    async def _gpus(self, ref: Any, status: Value, results: list[Value]) -> Value:
        edits, parts = {}, []
        configs = [
            entry["opaque"]["parameters"] for entry in status["allocation"]["devices"].get("config", ())
        ]
        uses_mps = any(config.get("sharing", {}).get("strategy") == "MPS" for config in configs)
        uuids = [self._uuid(int(result["device"].removeprefix("gpu-"))) for result in results]
        daemon = await self._start_mps(ref.uid, uuids) if uses_mps else ""
        for result in results:
            minor = int(result["device"].removeprefix("gpu-"))
            nodes = [_node(f"/dev/nvidia{minor}", 195, minor), _node("/dev/nvidiactl", 195, 255)]
            edits[f"{ref.uid}-{result['device']}"] = {
                "env": ["NVIDIA_VISIBLE_DEVICES=void"],
                "deviceNodes": nodes,
                **(self._mps_edits(daemon) if daemon else {}),
            }
            gpu = {"info": {"uuid": self._uuid(minor)}, "device": self._listed(ref, result)}
            parts.append({"gpu": gpu, "mig": None})
        self._spec(f"claim_{ref.uid}", "claim", edits)
        recorded = {"mpsControlDaemonID": daemon} if daemon or self.release == "0.4" else {}
        return {"devices": parts, "configState": recorded}

    async def _start_mps(self, uid: str, uuids: list[str]) -> str:
        """Start an MPS daemon in a Deployment, with a tmpfs that is mounted on the host. Returns its id."""
        made = f"{uid}-{hashlib.sha256(','.join(uuids).encode()).hexdigest()[:5]}"
        for name in ("shm", "pipe", "log"):
            (self.home / "mps" / made / name).mkdir(parents=True, exist_ok=True)
        memory = f"/var/lib/kubelet/plugins/{self.driver}/mps/{made}/shm"
        host = ("nsenter", "--mount", "--target", self.root.parts[2])
        options = "rw,nosuid,nodev,noexec,relatime,size=65536k"
        mount = await asyncio.create_subprocess_exec(
            *host, "mount", "-t", "tmpfs", "-o", options, "shm", memory
        )
        assert await mount.wait() == 0
        (self.home / "mps" / made / "shm/segment").write_bytes(b"of a client")
        await self.api.create(DEPLOYMENT, mps_deployment(made, self.node, ",".join(uuids)))
        name = f"mps-control-daemon-{made}"
        while not (await self.api.get(DEPLOYMENT, name, NAMESPACE)).get("status", {}).get("readyReplicas"):
            await asyncio.sleep(ATTEMPT_SECONDS)
        return made

    def _mps_edits(self, daemon: str) -> Value:
        home, client = f"/var/lib/kubelet/plugins/{self.driver}/mps/{daemon}", f"/{MPS_PROGRAM}"
        mounts = [
            _mount(f"{home}/shm", "/dev/shm", "rw"),
            _mount(f"{home}/pipe", MPS_PIPES, "rw"),
            _mount(client, client, "ro"),
        ]
        return {
            "env": ["NVIDIA_VISIBLE_DEVICES=void", f"CUDA_MPS_PIPE_DIRECTORY={MPS_PIPES}"],
            "mounts": mounts,
        }

    def _uuid(self, minor: int) -> str:
        table = (self.root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.gpus").read_text().splitlines()[1:]
        return next(row.split("\t")[1] for row in table if row.split("\t")[0] == str(minor))

    async def _imex(self, ref: Any, status: Value, results: list[Value]) -> Value:
        (result,) = results
        configs = status["allocation"]["devices"]["config"]
        config = next(entry["opaque"]["parameters"] for entry in configs)
        domain = config["domainID"]
        kind = "channel" if config["kind"] == "ComputeDomainChannelConfig" else "daemon"
        if kind == "channel":
            await self._join(domain)
            edits = {"deviceNodes": [_node(f"/dev/{CHANNELS}/channel0", 509, 0)]}
            listed = self._listed(ref, result)
        else:
            edits = await self._daemon(domain)
            listed = self._listed(ref, result, f"{self.vendor}/device=all")
        self._spec(f"claim_{ref.uid}", "claim", {f"{ref.uid}-{result['device']}": edits})
        part = {"info": {"id": 0}, "device": listed}
        both = {name: part if name == kind else None for name in ("channel", "daemon")}
        return {"devices": [both], "configState": {"Type": kind, "ComputeDomain": domain}}

    async def _join(self, domain: str) -> None:
        """Label the node, and wait until its daemon is Ready."""
        node = await self.api.get(NODE, self.node)
        label = node["metadata"]["labels"].get(COMPUTE_DOMAIN_LABEL)
        if label is None:
            await self.api.patch(NODE, self.node, None, _labels(domain))
        elif label != domain:
            raise NotYet(f"the node is of {label}")
        selector = f"{COMPUTE_DOMAIN_LABEL}={domain}"
        cliques = await self.api.list(COMPUTE_DOMAIN_CLIQUE, NAMESPACE, labels=selector)
        ready = {
            daemon["nodeName"]
            for clique in cliques.items
            for daemon in clique.get("daemons", ())
            if daemon["status"] == "Ready"
        }
        if self.node not in ready:
            raise NotYet("the daemon is not Ready")

    async def _daemon(self, domain: str) -> Value:
        (found,) = [
            item for item in (await self.api.list(COMPUTE_DOMAIN)).items if item["metadata"]["uid"] == domain
        ]
        node = await self.api.get(NODE, self.node)
        (self.home / f"domains/{domain}").mkdir(parents=True, exist_ok=True)
        files = ["usr/bin/nvidia-imex", "usr/bin/nvidia-imex-ctl"]
        mounts = [_mount(f"/{file}", f"/{file}", "ro") for file in files]
        self._spec("device_base", "device", {"all": {"mounts": mounts}})
        meta = found["metadata"]
        env = {
            "CLIQUE_ID": node["metadata"]["labels"]["nvidia.com/gpu.clique"],
            "COMPUTE_DOMAIN_UUID": domain,
            "COMPUTE_DOMAIN_NAME": meta["name"],
            "COMPUTE_DOMAIN_NAMESPACE": meta["namespace"],
        }
        home = f"/var/lib/kubelet/plugins/{self.driver}/domains/{domain}"
        return {
            "env": [f"{name}={value}" for name, value in env.items()],
            "mounts": [_mount(home, "/imexd", "rw")],
            "deviceNodes": [_node("/dev/nvidia-caps/nvidia-cap323", 508, 323)],
        }

    # Publishing.

    async def publish(self) -> None:
        """Publish one slice in the node's pool. An existing slice of any owner gets a newer generation."""
        found = await self.api.list(
            RESOURCE_SLICE, fields=f"spec.driver={self.driver},spec.nodeName={self.node}"
        )
        for old in found.items:
            await self.api.delete(RESOURCE_SLICE, old["metadata"]["name"])
        generation = max((item["spec"]["pool"]["generation"] for item in found.items), default=0) + 1
        node = await self.api.get(NODE, self.node)
        owner = {
            "apiVersion": "v1",
            "kind": "Node",
            "name": self.node,
            "uid": node["metadata"]["uid"],
            "controller": True,
        }
        pool = {"name": self.node, "generation": generation, "resourceSliceCount": 1}
        slice_ = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"generateName": f"00000-{self.driver}-{self.node}-", "ownerReferences": [owner]},
            "spec": {"driver": self.driver, "nodeName": self.node, "pool": pool, "devices": self._devices()},
        }
        await self.api.create(RESOURCE_SLICE, slice_)

    def _devices(self) -> list[Value]:
        if self.driver == IMEX_DRIVER:
            return [
                {"name": f"{kind}-0", "attributes": {"type": {"string": kind}, "id": {"int": 0}}}
                for kind in ("channel", "daemon")
            ]
        return [
            {
                "name": f"gpu-{minor}",
                "attributes": {
                    "type": {"string": "gpu"},
                    "uuid": {"string": self._uuid(minor)},
                    "productName": {"string": "NVIDIA H100 80GB HBM3"},
                },
                "capacity": {"memory": {"value": "81559Mi"}},
            }
            for minor in range(GPUS)
        ]


def mps_deployment(daemon: str, node: str, gpus: str) -> Value:
    """The Deployment of an MPS daemon: in the host's root and among its processes, with the claim's files."""
    name, home = f"mps-control-daemon-{daemon}", f"/var/lib/kubelet/plugins/{GPU_DRIVER}/mps/{daemon}"
    start = f"busybox chroot /driver-root /{MPS_PROGRAM} -d && exec busybox sleep 1000000"
    places = {"driver-root": "/", "shm": f"{home}/shm", "pipe": f"{home}/pipe"}
    inside = {"driver-root": "", "shm": "/dev/shm", "pipe": MPS_PIPES}
    container = {
        "name": "mps-control-daemon",
        "image": IMAGE,
        "securityContext": {"privileged": True},
        "command": ["busybox", "sh", "-c", start],
        "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": gpus}],
        "volumeMounts": [
            {"name": place, "mountPath": f"/driver-root{path}"} for place, path in inside.items()
        ],
    }
    spec = {
        "nodeName": node,
        "hostPID": True,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": place, "hostPath": {"path": path}} for place, path in places.items()],
    }
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def _node(path: str, major: int, minor: int) -> Value:
    return {"path": path, "type": "c", "major": major, "minor": minor, "fileMode": 0o666}


def _mount(host: str, container: str, mode: str) -> Value:
    return {"hostPath": host, "containerPath": container, "options": [mode, "nosuid", "nodev", "bind"]}


def _labels(domain: str | None) -> Value:
    return {"metadata": {"labels": {COMPUTE_DOMAIN_LABEL: domain}}}


# The gRPC services.


class Services(dra_v1_pb2_grpc.DRAPluginServicer, registration_pb2_grpc.RegistrationServicer):
    """The services that kubelet calls."""

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin

    async def GetInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        endpoint = f"/var/lib/kubelet/plugins/{self.plugin.driver}/dra.sock"
        return registration_pb2.PluginInfo(
            type="DRAPlugin", name=self.plugin.driver, endpoint=endpoint, supported_versions=["v1.DRAPlugin"]
        )

    async def NotifyRegistrationStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        _report(f"registered {request.plugin_registered} {request.error}")
        return registration_pb2.RegistrationStatusResponse()

    async def NodePrepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = dra_v1_pb2.NodePrepareResourcesResponse()
        for ref in request.claims:
            answer.claims[ref.uid].CopyFrom(await self._prepared(ref))
        return answer

    async def _prepared(self, ref: Any) -> Any:
        why = ""
        for _ in range(int(PREPARE_SECONDS / ATTEMPT_SECONDS)):
            try:
                devices = await self.plugin.prepare(ref)
            except (NotYet, KubeError) as error:
                why = str(error)
                await asyncio.sleep(ATTEMPT_SECONDS)
                continue
            return dra_v1_pb2.NodePrepareResourceResponse(
                devices=[
                    dra_v1_pb2.Device(
                        request_names=[name.partition("/")[0] for name in device["Requests"]],
                        pool_name=device["PoolName"],
                        device_name=device["DeviceName"],
                        cdi_device_ids=device["CDIDeviceIDs"],
                    )
                    for device in devices
                ]
            )
        return dra_v1_pb2.NodePrepareResourceResponse(error=why)

    async def NodeUnprepareResources(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = dra_v1_pb2.NodeUnprepareResourcesResponse()
        for ref in request.claims:
            await self.plugin.unprepare(ref)
            answer.claims[ref.uid].CopyFrom(dra_v1_pb2.NodeUnprepareResourceResponse())
        return answer


def _report(event: str) -> None:
    sys.stdout.write(f"{event}\n")
    sys.stdout.flush()


async def serve(driver: str, node: str, root: Path, kubeconfig: Path, release: str) -> None:
    async with connect(kubeconfig) as api:
        plugin = Plugin(api, driver, node, root, release)
        services = Services(plugin)
        registry = root / f"var/lib/kubelet/plugins_registry/{driver}-reg.sock"
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        servers = []
        for path, add in (
            (plugin.home / "dra.sock", dra_v1_pb2_grpc.add_DRAPluginServicer_to_server),
            (registry, registration_pb2_grpc.add_RegistrationServicer_to_server),
        ):
            path.unlink(missing_ok=True)
            server = grpc.aio.server()
            add(services, server)
            server.add_insecure_port(f"unix:{path}")
            await server.start()
            servers.append(server)
        await plugin.publish()
        _report("published")
        await ended.wait()
        registry.unlink(missing_ok=True)
        for server in servers:
            await server.stop(0)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5]))
