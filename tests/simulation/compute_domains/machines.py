"""The running machines of a ComputeDomain story: plugins, kubelet's calls, daemons and job containers.

`StoryTray` is a node with processes that die and restart. Its plugin is a process that restarts when it ends.
Kubelet's calls to the plugin take as long as kubelet waits for one (45 s) and fail when the plugin dies or
does not answer. An IMEX daemon runs in its pod's container and is restarted there. It must never end because
of an answer of the API server, since a daemon that ends takes the memory of running jobs with it. `power_off`
ends every process at once, as a power failure does.

`TrayMachines` is the container runtime of the simulated kubelets. Before it starts the containers of a
job it checks what a real runtime needs: the CDI specs exist and name complete device nodes, a daemon of
the ComputeDomain was READY on this tray in this boot, and a gang's tray is reserved for that gang. When
a container ends, its CDI specs must still be there, because the runtime would need them to restart it.
"""

import asyncio
import json
import random
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.simulation.compute_domains.tray import ImexTray, SimulatedImexProgram
from tests.simulation.invariants.memory import JOB_LABEL, ChannelInvariants

from rackloom.claim.imex.config import ImexFiles
from rackloom.claim.imex.daemon import ImexDaemon
from rackloom.claim.imex.member import DaemonIdentity
from rackloom.claim.kube.api import KubeError
from rackloom.claim.node.requests import ClaimAnswer
from rackloom.claim.node.run import PluginProcess
from rackloom.claim.node.tasks import run_background
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ObjectRef
from rackloom.core.cluster.gang_objects import reserving_plans
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    GANG_PLAN,
    NODE,
    RESOURCE_CLAIM,
    Object,
    pod_claim_names,
)
from rackloom.core.cluster.pods import GANG_LABEL
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.errors import Retry
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.dra_manager import DraManager
from rackloom.lab.nodes.node import CALL_RETRY_SECONDS, PluginCall
from rackloom.lab.virtual.process import CrashPoints, Process, RestartedProcess, with_crash_points

POD_START, IMEX_READY = 1.0, 0.5
"""Declared latencies: seconds from a prepared pod to its running containers, and from those to READY."""
PLUGIN_RESTART, DAEMON_RESTART = 2.0, 1.0
CALL_SECONDS = 45.0
"""kubelet's patience with a plugin (pkg/kubelet/cm/dra/plugin, defaultClientCallTimeout)."""


