"""The running machines of a ComputeDomain story: plugins, kubelet's calls, daemons and job containers.

`TrayMachine` is one boot of one tray. Its plugin is a process that restarts when it ends. Kubelet's
calls to the plugin take as long as kubelet waits for one (45 s) and fail when the plugin dies or does
not answer. An IMEX daemon runs in its pod's container and is restarted there; it must never end because
of an answer of the API server, since a daemon that ends takes the memory of running jobs with it. `cut`
ends every process at once, as a power failure does.

`TrayMachines` is the container runtime of the simulated kubelets. Before it starts the containers of a
job it checks what a real runtime needs: the CDI specs exist and name complete device nodes, a daemon of
the ComputeDomain was READY on this tray in this boot, and a gang's tray is reserved for that gang. When
a container ends, its CDI specs must still be there, because the runtime would need them to restart it.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rackloom.claim.imex.config import ImexFiles
from rackloom.claim.imex.daemon import ImexDaemon
from rackloom.claim.imex.member import DaemonIdentity
from rackloom.claim.kube.api import KubeError
from rackloom.claim.node.requests import ClaimAnswer
from rackloom.claim.node.run import PluginProcess
from rackloom.claim.node.tasks import run_background
from rackloom.core.domains import names
from rackloom.core.domains.clique import ObjectRef
from rackloom.core.domains.names import ImexIsolation
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.core.gangs.snapshot import reserving_plans
from rackloom.core.kubernetes.objects import (
    COMPUTE_DOMAIN,
    GANG_PLAN,
    NODE,
    RESOURCE_CLAIM,
    Object,
    pod_claim_names,
)
from rackloom.core.kubernetes.pods import GANG_LABEL
from rackloom.errors import Retry
from rackloom.lab.compute_domains.tray import ImexTray, SimulatedImexProgram
from rackloom.lab.invariants.memory import JOB_LABEL, ChannelInvariants
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.dra_manager import DraManager, PodClaim
from rackloom.lab.virtual.process import CrashPoints, Process, RestartedProcess, with_crash_points

POD_START, IMEX_READY = 1.0, 0.5
"""Declared latencies: seconds from a prepared pod to its running containers, and from those to READY."""
PLUGIN_RESTART, DAEMON_RESTART = 2.0, 1.0
CALL_SECONDS = 45.0
"""kubelet's patience with a plugin (pkg/kubelet/cm/dra/plugin, defaultClientCallTimeout)."""


