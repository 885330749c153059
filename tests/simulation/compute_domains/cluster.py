"""The cluster of a ComputeDomain story: API server, controllers, kubelets, and their disruptions.

`ComputeDomainCluster` has the trays of one clique. Two candidates compete for the controllers' lease,
so that a stopped leader is followed by the other one and later resumes in the belief that it leads.

`Disruption` lists the events at a crash point. The controller, the plugin or a daemon is killed, or stopped
for longer than every lease and timeout and then resumed. The API server restarts (it keeps its objects, loses
its watch history and all watches). The tray reboots, or is lost for good, and its node and pods are deleted
later. A disruption of a tray strikes the tray on which the step was taken, or a busy one.

`end` stops everything. Tasks that outlived their process, and tasks that ended early, are reported as
violations.
"""

import asyncio
import contextvars
import random
from collections.abc import Callable, Coroutine, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.simulation.compute_domains.machines import StoryTray, TrayMachines
from tests.simulation.compute_domains.processes import ProcessTasks
from tests.simulation.compute_domains.tray import write_kernel_files
from tests.simulation.invariants.memory import ChannelInvariants, ImexMemberInvariants

from rackloom.claim.cluster.domain_controller import DomainController
from rackloom.claim.cluster.gang_controller import GangController
from rackloom.claim.kube.api import EventRecorder, KubeApi, KubeError, NotFound
from rackloom.claim.kube.leader import LeaderElection
from rackloom.core.cluster import names
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN_CLIQUE,
    DEVICE_CLASS,
    NODE,
    POD,
    Object,
    has_pod_ended,
)
from rackloom.core.domains.settings import (
    DEFAULT_DAEMON_NAMESPACE,
    DEFAULT_NAMESPACE,
    ControllerSettings,
    ImexDaemonSettings,
)
from rackloom.core.gangs.snapshot import GangSettings
from rackloom.lab.kube.controllers.claims import ResourceClaimController
from rackloom.lab.kube.controllers.scheduler import SimulatedScheduler
from rackloom.lab.kube.controllers.workloads import DaemonSetController, NodeLifecycleController
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.kube.store import key_of
from rackloom.lab.nodes.kubelets import LEASE_NAMESPACE, NodeSpec, SimulatedKubelets
from rackloom.lab.virtual.event_loop import loop_wall_time
from rackloom.lab.virtual.process import (
    CrashPoints,
    Process,
    RestartedProcess,
    with_crash_points,
)

JOB_NAMESPACE = "team"
GPUS_PER_TRAY = "4"
CANDIDATES = 2
API_SECONDS = 0.005
CONTROLLER_RESTART_SECONDS = 5.0
SERVER_DOWN_SECONDS = 2.0
REBOOT_SECONDS = 20.0
LOST_AFTER_SECONDS = 40.0
"""Seconds until a node that is off for good is taken out of the cluster, with its pods."""
STOPPED_SECONDS = 60.0
"""Seconds: longer than the controllers' lease, a node's heartbeat counts, and kubelet waits for a plugin."""
GANG_SETTINGS = GangSettings(lost_after=60.0, bind_after=30.0, again=5.0)


class StoryKind(StrEnum):
    """The subject of a story: a mode of the clique, or a gang in a clique of the first mode."""

    DOMAIN = "domain"
    CHANNEL = "channel"
    GANG = "gang"

    @property
    def isolation(self) -> ImexIsolation:
        """The mode of the clique."""
        return ImexIsolation.CHANNEL if self is StoryKind.CHANNEL else ImexIsolation.DOMAIN

    @property
    def trays(self) -> int:
        """As many as two members of a gang need where one tray is lost for good and one for a while."""
        return 4 if self is StoryKind.GANG else 3


class Disruption(StrEnum):
    """The part that is killed at a step, or stopped there and resumed later.

    A disruption of a tray strikes the tray on which the step was taken.
    """

    CONTROLLER = "controller"
    PLUGIN = "plugin"
    DAEMON = "daemon"
    SERVER = "server"
    REBOOT = "reboot"
    LOST = "lost"
    CONTROLLER_STOPS = "controller-stops"
    PLUGIN_STOPS = "plugin-stops"
    DAEMON_STOPS = "daemon-stops"


STOP_DISRUPTIONS = {
    Disruption.CONTROLLER_STOPS: Disruption.CONTROLLER,
    Disruption.PLUGIN_STOPS: Disruption.PLUGIN,
    Disruption.DAEMON_STOPS: Disruption.DAEMON,
}
"""Disruptions that stop a process instead of killing it."""