class StoryTray(ImexTray):
    """A tray. Its plugin and IMEX daemons are processes that may be killed, stopped and restarted."""

    def __init__(
        self,
        root: Path,
        number: int,
        kube: FakeKube,
        isolation: ImexIsolation,
        steps: CrashPoints,
        channels: ChannelInvariants,
    ) -> None:
        super().__init__(root, 1, number)
        self.isolation = isolation
        self.is_on = False
        self.daemons: dict[str, RestartedProcess] = {}
        """IMEX daemons by the UID of their pod."""
        self.was_ready: set[str] = set()
        """UIDs of ComputeDomains that had a READY daemon here in this boot."""
        self.ready_addresses: set[str] = set()
        """Addresses of pods that had a READY daemon here in any boot."""
        self._kube = kube
        self._steps = steps
        self._channels = channels

    def boot(self) -> None:
        """The power is on: the plugin starts, and is started again whenever it ends."""
        self.boots += 1
        self.is_on = True
        self.was_ready = set()
        life = Process(f"plugin on {self.name}", self.name)
        # The plugin reads its node before it serves. It ends, and is restarted, when the API server is away.
        self.plugin = RestartedProcess(
            life, self._serve, PLUGIN_RESTART, self._channels.broken, may_fail=(KubeError,)
        )
        self.keeper = asyncio.create_task(self.plugin.run())

    def power_off(self) -> None:
        """The power is gone: every process is dead at once, and /var/run with its CDI specs is empty."""
        self.is_on = False
        for process in (self.plugin, *self.daemons.values()):
            process.life.kill()
        self.keeper.cancel()
        self.running.clear()
        shutil.rmtree(self.places.cdi, ignore_errors=True)

    async def _serve(self, life: Process) -> None:
        api = with_crash_points(DirectApi(self._kube, "plugin"), life, self._steps)
        plugin = self.imex_plugin(api, self.isolation)
        self.places.home(plugin.driver).mkdir(parents=True, exist_ok=True)
        await plugin.start()
        self.running[plugin.driver] = process = self.plugin_process(plugin, api)
        self._channels.changed()
        # As kubelet's registration does.
        process.pods.wake()
        try:
            async with run_background(*process.work()) as background:
                await background.fails()
        finally:
            if self.running.get(plugin.driver) is process:
                del self.running[plugin.driver]
            await process.requests.close()

    async def _call(self, driver: str, call: PluginCall) -> Mapping[str, ClaimAnswer]:
        """Call the plugin as kubelet does. Raises `Retry` also when the plugin does not answer."""
        boot = self.boots
        self._step(boot)
        life, process = self.plugin.life, self._plugin(driver)
        task = life.spawn(_call_plugin(call, process))
        try:
            await asyncio.wait({task}, timeout=CALL_SECONDS)
        finally:
            task.cancel()
            # A stopped plugin notices the cancelled call only when it resumes.
            await asyncio.wait({task}, timeout=0.0 if life.is_stopped else None)
        if not task.done() or task.cancelled():
            raise Retry("the connection to the plugin broke", after=CALL_RETRY_SECONDS)
        self._step(boot)
        return task.result()

    def _step(self, boot: int) -> None:
        """Kubelet may die too: with its machine."""
        self._steps.take(self.name)
        if not self.is_on or self.boots != boot:
            raise Retry("the machine is off", after=CALL_RETRY_SECONDS)

    async def run_daemon(self, pod: Object, ready: Callable[[], Awaitable[None]]) -> None:
        """An IMEX daemon's container, until cancelled. It is restarted in its pod whenever it dies."""
        identity = self._daemon_identity(pod)

        async def serve(life: Process) -> None:
            imex: Any = SimulatedImexProgram(IMEX_READY, partial(self._note_ready, identity))
            api = with_crash_points(DirectApi(self._kube, "daemon"), life, self._steps)
            rng = random.Random(self._steps.taken)
            reporting = asyncio.create_task(_report_once_ready(imex, ready))
            try:
                home = self.domains / identity.compute_domain
                files = ImexFiles(home, home / "hosts")
                entered = partial(files.write_boot, self.boot_id)
                await ImexDaemon(api, identity, imex, imex, rng, entered).run()
            finally:
                reporting.cancel()

        uid = pod["metadata"]["uid"]
        # A daemon that ends takes the memory of running jobs with it: no answer of a server is worth that.
        life = Process(f"daemon on {self.name}", self.name)
        process = RestartedProcess(life, serve, DAEMON_RESTART, self._channels.broken)
        self.daemons[uid] = process
        try:
            await process.run()
        finally:
            # After a reboot a new daemon may have this entry already.
            if self.daemons.get(uid) is process:
                del self.daemons[uid]

    def _daemon_identity(self, pod: Object) -> DaemonIdentity:
        meta = pod["metadata"]
        return DaemonIdentity(
            compute_domain=meta["labels"][names.COMPUTE_DOMAIN_LABEL],
            clique_id=self.clique,
            namespace=DEFAULT_DAEMON_NAMESPACE,
            node=self.name,
            address=pod["status"]["podIP"],
            pod=ObjectRef(meta["name"], meta["uid"]),
            max_nodes=names.MAX_NODES_PER_IMEX_DOMAIN,
        )

    def _note_ready(self, identity: DaemonIdentity) -> None:
        self.was_ready.add(identity.compute_domain)
        self.ready_addresses.add(identity.address)


