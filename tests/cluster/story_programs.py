"""The programs of this project in the containers of simulated pods, with the rights of their pods.

The containers' arguments select the program. Every program has the bound token of its pod, and a daemon has
the environment that its claim's CDI spec gives it. Only nvidia-imex is a stand-in. The plugins of other
drivers do nothing here.
"""

import asyncio
import base64
import contextlib
import random
import signal
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.cluster.control_plane import ControlPlane
from tests.cluster.policies import DAEMONS, DRIVER
from tests.cluster.story_trays import Tray
from tests.lab.imex.loopback import LoopbackImexChild, LoopbackImexControl

from rackloom.app.controller import Leadership
from rackloom.app.imex import member_from_environment
from rackloom.app.node.imex import ImexOptions, imex_node
from rackloom.app.node.process import NodeOptions
from rackloom.app.webhook import WebhookOptions, webhook
from rackloom.claim.cluster.admission.reviews import AdmissionMode
from rackloom.claim.cluster.admission.serving_certificate import CertificateIssuer
from rackloom.claim.cluster.admission.webhook import AdmissionSettings
from rackloom.claim.imex.config import ImexConfig, ImexFiles, ImexTls
from rackloom.claim.imex.daemon import ImexDaemon
from rackloom.claim.imex.member import DaemonIdentity
from rackloom.claim.imex.nvidia_imex import READY, ImexChild
from rackloom.claim.imex.supervisor import PeerLayout, Supervisor
from rackloom.claim.kube.api import KubeApi, KubeError, NotFound
from rackloom.claim.kube.client import KubeClient, RateLimiter
from rackloom.claim.kube.connection import http_client
from rackloom.claim.kube.leader import LeaderElection
from rackloom.core.cluster import names
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.cluster.objects import POD, RESOURCE_CLAIM, SECRET, Object, pod_claim_names
from rackloom.core.domains.settings import ControllerSettings, ImexDaemonSettings
from rackloom.errors import Retry
from rackloom.lab.imex.settings import ImexHost
from rackloom.lab.nodes.pods import IdleContainers

DAEMON_ACCOUNT = "compute-domain-daemon-service-account"
_PACE = RateLimiter(400.0, 2000)
_LOOK_S = 0.2
Ready = Callable[[], Awaitable[None]]


