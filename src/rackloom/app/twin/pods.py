"""The programs in the containers of the twin's pods, and the addresses of pods.

The pod of an IMEX daemon runs the program of its image, `rackloom imex run`, inside this process. Its
environment is made as a container runtime makes it: from the CDI specs of its claims and from the pod
template. As with kubelet, it starts only after its Secret exists. Only nvidia-imex itself is simulated.

The containers of a workload do nothing. They run until they are deleted, or for as long as the annotation
`rackloom.dev/simulated-seconds` requests.

`AddressedKubelets` gives the next IMEX daemon of a node a planned address, so that a scenario can let a
new pod have the address of an earlier one.
"""

import asyncio
import base64
import contextlib
import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import structlog

from rackloom.app.imex import member_from_environment
from rackloom.claim.imex.config import ImexConfig, ImexFiles, ImexTls
from rackloom.claim.imex.daemon import ImexDaemon
from rackloom.claim.imex.member import DaemonIdentity, label_pod
from rackloom.claim.imex.nvidia_imex import ImexChild
from rackloom.claim.imex.supervisor import PeerLayout, Supervisor
from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import (
    RESOURCE_CLAIM,
    SECRET,
    Object,
    annotations_of,
    data_of,
    labels_of,
    name_of,
    namespace_of,
    pod_claim_names,
    uid_of,
)
from rackloom.core.cluster.pods import node_of, pod_address
from rackloom.core.domains.imex_settings import ImexSettings, read_imex_settings
from rackloom.errors import Retry
from rackloom.lab.imex.in_process import ImexNetwork, InMemoryImex, InMemoryImexControl
from rackloom.lab.imex.settings import ImexHost
from rackloom.lab.nodes.kubelets import SimulatedKubelets
from rackloom.lab.nodes.pods import ContainerRuntime, DeviceManager, container_environment, rackloom_arguments
from rackloom.runtime.foreign_text import decode_json

# Addresses of pods.


class AddressedKubelets(SimulatedKubelets):
    """Kubelets with a plan: `planned` is the address, by node, of the next IMEX daemon's pod there."""

    def __init__(
        self,
        planned: dict[str, str],
        api: KubeApi,
        wall: Callable[[], float],
        rng: random.Random,
        *,
        devices: DeviceManager,
        containers: ContainerRuntime,
    ) -> None:
        super().__init__(api, wall, rng, devices=devices, containers=containers)
        self._planned = planned

    def _address(self, pod: Object) -> str:
        is_daemon = names.COMPUTE_DOMAIN_LABEL in labels_of(pod)
        if not pod_address(pod) and is_daemon and node_of(pod) in self._planned:
            return self._planned.pop(node_of(pod))
        return super()._address(pod)


# Programs in containers.


RUN_ANNOTATION = "rackloom.dev/simulated-seconds"
"""On a workload pod of the twin: how long its containers run before they end with 0. Without it, for ever."""
_POLL_SECONDS = 0.2
_DAEMON_ARGUMENTS = ("imex", "run")
CdiFiles = Callable[[str, str], tuple[Path, ...]]
"""The CDI specs on a node (by name) of a claim (by UID)."""
ReadyCallback = Callable[[], Awaitable[None]]
log = structlog.get_logger(__name__)


class PodPrograms:
    """The container runtime of the twin's pods. `home` holds the files that containers mount."""

    def __init__(self, api: KubeApi, home: Path, cdi: CdiFiles, network: ImexNetwork) -> None:
        self._api = api
        self._home = home
        self._cdi = cdi
        self._network = network

    async def run(self, node: str, pod: Object, ready: ReadyCallback) -> int:
        """The exit code of a program that is not stopped, or 1 if it fails. The log has the error."""
        try:
            return await self._run(node, pod, ready)
        except Exception as error:
            log.exception("twin.container", pod=name_of(pod), error=str(error))
            return 1

    async def _run(self, node: str, pod: Object, ready: ReadyCallback) -> int:
        if any(arguments[:2] == _DAEMON_ARGUMENTS for arguments in rackloom_arguments(pod)):
            return await self._daemon(node, pod, ready)
        return await _run_workload(pod, ready)

    async def _daemon(self, node: str, pod: Object, ready: ReadyCallback) -> int:
        environment = container_environment(pod, await self._edits(node, pod))
        identity = member_from_environment(environment)
        if not identity.clique_id:
            await label_pod(self._api, identity)
            await ready()
            await asyncio.Event().wait()
        settings = read_imex_settings(environment.get(names.IMEX_SETTINGS_VARIABLE, ""))
        files, tls = await self._files(pod, identity, settings)
        spawn = partial(self._spawn, files.config, files.config.with_name("hosts"))
        supervisor = Supervisor(PeerLayout("dns", identity.max_nodes), files, tls, spawn)
        control = InMemoryImexControl(files.config, identity.address, self._network)
        rng = random.Random(uid_of(pod))  # noqa: S311 (jitter)
        running = asyncio.create_task(ImexDaemon(self._api, identity, supervisor, control, rng).run())
        try:
            await _until_ready(control, running)
            await ready()
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return 0

    async def _edits(self, node: str, pod: Object) -> list[str]:
        """The variables that the pod's claims bring, as a container runtime reads them."""
        found: list[str] = []
        for name in pod_claim_names(pod):
            claim = await self._api.get(RESOURCE_CLAIM, name, namespace_of(pod))
            for file in self._cdi(node, uid_of(claim)):
                devices = decode_json(file.read_bytes(), str(file))["devices"]
                found += [
                    variable for device in devices for variable in device["containerEdits"].get("env", ())
                ]
        return found

    async def _spawn(self, config: Path, hosts: Path) -> ImexChild:
        return InMemoryImex(config, ImexHost(hosts), self._network)

    async def _files(
        self, pod: Object, identity: DaemonIdentity, settings: ImexSettings
    ) -> tuple[ImexFiles, ImexTls]:
        """The container's own files. kubelet projects its certificate from the domain's Secret."""
        folder = self._home / uid_of(pod)
        folder.mkdir(parents=True, exist_ok=True)
        hosts = folder / "hosts"
        hosts.write_text("127.0.0.1\tlocalhost\n")
        for file, content in (await self._secret(identity)).items():
            (folder / file).write_bytes(content)
        tls = ImexTls(folder, names.imex_peer_name(identity.compute_domain))
        files = ImexFiles(folder, hosts)
        files.write_config(ImexConfig(identity.address, files.nodes, tls, settings=settings))
        return files, tls

    async def _secret(self, identity: DaemonIdentity) -> dict[str, bytes]:
        """A kubelet starts no container before it has the Secrets that are mounted there."""
        while True:
            with contextlib.suppress(NotFound):
                name = names.imex_secret_name(identity.compute_domain)
                found = await self._api.get(SECRET, name, identity.namespace)
                return {file: base64.b64decode(text) for file, text in data_of(found).items()}
            await asyncio.sleep(_POLL_SECONDS)


async def _run_workload(pod: Object, ready: ReadyCallback) -> int:
    await ready()
    seconds = annotations_of(pod).get(RUN_ANNOTATION)
    if seconds is None:
        await asyncio.Event().wait()
    else:
        await asyncio.sleep(float(seconds))
    return 0


async def _until_ready(control: InMemoryImexControl, running: "asyncio.Task[None]") -> None:
    """Wait until the daemon answers its readiness probe."""
    while not running.done():
        with contextlib.suppress(Retry):
            await control.local_status()
            return
        await asyncio.sleep(_POLL_SECONDS)