class TrayMachine:
    """One tray that is switched on. `boot` counts its boots."""

    def __init__(
        self,
        kube: FakeKube,
        tray: ImexTray,
        isolation: ImexIsolation,
        steps: CrashPoints,
        channels: ChannelInvariants,
        *,
        boot: int,
    ) -> None:
        self.tray = tray
        self.boot = boot
        self.running: PluginProcess | None = None
        """The plugin while it answers kubelet."""
        self.daemons: dict[str, RestartedProcess] = {}
        """IMEX daemons by the UID of their pod."""
        self.was_ready: set[tuple[str, str]] = set()
        """(UID of the ComputeDomain, address of the pod) of daemons that were READY here in this boot."""
        self._kube = kube
        self.isolation = isolation
        self._steps = steps
        self._channels = channels
        life = Process(f"plugin on {tray.name}", tray.name)
        # The plugin reads its node before it serves; it ends, and is restarted, when the API server is away.
        self.plugin = RestartedProcess(
            life, self._serve, PLUGIN_RESTART, channels.broken, may_fail=(KubeError,)
        )
        self.keeper = asyncio.create_task(self.plugin.run())

    async def _serve(self, life: Process) -> None:
        api = with_crash_points(DirectApi(self._kube, "plugin"), life, self._steps)
        plugin = self.tray.plugin(api, self.isolation, str(self.boot))
        await plugin.start()
        self.running = running = self.tray.running(plugin, api, str(self.boot))
        self._channels.changed()
        # As kubelet's registration does.
        running.pods.wake()
        try:
            async with run_background(*running.work()) as beside:
                await beside.fails()
        finally:
            self.running = None
            await running.requests.close()

    @property
    def drivers(self) -> tuple[str, ...]:
        """The plugin, while it is registered with kubelet."""
        return (names.IMEX_DRIVER,) if self.running else ()

    async def prepare(self, claims: Sequence[PodClaim]) -> None:
        """See `NodePlugins`."""
        if claims:
            await self._call(lambda plugin: plugin.requests.prepare([claim.ref for claim in claims]))

    async def unprepare(self, claims: Sequence[PodClaim]) -> None:
        """See `NodePlugins`."""
        if claims:
            await self._call(lambda plugin: plugin.requests.unprepare([claim.ref for claim in claims]))

    async def _call(self, call: Callable[[PluginProcess], Awaitable[dict[str, ClaimAnswer]]]) -> None:
        """Call the plugin as kubelet does. Raises `Retry` with its errors, or when it does not answer."""
        self._step()
        life, running = self.plugin.life, self.running
        if running is None:
            raise Retry(f"DRA driver {names.IMEX_DRIVER} is not registered", after=1.0)
        task = life.spawn(_call_plugin(call, running))
        try:
            await asyncio.wait({task}, timeout=CALL_SECONDS)
        finally:
            task.cancel()
            # A stopped plugin notices the cancelled call only when it resumes.
            await asyncio.wait({task}, timeout=0.0 if life.is_stopped else None)
        if not task.done() or task.cancelled():
            raise Retry("the connection to the plugin broke", after=1.0)
        self._step()
        errors = [answer.error for answer in task.result().values() if answer.error]
        if errors:
            raise Retry("; ".join(errors), after=1.0)

    def _step(self) -> None:
        """Kubelet may die too: with its machine."""
        self._steps.take(self.tray.name)
        if self.keeper.cancelling() or self.keeper.cancelled():
            raise Retry("the machine is off", after=1.0)

    async def run_daemon(self, pod: Object, ready: Callable[[], Awaitable[None]]) -> None:
        """An IMEX daemon's container, until cancelled; started again in its pod whenever it dies."""
        identity = self._daemon_identity(pod)

        async def serve(life: Process) -> None:
            imex: Any = SimulatedImexProgram(
                IMEX_READY, lambda: self.was_ready.add((identity.compute_domain, identity.address))
            )
            api = with_crash_points(DirectApi(self._kube, "daemon"), life, self._steps)
            rng = random.Random(self._steps.taken)  # noqa: S311 (reproducible on purpose)
            telling = asyncio.create_task(_report_once_ready(imex, ready))
            try:
                home = self.tray.domains / identity.compute_domain
                files = ImexFiles(home, home / "hosts")
                entered = partial(files.write_boot, str(self.boot))
                await ImexDaemon(api, identity, imex, imex, rng, entered).run()
            finally:
                telling.cancel()

        uid = pod["metadata"]["uid"]
        # A daemon that ends takes the memory of running jobs with it: no answer of a server is worth that.
        life = Process(f"daemon on {self.tray.name}", self.tray.name)
        kept = self.daemons[uid] = RestartedProcess(life, serve, DAEMON_RESTART, self._channels.broken)
        try:
            await kept.run()
        finally:
            del self.daemons[uid]

    def _daemon_identity(self, pod: Object) -> DaemonIdentity:
        meta = pod["metadata"]
        return DaemonIdentity(
            compute_domain=meta["labels"][names.COMPUTE_DOMAIN_LABEL],
            clique_id=self.tray.clique,
            namespace=DEFAULT_DAEMON_NAMESPACE,
            node=self.tray.name,
            address=pod["status"]["podIP"],
            pod=ObjectRef(meta["name"], meta["uid"], DEFAULT_DAEMON_NAMESPACE),
            max_nodes=names.MAX_NODES_PER_IMEX_DOMAIN,
        )

    def cut(self) -> None:
        """The power is gone: every process is dead at once."""
        self.plugin.life.kill()
        for kept in self.daemons.values():
            kept.life.kill()
        self.keeper.cancel()
        self.running = None
        self.tray.power_off()


