"""The IMEX plugin killed at every single point of its work, and started again.

A point is the moment before or after a call to the API server, or before or after anything reaches the disk.
"""

import itertools
from pathlib import Path

import pytest

from rackloom.claim.domain import names
from rackloom.claim.domain.objects import Readiness
from rackloom.claim.kube.kinds import RESOURCE_CLAIM
from rackloom.claim.node import files
from rackloom.claim.node.run import Running
from rackloom.claim.node.values import State
from rackloom.twin.simloop import run


class Killed(BaseException):
    """Nothing catches this: the process is gone."""


class Fuse:
    """Kills at point number `death`; None never."""

    def __init__(self, death):
        self.death = death
        self.point = 0

    def burn(self):
        self.point += 1
        if self.point == self.death:
            raise Killed


class FusedApi:
    """An API server whose client may die before a call is sent or after it was carried out."""

    def __init__(self, api, fuse):
        self._api = api
        self._fuse = fuse

    def __getattr__(self, name):
        method = getattr(self._api, name)
        if name == "watch":
            return method

        async def call(*args, **kwargs):
            self._fuse.burn()
            answer = await method(*args, **kwargs)
            self._fuse.burn()
            return answer

        return call


class Node:
    """The plugin's lives on one node, and what kubelet wants of it."""

    def __init__(self, imex, fuse, monkeypatch):
        self.imex, self.fuse = imex, fuse
        unlink = Path.unlink

        def fused_fsync(_handle):
            # Before it a rename or a content may be lost, after it not; a kill alone loses nothing.
            fuse.burn()

        def fused_unlink(path, missing_ok=False):
            fuse.burn()
            unlink(path, missing_ok)

        monkeypatch.setattr(files.os, "fsync", fused_fsync)
        monkeypatch.setattr(Path, "unlink", fused_unlink)

    def start(self):
        """A new life, as after a restart."""
        home = self.imex.kit.places.home(names.IMEX_DRIVER)
        home.mkdir(parents=True, exist_ok=True)
        api = FusedApi(self.imex.api, self.fuse)
        return Running(self.imex.plugin(api), api, self.imex.kit.host())

    async def set_up(self):
        await self.imex.kit.boot()
        self.uid = await self.imex.domain()
        await self.imex.ready(self.uid, status=Readiness.READY)
        self.channel = await self.imex.channel("work", self.uid)
        self.daemon = await self.imex.daemon("daemon", self.uid)

    async def work(self, one):
        """Kubelet prepares both claims and gives them back."""
        for claim in (self.channel, self.daemon):
            await self.prepare(one, claim)
        for claim in (self.channel, self.daemon):
            await self.unprepare(one, claim)

    async def prepare(self, one, claim):
        (answer,) = (await one.requests.prepare([claim.ref])).values()
        assert not answer.error, answer.error
        assert self.imex.edits(claim.uid)
        assert one.checkpoint.claims[claim.uid].state is State.COMPLETED

    async def unprepare(self, one, claim):
        (answer,) = (await one.requests.unprepare([claim.ref])).values()
        assert not answer.error, answer.error

    async def check_released(self, one):
        """Nothing is left once the marks of given-up claims have expired."""
        self.imex.kit.now += 100
        await one.sweeper.sweep()
        assert one.checkpoint.claims == {}
        assert await self.imex.label() is None
        assert list(self.imex.kit.places.cdi.iterdir()) == []


async def live_and_die(node):
    """Work until the fuse burns down; whether it did."""
    try:
        await node.work(node.start())
    except Killed:
        return True
    return False


async def kubelet_goes_on(node):
    one = node.start()
    for claim in (node.channel, node.daemon):
        entry = one.checkpoint.claims.get(claim.uid)
        if entry is None or entry.state is not State.ABORTED:
            await node.prepare(one, claim)
    assert await node.imex.label() == node.uid
    for claim in (node.channel, node.daemon):
        await node.unprepare(one, claim)
    await node.check_released(one)


async def the_pod_is_deleted(node):
    one = node.start()
    for claim in (node.channel, node.daemon):
        await node.unprepare(one, claim)
    await node.check_released(one)


async def everything_is_gone_before_the_restart(node):
    for claim in (node.channel, node.daemon):
        await node.imex.api.delete(RESOURCE_CLAIM, claim.ref.name, claim.ref.namespace)
    one = node.start()
    await one.sweeper.sweep()
    # What was completed is known to kubelet, which gives it back; what was only begun is swept by us.
    for claim in (node.channel, node.daemon):
        entry = one.checkpoint.claims.get(claim.uid)
        if entry is not None and entry.state is State.COMPLETED:
            await node.unprepare(one, claim)
    await node.check_released(one)


async def the_node_is_rebooted(node):
    node.imex.kit.boot_id = "boot-2"
    for file in node.imex.kit.places.cdi.iterdir():
        file.unlink()
    await kubelet_goes_on(node)


ENDINGS = (kubelet_goes_on, the_pod_is_deleted, everything_is_gone_before_the_restart, the_node_is_rebooted)


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_killed_at_any_point_nothing_is_orphaned(ending, make_imex):
    def one_death(death):
        with pytest.MonkeyPatch.context() as monkeypatch:
            node = Node(make_imex(), Fuse(None), monkeypatch)

            async def story():
                await node.set_up()
                node.fuse.point, node.fuse.death = 0, death
                died = await live_and_die(node)
                node.fuse.death = None
                if died:
                    await ending(node)
                return died

            return run(1, story)

    deaths = next(death for death in itertools.count(1) if not one_death(death)) - 1
    assert deaths > 40
