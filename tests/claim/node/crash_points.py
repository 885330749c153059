"""A plugin that is killed at every single point of its work and started again, for the tests of each plugin.

A crash point is the moment before or after a call to the API server, or before a write reaches the disk. The
tests of a plugin add their own: programs of the driver, requests to the kernel.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rackloom.claim.node.plugin import PrepareState
from rackloom.claim.node.run import PluginProcess
from rackloom.core.cluster.objects import RESOURCE_CLAIM
from rackloom.lab.nodes.dra_manager import PodClaim
from rackloom.lab.virtual.event_loop import run_simulation
from rackloom.runtime import durable_files


class Killed(BaseException):
    """Nothing catches this: the process is gone."""


class Fuse:
    """Kills at point number `death`, or never if it is None."""

    def __init__(self, death: int | None) -> None:
        self.death = death
        self.point = 0

    def burn(self) -> None:
        self.point += 1
        if self.point == self.death:
            raise Killed


class FusedApi:
    """An API server whose client may die before a call is sent or after it was carried out."""

    def __init__(self, api: Any, fuse: Fuse) -> None:
        self._api = api
        self._fuse = fuse

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._api, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._fuse.burn()
            answer = await method(*args, **kwargs)
            self._fuse.burn()
            return answer

        return method if name == "watch" else call


def fuse_the_disk(fuse: Fuse, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename or a content may be lost before a sync, but not after it. A kill alone loses nothing."""
    unlink = Path.unlink

    def fused_unlink(path: Path, missing_ok: bool = False) -> None:
        fuse.burn()
        unlink(path, missing_ok)

    monkeypatch.setattr(durable_files.os, "fsync", lambda _handle: fuse.burn())
    monkeypatch.setattr(Path, "unlink", fused_unlink)


class Lives(ABC):
    """The lives of a plugin on one node, and the calls of kubelet. A subclass makes the plugin."""

    claims: Sequence[PodClaim]

    def __init__(self, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kit = kit
        self.fuse = Fuse(None)
        fuse_the_disk(self.fuse, monkeypatch)

    @abstractmethod
    async def set_up(self) -> None:
        """Make the node and its claims."""

    @abstractmethod
    async def start(self) -> PluginProcess:
        """A new life, as after a restart."""

    @abstractmethod
    def edits(self, uid: str) -> Any:
        """The edits that a container of the claim gets."""

    @abstractmethod
    async def check_held(self) -> None:
        """The node is as the claims want it."""

    @abstractmethod
    async def check_untouched(self) -> None:
        """The node is as if there had been no claim."""

    def reboot(self) -> None:
        self.kit.boot_id = "boot-2"
        for file in self.kit.places.cdi.iterdir():
            file.unlink()

    async def work(self, plugin_process: PluginProcess) -> None:
        """Kubelet prepares the claims and gives them back."""
        for claim in self.claims:
            await self.prepare(plugin_process, claim)
        for claim in self.claims:
            await self.unprepare(plugin_process, claim)

    async def prepare(self, plugin_process: PluginProcess, claim: PodClaim) -> None:
        (answer,) = (await plugin_process.requests.prepare([claim.ref])).values()
        assert not answer.error, answer.error
        assert self.edits(claim.uid)
        assert plugin_process.checkpoint.claims[claim.uid].state is PrepareState.COMPLETED

    async def unprepare(self, plugin_process: PluginProcess, claim: PodClaim) -> None:
        (answer,) = (await plugin_process.requests.unprepare([claim.ref])).values()
        assert not answer.error, answer.error

    async def check_released(self, plugin_process: PluginProcess) -> None:
        """Nothing is left once the marks of given-up claims have expired."""
        self.kit.now += 100
        await plugin_process.sweeper.sweep()
        assert plugin_process.checkpoint.claims == {}
        await self.check_untouched()
        assert list(self.kit.places.cdi.iterdir()) == []


async def kubelet_goes_on(lives: Lives) -> None:
    process = await lives.start()
    for claim in lives.claims:
        entry = process.checkpoint.claims.get(claim.uid)
        if entry is None or entry.state is not PrepareState.ABORTED:
            await lives.prepare(process, claim)
    await lives.check_held()
    for claim in lives.claims:
        await lives.unprepare(process, claim)
    await lives.check_released(process)


async def the_pod_is_deleted(lives: Lives) -> None:
    process = await lives.start()
    for claim in lives.claims:
        await lives.unprepare(process, claim)
    await lives.check_released(process)


async def everything_is_gone_before_the_restart(lives: Lives) -> None:
    for claim in lives.claims:
        await lives.kit.api.delete(RESOURCE_CLAIM, claim.ref.name, claim.ref.namespace)
    process = await lives.start()
    await process.sweeper.sweep()
    # kubelet knows the completed claims and gives them back. Our sweep removes those only begun.
    for claim in lives.claims:
        entry = process.checkpoint.claims.get(claim.uid)
        if entry is not None and entry.state is PrepareState.COMPLETED:
            await lives.unprepare(process, claim)
    await lives.check_released(process)


async def the_node_is_rebooted(lives: Lives) -> None:
    lives.reboot()
    await kubelet_goes_on(lives)


async def the_node_is_rebooted_and_the_pod_is_deleted(lives: Lives) -> None:
    """Kubelet gives back the claims in its files. No new prepare could repair a lost record."""
    lives.reboot()
    await the_pod_is_deleted(lives)


async def the_node_is_rebooted_and_everything_is_gone(lives: Lives) -> None:
    """The disk of kubelet is new as well: it never mentions the claims again."""
    for claim in lives.claims:
        await lives.kit.api.delete(RESOURCE_CLAIM, claim.ref.name, claim.ref.namespace)
    lives.reboot()
    process = await lives.start()
    await process.sweeper.sweep()
    await lives.check_released(process)


Ending = Callable[[Lives], Awaitable[None]]
ENDINGS: tuple[Ending, ...] = (
    kubelet_goes_on,
    the_pod_is_deleted,
    everything_is_gone_before_the_restart,
    the_node_is_rebooted,
    the_node_is_rebooted_and_the_pod_is_deleted,
    the_node_is_rebooted_and_everything_is_gone,
)


def deaths_survived(begin: Callable[[pytest.MonkeyPatch], Lives], ending: Ending) -> int:
    """The number of points to die at. A death at each was tried, and the ending came out well."""
    return next(death for death in itertools.count(1) if not _one_death(begin, ending, death)) - 1


def _one_death(begin: Callable[[pytest.MonkeyPatch], Lives], ending: Ending, death: int) -> bool:
    with pytest.MonkeyPatch.context() as monkeypatch:
        lives = begin(monkeypatch)

        async def story() -> bool:
            await lives.set_up()
            lives.fuse.point, lives.fuse.death = 0, death
            died = await _live_and_die(lives)
            lives.fuse.death = None
            if died:
                await ending(lives)
            return died

        return run_simulation(1, story)


async def _live_and_die(lives: Lives) -> bool:
    """Work until the fuse burns down. Returns whether it did."""
    try:
        await lives.work(await lives.start())
    except Killed:
        return True
    return False