class TrayMachines:
    """All machines that are on, by node: the `ContainerRuntime` of the simulated kubelets."""

    def __init__(self, kube: FakeKube, channels: ChannelInvariants) -> None:
        self.on: dict[str, TrayMachine] = {}
        self.devices = DraManager(self._machine)
        """The `DeviceManager` of the simulated kubelets."""
        self._kube = kube
        self._channels = channels

    async def run(self, node: str, pod: Object, ready: Callable[[], Awaitable[None]]) -> int:
        """See `ContainerRuntime`."""
        machine = self._machine(node)
        await asyncio.sleep(POD_START)
        if pod["metadata"]["namespace"] == DEFAULT_DAEMON_NAMESPACE:
            await machine.run_daemon(pod, ready)
            return 1
        specs = self._specs(machine, pod)
        self._channels.broken += self._defects(machine, pod, specs)
        nodes = _device_nodes(specs)
        self._channels.broken += [
            f"CDI device injection failed: failed to stat CDI host device {node['path']!r}"
            for node in nodes
            if not (node.get("type") and node.get("major"))
        ]
        with self._channels.job(machine.tray, pod, tuple(node["path"] for node in nodes)):
            await ready()
            try:
                await asyncio.Event().wait()
            finally:
                self._check_after_end(machine, pod, specs)
        return 0

    def _defects(self, machine: TrayMachine, pod: Object, specs: Sequence[Path]) -> Iterator[str]:
        """Why the containers of a job's pod should not start now."""
        name, node = pod["metadata"]["name"], machine.tray.name
        for spec in specs:
            if not spec.exists():
                yield f"the CDI spec of {name} is not on {node} when its containers start"
        labels, space = pod["metadata"]["labels"], pod["metadata"]["namespace"]
        domain = self._kube.store.find(COMPUTE_DOMAIN, (space, labels[JOB_LABEL]))
        domains = {uid for uid, _ in machine.was_ready}
        if domain is not None and not _is_served(domain, domains, machine.isolation):
            yield f"{name} starts on {node}, where no IMEX daemon of it was READY"
        plan = self._kube.store.find(GANG_PLAN, (space, labels.get(GANG_LABEL, "")))
        found = self._kube.store.find(NODE, (None, node))
        if GANG_LABEL in labels and (
            plan is None or found is None or plan["metadata"]["uid"] not in reserving_plans(found)
        ):
            yield f"{name} starts on {node}, which is not reserved for its gang"

    def _check_after_end(self, machine: TrayMachine, pod: Object, specs: Sequence[Path]) -> None:
        """A container that ends is started again in its pod, for which the runtime needs the specs."""
        if self.on.get(machine.tray.name) is machine and not all(spec.exists() for spec in specs):
            name = pod["metadata"]["name"]
            node = machine.tray.name
            self._channels.broken.append(f"the CDI spec of {name} went away on {node} while it ran")

    def _machine(self, node: str) -> TrayMachine:
        if node not in self.on:
            raise Retry("the machine is off", after=1.0)
        return self.on[node]

    def _specs(self, machine: TrayMachine, pod: Object) -> tuple[Path, ...]:
        """The CDI specs that the runtime reads for the pod's containers."""
        claims = [
            self._kube.store.read(RESOURCE_CLAIM, (pod["metadata"]["namespace"], name))
            for name in pod_claim_names(pod)
        ]
        return tuple(
            machine.tray.places.cdi / f"k8s.{names.IMEX_DRIVER}-claim_{claim['metadata']['uid']}.yaml"
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


async def _call_plugin(
    call: Callable[[PluginProcess], Awaitable[dict[str, ClaimAnswer]]], running: PluginProcess
) -> dict[str, ClaimAnswer]:
    return await call(running)


async def _report_once_ready(imex: SimulatedImexProgram, ready: Callable[[], Awaitable[None]]) -> None:
    await imex.is_ready.wait()
    await ready()
