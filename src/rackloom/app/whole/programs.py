"""What runs in the containers of simulated pods.

An IMEX daemon's pod runs the program of its image, `rackloom imex run`, inside this process; only
nvidia-imex itself is a stand-in. A workload's containers do nothing: they run until they are deleted, or for
as long as the pod's annotation says.
"""

import asyncio
import base64
import contextlib
import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import structlog

from rackloom.app.imex import place_from
from rackloom.claim.domain import names
from rackloom.claim.imex.child import Child
from rackloom.claim.imex.config import ImexConfig, Tls
from rackloom.claim.imex.credentials import Credentials
from rackloom.claim.imex.daemon import ImexDaemon
from rackloom.claim.imex.files import ImexFiles
from rackloom.claim.imex.member import Place
from rackloom.claim.imex.own_pod import label_pod
from rackloom.claim.imex.steps import Layout
from rackloom.claim.imex.supervisor import Supervisor
from rackloom.claim.kube.api import KubeApi, NotFound, Object
from rackloom.claim.kube.kinds import RESOURCE_CLAIM, SECRET
from rackloom.claim.kube.pods import claim_names
from rackloom.errors import Retry
from rackloom.twin.imex.memory import ImexNetwork, MemoryControl, MemoryImex
from rackloom.twin.imex.settings import Surroundings

RUN_ANNOTATION = "rackloom.dev/simulated-seconds"
"""On a workload pod of the twin: how long its containers run before they end with 0; without it, for ever."""
_LOOK_S = 0.2
_DAEMON = ("imex", "run")
CdiFiles = Callable[[str, str], tuple[Path, ...]]
"""The CDI specs on a node (by name) of a claim (by UID)."""
Ready = Callable[[], Awaitable[None]]
log = structlog.get_logger(__name__)


class Programs:
    """`Containers` of the twin's pods. `home` is for the files that a container sees as its own."""

    def __init__(self, api: KubeApi, home: Path, cdi: CdiFiles, network: ImexNetwork) -> None:
        self._api = api
        self._home = home
        self._cdi = cdi
        self._network = network

    async def run(self, node: str, pod: Object, ready: Ready) -> int:
        """The exit code, once it ends by itself; 1 for a program that fails, as its log then says why."""
        try:
            return await self._run(node, pod, ready)
        except Exception as error:
            log.exception("twin.container", pod=pod["metadata"]["name"], error=str(error))
            return 1

    async def _run(self, node: str, pod: Object, ready: Ready) -> int:
        if any(_words(one)[:2] == _DAEMON for one in pod["spec"]["containers"]):
            return await self._daemon(node, pod, ready)
        return await _workload(pod, ready)

    async def _daemon(self, node: str, pod: Object, ready: Ready) -> int:
        place = place_from(_environment(pod, await self._edits(node, pod)))
        if not place.clique_id:
            await label_pod(self._api, place)
            await ready()
            await asyncio.Event().wait()
        files, tls = await self._files(pod, place)
        spawn = partial(self._spawn, files.config, files.config.with_name("hosts"))
        supervisor = Supervisor(Layout("dns", place.max_nodes), files, Credentials(tls), spawn)
        control = MemoryControl(files.config, place.address, self._network)
        rng = random.Random(pod["metadata"]["uid"])  # noqa: S311 (jitter)
        running = asyncio.create_task(ImexDaemon(self._api, place, supervisor, control, rng).run())
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
        for name in claim_names(pod):
            claim = await self._api.get(RESOURCE_CLAIM, name, pod["metadata"]["namespace"])
            for file in self._cdi(node, claim["metadata"]["uid"]):
                devices = msgspec.json.decode(file.read_bytes())["devices"]
                found += [one for device in devices for one in device["containerEdits"].get("env", ())]
        return found

    async def _spawn(self, config: Path, hosts: Path) -> Child:
        return MemoryImex(config, Surroundings(hosts), self._network)

    async def _files(self, pod: Object, place: Place) -> tuple[ImexFiles, Tls]:
        """The container's own files; its certificate is what kubelet projects of the domain's Secret."""
        folder = self._home / pod["metadata"]["uid"]
        folder.mkdir(parents=True, exist_ok=True)
        hosts = folder / "hosts"
        hosts.write_text("127.0.0.1\tlocalhost\n")
        for file, content in (await self._secret(place)).items():
            (folder / file).write_bytes(content)
        tls = Tls(folder, names.imex_peer_name(place.compute_domain))
        files = ImexFiles(folder, hosts)
        files.write_config(ImexConfig(place.address, files.nodes, tls))
        return files, tls

    async def _secret(self, place: Place) -> dict[str, bytes]:
        """A kubelet starts no container before it has the Secrets that are mounted there."""
        while True:
            with contextlib.suppress(NotFound):
                name = names.imex_secret_name(place.compute_domain)
                found = await self._api.get(SECRET, name, place.namespace)
                return {file: base64.b64decode(text) for file, text in found["data"].items()}
            await asyncio.sleep(_LOOK_S)


async def _workload(pod: Object, ready: Ready) -> int:
    await ready()
    seconds = pod["metadata"].get("annotations", {}).get(RUN_ANNOTATION)
    if seconds is None:
        await asyncio.Event().wait()
    await asyncio.sleep(float(seconds))
    return 0


async def _until_ready(control: MemoryControl, running: "asyncio.Task[None]") -> None:
    """The answer that probes wait for."""
    while not running.done():
        with contextlib.suppress(Retry):
            await control.local_status()
            return
        await asyncio.sleep(_LOOK_S)


def _words(container: Object) -> tuple[str, ...]:
    """The words after `rackloom` with which a container is started."""
    words = (*container.get("command", ()), *container.get("args", ()))
    return words[1:] if words[:1] == ("rackloom",) else words


def _environment(pod: Object, edits: list[str]) -> dict[str, str]:
    """A container's variables: those of the CDI specs, and those of the pod template."""
    meta = pod["metadata"]
    fields = {
        "spec.nodeName": pod["spec"]["nodeName"],
        "status.podIP": pod["status"]["podIP"],
        "metadata.uid": meta["uid"],
        "metadata.name": meta["name"],
        "metadata.namespace": meta["namespace"],
    }
    found = dict(one.split("=", 1) for one in edits)
    for one in pod["spec"]["containers"][0].get("env", ()):
        source = one.get("valueFrom")
        found[one["name"]] = fields[source["fieldRef"]["fieldPath"]] if source else one.get("value", "")
    return found