class ComputeDomainCluster:
    """One cluster of trays in one clique. `death` comes at step `at`."""

    def __init__(
        self,
        root: Path,
        classes: Sequence[Object],
        kind: StoryKind,
        *,
        death: Disruption | None = None,
        at: int = 0,
    ) -> None:
        write_kernel_files(root)
        self.kind = kind
        self.isolation = kind.isolation
        self.kube = FakeKube(
            namespaces=(
                "default",
                LEASE_NAMESPACE,
                JOB_NAMESPACE,
                DEFAULT_NAMESPACE,
                DEFAULT_DAEMON_NAMESPACE,
            )
        )
        self.kube.faults.delay(API_SECONDS)
        self.user = DirectApi(self.kube, "user")
        self.channels = ChannelInvariants(loop_wall_time)
        self._members = ImexMemberInvariants(
            self._is_there, self._runs_daemon, self._was_ready, self.channels.broken
        )
        self.kube.store.listeners += [self.channels.written, self._members.written]
        self.machines = TrayMachines(self.kube, self.channels)
        # A disruption runs outside the process that took the step, since it may stop that process.
        context = contextvars.copy_context()
        self.steps = CrashPoints(lambda step, tray: context.copy().run(self._strike, step, tray))
        trays = (
            StoryTray(root, number, self.kube, self.isolation, self.steps, self.channels)
            for number in range(kind.trays)
        )
        self.trays = {tray.name: tray for tray in trays}
        self._tasks = ProcessTasks()
        asyncio.get_running_loop().set_task_factory(self._tasks.make)  # type: ignore[arg-type]  # the loop is a SimLoop
        self.died = False
        self._death, self._at = death, at
        self._classes = classes
        api = DirectApi(self.kube, "kubelet")
        rng = random.Random(1)
        self._kubelets = SimulatedKubelets(
            api,
            loop_wall_time,
            rng,
            devices=self.machines.devices,
            containers=self.machines,
            on_resync=self.channels.resynced,
        )
        self._candidates = [
            RestartedProcess(
                Process(f"controller-{number}"),
                self._control,
                CONTROLLER_RESTART_SECONDS,
                self.channels.broken,
            )
            for number in range(CANDIDATES)
        ]
        self._leader = self._candidates[0].life
        self._terms = 0
        self._work: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Start everything."""
        for klass in self._classes:
            await self.user.create(DEVICE_CLASS, klass)
        rng = random.Random(1)
        kubernetes = (
            DaemonSetController(self.kube, rng),
            ResourceClaimController(self.kube, rng),
            SimulatedScheduler(self.kube, rng),
        )
        self._spawn(self._kubelets.run(), *(kubernete.run() for kubernete in kubernetes))
        self._spawn(*(candidate.run() for candidate in self._candidates))
        if self.kind is StoryKind.GANG:
            self._spawn(NodeLifecycleController(self.kube, loop_wall_time).run())
        for tray in self.trays.values():
            await self.boot(tray)

    async def end(self) -> None:
        """Stop everything. A task that had already ended is reported as a violation."""
        self.kube.store.listeners.remove(self._members.written)
        tasks = [*self._work, *(tray.keeper for tray in self.machines.on.values())]
        self.channels.broken += self._tasks.of_the_dead()
        ended = [task for task in tasks if task.done() and not task.cancelled()]
        self.channels.broken += [repr(failed) for task in ended if (failed := task.exception()) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _control(self, life: Process) -> None:
        """One candidate, until cancelled. Its identity is of this process alone, as the name of a pod is."""
        api = with_crash_points(DirectApi(self.kube, "controller"), life, self.steps)
        self._terms += 1
        identity = f"{life.name}-{self._terms}"
        rng = random.Random(identity)
        election = LeaderElection(
            api, DEFAULT_NAMESPACE, "rackloom-controller", identity, wall=loop_wall_time, rng=rng
        )
        await election.run(lambda: self._lead(life, api, identity, rng))

    async def _lead(self, life: Process, api: KubeApi, identity: str, rng: random.Random) -> None:
        self._leader = life
        recorder = EventRecorder(api, "rackloom-controller", identity, loop_wall_time)
        settings = ControllerSettings(
            daemon=ImexDaemonSettings(image="none"),
            isolation=self.isolation,
            lost_after=GANG_SETTINGS.lost_after,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(DomainController(api, settings, recorder, loop_wall_time, rng).run())
            if self.kind is StoryKind.GANG:
                gangs = GangController(api, recorder, loop_wall_time, rng, GANG_SETTINGS)
                tasks.create_task(gangs.run())

    def _is_there(self, obj: Object) -> bool:
        return self.kube.store.find(COMPUTE_DOMAIN_CLIQUE, key_of(obj)) is not None

    def _runs_daemon(self, domain: str, node: str) -> bool:
        """Whether the daemon of a ComputeDomain is to go on on a node that is on."""
        pods = (pod for pod in self.kube.store.all(POD) if pod["spec"].get("nodeName") == node)
        return node in self.machines.on and any(
            (pod["metadata"].get("labels") or {}).get(names.COMPUTE_DOMAIN_LABEL) == domain
            and "deletionTimestamp" not in pod["metadata"]
            and not has_pod_ended(pod)
            for pod in pods
        )

    def _was_ready(self, node: str, address: str) -> bool:
        """Whether a daemon was READY there, of any: in channel mode all show those of their clique.

        Also on a tray that is off: its last report may arrive late.
        """
        return address in self.trays[node].ready_addresses

    async def boot(self, tray: StoryTray) -> None:
        """A tray has power, for the first time or again."""
        tray.boot()
        self.machines.on[tray.name] = tray
        capacity = {"cpu": "96", "memory": "1000Gi", "pods": "110", "nvidia.com/gpu": GPUS_PER_TRAY}
        spec = NodeSpec(tray.name, labels=tray.labels, capacity=capacity, boot_id=tray.boot_id)
        await retry_until_answered(lambda: self._kubelets.register(spec))

    def _spawn(self, *work: Coroutine[Any, Any, None]) -> None:
        self._work += [asyncio.create_task(coroutine) for coroutine in work]

    def _strike(self, step: int, tray: str) -> None:
        if step != self._at or self._death is None:
            return
        self.died = True
        struck = self.machines.on.get(tray) or self._busy()
        match self._death:
            case Disruption.SERVER:
                self._stop_server()
            case Disruption.REBOOT:
                self._cut(struck)
                self._spawn(self._reboot(struck))
            case Disruption.LOST:
                self._cut(struck)
                self._spawn(self._lose(struck))
            case Disruption.CONTROLLER | Disruption.PLUGIN | Disruption.DAEMON as who:
                for life in self._lives(who, struck):
                    life.kill()
            case stops:
                for life in self._lives(STOP_DISRUPTIONS[stops], struck):
                    life.stop()
                    asyncio.get_running_loop().call_later(STOPPED_SECONDS, life.resume)

    def _lives(self, who: Disruption, tray: StoryTray) -> list[Process]:
        """The processes that a disruption strikes."""
        match who:
            case Disruption.CONTROLLER:
                return [self._leader]
            case Disruption.PLUGIN:
                return [tray.plugin.life]
            case _:
                return [daemon.life for daemon in tray.daemons.values()]

    def _busy(self) -> StoryTray:
        """A tray with a job on it, else any."""
        pods = (pod for pod in self.kube.store.all(POD) if pod["metadata"]["namespace"] == JOB_NAMESPACE)
        nodes = (pod["spec"].get("nodeName") for pod in pods)
        busy = (self.machines.on[node] for node in nodes if node in self.machines.on)
        return next(busy, next(iter(self.machines.on.values())))

    def _stop_server(self) -> None:
        """It comes back with its objects, and without the history that a watch could continue from."""
        self.steps.server_is_down = True
        for lost in ("request", "reply"):
            self.kube.faults.add(RequestFault(lost=lost))
        self.kube.store.hang_up()
        self.kube.store.compact()
        asyncio.get_running_loop().call_later(SERVER_DOWN_SECONDS, self._start_server)

    def _start_server(self) -> None:
        self.steps.server_is_down = False
        self.channels.changed()
        self.kube.faults.clear()

    def _cut(self, tray: StoryTray) -> None:
        del self.machines.on[tray.name]
        tray.power_off()

    async def _reboot(self, tray: StoryTray) -> None:
        await self._kubelets.lose(tray.name)
        await asyncio.sleep(REBOOT_SECONDS)
        await self.boot(tray)

    async def cut_off(self, tray: StoryTray) -> None:
        """The power of a tray fails until it is booted."""
        self._cut(tray)
        await self._kubelets.lose(tray.name)

    async def _lose(self, tray: StoryTray) -> None:
        await self._kubelets.lose(tray.name)
        await asyncio.sleep(LOST_AFTER_SECONDS)
        await retry_until_answered(lambda: self.user.delete(NODE, tray.name))
        for pod in self.kube.store.all(POD):
            if pod["spec"].get("nodeName") == tray.name:
                await self.delete_pod(pod, grace_seconds=0)

    async def delete_pod(self, pod: Object, grace_seconds: int | None = None) -> None:
        """Delete a pod, if it is there."""
        meta = pod["metadata"]
        await retry_until_answered(
            lambda: self.user.delete(POD, meta["name"], meta["namespace"], grace_seconds=grace_seconds)
        )


async def retry_until_answered(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """The answer of a server that may be down, or None if there is no such object."""
    while True:
        try:
            return await call()
        except NotFound:
            return None
        except KubeError as error:
            if error.code not in (0, 409):
                raise
            await asyncio.sleep(0.5)
