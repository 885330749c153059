"""A whole cluster: API server, Kubernetes' own controllers, kubelets, our processes, and their deaths."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from rackloom.claim.cluster.controller import Controller
from rackloom.claim.cluster.settings import DEFAULT_DAEMON_NAMESPACE, DaemonSettings, Settings
from rackloom.claim.domain.isolation import Isolation
from rackloom.claim.kube.api import KubeError, NotFound, Object
from rackloom.claim.kube.events import Recorder
from rackloom.claim.kube.kinds import DEVICE_CLASS, NODE, POD
from rackloom.twin.claims.life import Life
from rackloom.twin.claims.machines import Machine, Machines
from rackloom.twin.claims.processes import Kept
from rackloom.twin.claims.seen import Seen
from rackloom.twin.claims.steps import Steps, stepped
from rackloom.twin.claims.tray import Tray, install_kernel
from rackloom.twin.kube import DirectApi, FakeKube, Fault
from rackloom.twin.kube.controllers import DaemonSets, PodClaims, Scheduler
from rackloom.twin.kube.times import loop_time
from rackloom.twin.nodes.kubelets import Kubelets
from rackloom.twin.nodes.node_objects import LEASE_NAMESPACE, NodeSpec

TEAM = "team"
TRAYS = 3
API_SECONDS = 0.005
CONTROLLER_RESTART = 5.0
SERVER_DOWN = 2.0
REBOOT = 20.0
LOST_AFTER = 40.0
"""Seconds until a node that is off for good is taken out of the cluster, with its pods."""


class Death(StrEnum):
    """Who dies at a step; where it is about a tray, the one on which the step was taken."""

    CONTROLLER = "controller"
    PLUGIN = "plugin"
    DAEMON = "daemon"
    SERVER = "server"
    REBOOT = "reboot"
    LOST = "lost"


class Plant:
    """One cluster of three trays in one clique. `death` comes at step `at`."""

    def __init__(
        self,
        root: Path,
        classes: Sequence[Object],
        isolation: Isolation,
        *,
        death: Death | None = None,
        at: int = 0,
    ) -> None:
        install_kernel(root)
        self.isolation = isolation
        self.kube = FakeKube(namespaces=("default", LEASE_NAMESPACE, TEAM, DEFAULT_DAEMON_NAMESPACE))
        self.kube.faults.delay(API_SECONDS)
        self.user = DirectApi(self.kube, "user")
        self.trays = {tray.name: tray for tray in (Tray(root, 1, number) for number in range(TRAYS))}
        self.seen = Seen(loop_time)
        self.kube.store.listeners.append(self.seen.written)
        self.machines = Machines(self.kube, self.seen)
        self.steps = Steps(self._strike)
        self.died = False
        self._death, self._at = death, at
        self._classes = classes
        api = DirectApi(self.kube, "kubelet")
        rng = random.Random(1)  # noqa: S311 (reproducible on purpose)
        self._kubelets = Kubelets(
            api,
            loop_time,
            rng,
            devices=self.machines.devices,
            containers=self.machines,
            on_resync=self.seen.resynced,
        )
        self._controller = Kept(Life("controller"), self._control, CONTROLLER_RESTART, self.seen.broken)
        self._work: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Everything comes up."""
        for one in self._classes:
            await self.user.create(DEVICE_CLASS, one)
        rng = random.Random(1)  # noqa: S311 (reproducible on purpose)
        kubernetes = (DaemonSets(self.kube, rng), PodClaims(self.kube, rng), Scheduler(self.kube, rng))
        self._go_on(self._kubelets.run(), *(one.run() for one in kubernetes), self._controller.run())
        for tray in self.trays.values():
            await self._boot(tray, 1)

    async def end(self) -> None:
        """Stop everything. Whatever had ended before is told as broken."""
        tasks = [*self._work, *(machine.keeper for machine in self.machines.on.values())]
        ended = [task for task in tasks if task.done() and not task.cancelled()]
        self.seen.broken += [repr(failed) for task in ended if (failed := task.exception()) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def living_trays(self) -> tuple[Tray, ...]:
        """Those that are switched on."""
        return tuple(machine.tray for machine in self.machines.on.values())

    async def _control(self, life: Life) -> None:
        api = stepped(DirectApi(self.kube, "controller"), life, self.steps)
        recorder = Recorder(api, "rackloom-controller", "twin", loop_time)
        settings = Settings(daemon=DaemonSettings(image="none"), isolation=self.isolation)
        rng = random.Random(1)  # noqa: S311 (reproducible on purpose)
        await Controller(api, settings, recorder, loop_time, rng).run()

    async def _boot(self, tray: Tray, boot: int) -> None:
        self.machines.on[tray.name] = Machine(
            self.kube, tray, self.isolation, self.steps, self.seen, boot=boot
        )
        spec = NodeSpec(tray.name, labels=tray.labels, boot_id=str(boot))
        await insist(lambda: self._kubelets.register(spec))

    def _go_on(self, *work: Coroutine[Any, Any, None]) -> None:
        self._work += [asyncio.create_task(one) for one in work]

    def _strike(self, step: int, tray: str) -> None:
        if step != self._at or self._death is None:
            return
        self.died = True
        machine = self.machines.on.get(tray) or self._busy()
        match self._death:
            case Death.CONTROLLER:
                self._controller.life.kill()
            case Death.PLUGIN:
                machine.plugin.life.kill()
            case Death.DAEMON:
                for kept in machine.daemons.values():
                    kept.life.kill()
            case Death.SERVER:
                self._stop_server()
            case Death.REBOOT:
                self._cut(machine)
                self._go_on(self._reboot(machine))
            case Death.LOST:
                self._cut(machine)
                self._go_on(self._lose(machine.tray.name))

    def _busy(self) -> Machine:
        """A machine with a job on it, else any."""
        nodes = (pod["spec"].get("nodeName") for pod in self.kube.store.all(POD) if _is_of_a_job(pod))
        busy = (self.machines.on[node] for node in nodes if node in self.machines.on)
        return next(busy, next(iter(self.machines.on.values())))

    def _stop_server(self) -> None:
        """It comes back with the records, and remembers no change that a watch could go on from."""
        self.steps.server_is_down = True
        for lost in ("request", "reply"):
            self.kube.faults.add(Fault(lost=lost))
        self.kube.store.hang_up()
        self.kube.store.compact()
        asyncio.get_running_loop().call_later(SERVER_DOWN, self._start_server)

    def _start_server(self) -> None:
        self.steps.server_is_down = False
        self.seen.changed()
        self.kube.faults.clear()

    def _cut(self, machine: Machine) -> None:
        del self.machines.on[machine.tray.name]
        machine.cut()

    async def _reboot(self, machine: Machine) -> None:
        await self._kubelets.lose(machine.tray.name)
        await asyncio.sleep(REBOOT)
        await self._boot(machine.tray, machine.boot + 1)

    async def _lose(self, node: str) -> None:
        await self._kubelets.lose(node)
        await asyncio.sleep(LOST_AFTER)
        await insist(lambda: self.user.delete(NODE, node))
        for pod in self.kube.store.all(POD):
            if pod["spec"].get("nodeName") == node:
                await self.delete_pod(pod, grace_seconds=0)

    async def delete_pod(self, pod: Object, grace_seconds: int | None = None) -> None:
        """Delete a pod, if it is there."""
        meta = pod["metadata"]
        await insist(
            lambda: self.user.delete(POD, meta["name"], meta["namespace"], grace_seconds=grace_seconds)
        )


async def insist(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """The answer of a server that may be down; None where there is no such object."""
    while True:
        try:
            return await call()
        except NotFound:
            return None
        except KubeError as error:
            if error.code not in (0, 409):
                raise
            await asyncio.sleep(0.5)


def _is_of_a_job(pod: Object) -> bool:
    return bool(pod["metadata"]["namespace"] == TEAM)