@dataclass
class Programs:
    """`Containers` of a cluster of trays. `network` is the loopback network that stands for the pods' one."""

    cluster: ControlPlane
    api: KubeApi
    trays: Mapping[str, Tray]
    home: Path
    network: str
    isolation: ImexIsolation = ImexIsolation.DOMAIN
    serving: set[str] = field(default_factory=set)
    """Nodes on which the plugin has published its devices."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when workloads with `launcher` in their name may end."""
    webhook_ports: list[int] = field(default_factory=list)
    may_start: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is cleared, no daemon starts."""
    failures: list[str] = field(default_factory=list)
    """The tracebacks of programs that failed."""
    children: dict[str, ImexChild] = field(default_factory=dict)
    """The nvidia-imex of each daemon pod, by the pod's name."""

    def __post_init__(self) -> None:
        self.may_start.set()

    async def run(self, node: str, pod: Object, ready: Ready) -> int:
        """A program that fails ends its container with 1. The test reports the failure at its end."""
        try:
            return await self._run(node, pod, ready)
        except Exception:
            self.failures.append(f"{pod['metadata']['name']}: {traceback.format_exc()}")
            return 1

    async def _run(self, node: str, pod: Object, ready: Ready) -> int:
        programs = {
            ("controller",): self._controller,
            ("node", "imex"): self._plugin,
            ("webhook",): self._webhook,
            ("webhook-certificates",): self._certificates,
            ("imex", "run"): self._daemon,
        }
        if pod["metadata"]["namespace"] not in (DRIVER, DAEMONS):
            return await self._workload(node, pod, ready)
        for words in map(_words, pod["spec"]["containers"]):
            for program, run in programs.items():
                if words[: len(program)] == program:
                    return await run(node, pod, ready)
        return await IdleContainers().run(node, pod, ready)

    @contextlib.asynccontextmanager
    async def _own(self, pod: Object) -> AsyncIterator[KubeClient]:
        """A client with the token of this pod, to which the program's rights are bound."""
        account = pod["spec"]["serviceAccountName"]
        token = await asyncio.to_thread(self.cluster.bound_token, pod, account)
        file = self.cluster.kubeconfig_of_token(pod["metadata"]["uid"], token)
        async with KubeClient(http_client(file, None), _PACE) as own:
            yield own

    async def _controller(self, node: str, pod: Object, ready: Ready) -> int:
        (container,) = pod["spec"]["containers"]
        (image,) = (variable["value"] for variable in container["env"] if variable["name"] == "IMAGE_NAME")
        settings = ControllerSettings(daemon=ImexDaemonSettings(image=image), isolation=self.isolation)
        identity = pod["metadata"]["name"]
        async with self._own(pod) as own:
            leadership = Leadership(own, settings, identity)
            election = LeaderElection(
                own, DRIVER, "rackloom-controller", identity, wall=time.time, rng=random.Random(identity)
            )
            await ready()
            await election.run(leadership.lead)
        return 0

    async def _plugin(self, node: str, pod: Object, ready: Ready) -> int:
        tray = self.trays[node]
        common = NodeOptions(node=node, directories=tray.places, sysroot=tray.root)
        options = ImexOptions(
            namespaces=(DAEMONS,),
            isolation=self.isolation,
            clique_label=True,
            fabric_file=tray.fabric,
            driver_root=tray.root,
        )
        async with self._own(pod) as own, imex_node(common, options, own) as plugin:
            await plugin.publisher.published.wait()
            self.serving.add(node)
            await ready()
            await plugin.background.fails()
        return 1

    async def _webhook(self, node: str, pod: Object, ready: Ready) -> int:
        """The API server has no way into a pod here: it calls the webhook at a port of this machine."""
        name = pod["metadata"]["name"]
        options = WebhookOptions(identity=name, listen="127.0.0.1:0")
        settings = AdmissionSettings(mode=AdmissionMode.ENFORCE, isolation=self.isolation)
        async with self._own(pod) as own, webhook(own, settings, options) as port:
            self.webhook_ports.append(port)
            await ready()
            await asyncio.Event().wait()
        return 0

    async def _certificates(self, node: str, pod: Object, ready: Ready) -> int:
        """It fails until there are configurations. The loop stands for kubelet's container restarts."""
        async with self._own(pod) as own:
            await ready()
            issuer = CertificateIssuer(own, DRIVER, ("localhost",), time.time)
            while True:
                with contextlib.suppress(KubeError):
                    await issuer.run()
                    return 0
                await asyncio.sleep(_LOOK_S)

    async def _workload(self, node: str, pod: Object, ready: Ready) -> int:
        for edits in await self._edits(node, pod):
            assert edits["deviceNodes"], "a channel is in the container"
        await ready()
        if "launcher" in pod["metadata"]["name"]:
            await self.done.wait()
            return 0
        await asyncio.Event().wait()
        return 0

    async def _edits(self, node: str, pod: Object) -> list[dict[str, list[object]]]:
        """The edits of each claim of the pod to its container."""
        namespace = pod["metadata"]["namespace"]
        claims = [await self.api.get(RESOURCE_CLAIM, name, namespace) for name in pod_claim_names(pod)]
        return [self.trays[node].edits(claim["metadata"]["uid"]) for claim in claims]

    async def _daemon(self, node: str, pod: Object, ready: Ready) -> int:
        await self.may_start.wait()
        (edits,) = await self._edits(node, pod)
        place = member_from_environment(_environment(pod, edits))
        around, files, tls = await self._files(pod, place)
        control = LoopbackImexControl(files.config, around)
        name = pod["metadata"]["name"]
        spawn = partial(self._spawn, name, files.config, around)
        supervisor = Supervisor(PeerLayout("dns", place.max_nodes), files, tls, spawn)
        async with self._own(pod) as own:
            daemon = ImexDaemon(own, place, supervisor, control, random.Random(name))
            running = asyncio.create_task(daemon.run())
            try:
                await _until_ready(control, running)
                await ready()
                await running
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                self.children.pop(name, None)
        return 0

    async def _spawn(self, name: str, config: Path, around: ImexHost) -> ImexChild:
        self.children[name] = child = LoopbackImexChild(config, around)
        return child

    def kill_imex(self, pod: str) -> None:
        """Kill nvidia-imex of a daemon pod without a warning."""
        self.children[pod].send_signal(signal.SIGKILL)

    async def _files(self, pod: Object, place: DaemonIdentity) -> tuple[ImexHost, ImexFiles, ImexTls]:
        """The container's own files. kubelet projects its certificate from the domain's Secret."""
        folder = self.home / pod["metadata"]["uid"]
        folder.mkdir()
        hosts = folder / "hosts"
        hosts.write_text("127.0.0.1\tlocalhost\n")
        secret = await self._secret(names.imex_secret_name(place.compute_domain))
        for file, content in secret.items():
            (folder / file).write_bytes(content)
        tls = ImexTls(folder, names.imex_peer_name(place.compute_domain))
        files = ImexFiles(folder, hosts)
        files.write_config(ImexConfig(place.address, files.nodes, tls))
        return ImexHost(hosts, self.network, beat=2.0, speed=10), files, tls

    async def _secret(self, name: str) -> dict[str, bytes]:
        """kubelet starts a container only once it has the mounted Secrets."""
        while True:
            with contextlib.suppress(NotFound):
                found = await self.api.get(SECRET, name, DAEMONS)
                return {file: base64.b64decode(text) for file, text in found["data"].items()}
            await asyncio.sleep(_LOOK_S)


async def _until_ready(control: LoopbackImexControl, running: asyncio.Task[None]) -> None:
    """The answer that probes wait for."""
    while not running.done():
        with contextlib.suppress(Retry, FileNotFoundError):
            if await control.local_status() == READY:
                return
        await asyncio.sleep(_LOOK_S)


def _words(container: Object) -> tuple[str, ...]:
    """The words after `rackloom` with which a container is started."""
    words = (*container.get("command", ()), *container.get("args", ()))
    return words[1:] if words[:1] == ("rackloom",) else words


def _environment(pod: Object, edits: dict[str, list[object]]) -> dict[str, str]:
    """A container's variables: those of the CDI spec, and those of the pod template."""
    meta = pod["metadata"]
    fields = {
        "spec.nodeName": pod["spec"]["nodeName"],
        "status.podIP": pod["status"]["podIP"],
        "metadata.uid": meta["uid"],
        "metadata.name": meta["name"],
        "metadata.namespace": meta["namespace"],
    }
    found = dict(str(edit).split("=", 1) for edit in edits["env"])
    (container,) = pod["spec"]["containers"]
    for variable in container["env"]:
        source = variable.get("valueFrom")
        found[variable["name"]] = (
            fields[source["fieldRef"]["fieldPath"]] if source else variable.get("value", "")
        )
    return found


async def pods_of(api: KubeApi, account: str) -> list[Object]:
    """Pods of our two namespaces that run under a service account."""
    pods = [*(await api.list(POD, DRIVER)).items, *(await api.list(POD, DAEMONS)).items]
    return [pod for pod in pods if pod["spec"].get("serviceAccountName") == account]