class TrayMachines:
    """All trays that are on, by node: the `ContainerRuntime` of the simulated kubelets."""

    def __init__(self, kube: FakeKube, channels: ChannelInvariants) -> None:
        self.on: dict[str, StoryTray] = {}
        self.devices = DraManager(self._tray)
        """The `DeviceManager` of the simulated kubelets."""
        self._kube = kube
        self._channels = channels

    async def run(self, node: str, pod: Object, ready: Callable[[], Awaitable[None]]) -> int:
        """See `ContainerRuntime`."""
        tray = self._tray(node)
        boot = tray.boots
        await asyncio.sleep(POD_START)
        if pod["metadata"]["namespace"] == DEFAULT_DAEMON_NAMESPACE:
            await tray.run_daemon(pod, ready)
            return 1
        specs = self._specs(tray, pod)
        self._channels.broken += self._defects(tray, pod, specs)
        nodes = _device_nodes(specs)
        self._channels.broken += [
            f"CDI device injection failed: failed to stat CDI host device {node['path']!r}"
            for node in nodes
            if not (node.get("type") and node.get("major"))
        ]
        with self._channels.job(tray.name, tray.clique, pod, tuple(node["path"] for node in nodes)):
            await ready()
            try:
                await asyncio.Event().wait()
            finally:
                self._check_after_end(tray, boot, pod, specs)
        return 0

    def _defects(self, tray: StoryTray, pod: Object, specs: Sequence[Path]) -> Iterator[str]:
        """Why the containers of a job's pod should not start now."""
        name, node = pod["metadata"]["name"], tray.name
        for spec in specs:
            if not spec.exists():
                yield f"the CDI spec of {name} is not on {node} when its containers start"
        labels, space = pod["metadata"]["labels"], pod["metadata"]["namespace"]
        domain = self._kube.store.find(COMPUTE_DOMAIN, (space, labels[JOB_LABEL]))
        if domain is not None and not _is_served(domain, tray.was_ready, tray.isolation):
            yield f"{name} starts on {node}, where no IMEX daemon of it was READY"
        plan = self._kube.store.find(GANG_PLAN, (space, labels.get(GANG_LABEL, "")))
        found = self._kube.store.find(NODE, (None, node))
        if GANG_LABEL in labels and (
            plan is None or found is None or plan["metadata"]["uid"] not in reserving_plans(found)
        ):
            yield f"{name} starts on {node}, which is not reserved for its gang"

    def _check_after_end(self, tray: StoryTray, boot: int, pod: Object, specs: Sequence[Path]) -> None:
        """A container that ends is started again in its pod, for which the runtime needs the specs."""
        if tray.is_on and tray.boots == boot and not all(spec.exists() for spec in specs):
            name = pod["metadata"]["name"]
            node = tray.name
            self._channels.broken.append(f"the CDI spec of {name} went away on {node} while it ran")

    def _tray(self, node: str) -> StoryTray:
        if node not in self.on:
            raise Retry("the machine is off", after=CALL_RETRY_SECONDS)
        return self.on[node]

    def _specs(self, tray: StoryTray, pod: Object) -> tuple[Path, ...]:
        """The CDI specs that the runtime reads for the pod's containers."""
        claims = [
            self._kube.store.read(RESOURCE_CLAIM, (pod["metadata"]["namespace"], name))
            for name in pod_claim_names(pod)
        ]
        return tuple(
            tray.places.cdi / f"k8s.{names.IMEX_DRIVER}-claim_{claim['metadata']['uid']}.yaml"
            for claim in claims
        )


def _is_served(domain: Object, ready: Collection[str], isolation: ImexIsolation) -> bool:
    """In channel mode one daemon serves all jobs of a clique."""
    return bool(ready) if isolation is ImexIsolation.CHANNEL else domain["metadata"]["uid"] in ready


def _device_nodes(specs: Sequence[Path]) -> list[dict[str, Any]]:
    """The device nodes of CDI specs. A runtime stats incomplete ones on the host, which has no channels."""
    devices = [
        device for spec in specs if spec.exists() for device in json.loads(spec.read_bytes())["devices"]
    ]
    return [node for device in devices for node in device["containerEdits"].get("deviceNodes", ())]


async def _call_plugin(call: PluginCall, process: PluginProcess) -> Mapping[str, ClaimAnswer]:
    return await call(process.requests)


async def _report_once_ready(imex: SimulatedImexProgram, ready: Callable[[], Awaitable[None]]) -> None:
    await imex.is_ready.wait()
    await ready()
