"""The GPU plugin killed at every single point of its work, and started again.

A point is the moment before or after a call to the API server or a program of the driver, or a write to the
disk.
"""

import itertools
from pathlib import Path

import pytest

from rackloom.claim.kube.kinds import RESOURCE_CLAIM
from rackloom.claim.node import files
from rackloom.claim.node.gpu import mps
from rackloom.claim.node.gpu.plugin import GpuPlugin
from rackloom.claim.node.gpu.settings import GPU_DRIVER, GpuSettings
from rackloom.claim.node.run import Running
from rackloom.claim.node.values import State
from rackloom.errors import Retry
from rackloom.twin.simloop import run

API = "resource.nvidia.com/v1beta1"


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

        async def call(*args, **kwargs):
            self._fuse.burn()
            answer = await method(*args, **kwargs)
            self._fuse.burn()
            return answer

        return method if name == "watch" else call


class Driver:
    """The driver of a node, in the place of its programs: it outlives the plugin, and not a reboot."""

    def __init__(self, root, fuse):
        self.root = root
        self.fuse = fuse
        self.boot()

    def boot(self):
        self.slices = {}
        self.modes = {}
        self.daemons = set()

    async def run(self, *command, stdin="", env=None):
        self.fuse.burn()
        said = self._do(command, stdin.strip(), env or {})
        self.fuse.burn()
        return said

    def _do(self, command, said, env):
        match command:
            case ("nvidia-smi", "compute-policy", "-i", gpu, "--set-timeslice", number):
                self.slices[gpu] = int(number)
            case ("nvidia-smi", "-i", gpu, "-c", mode):
                self.modes[gpu] = mode
            case ("unshare", *_):
                assert env["CUDA_MPS_PIPE_DIRECTORY"] not in self.daemons
                assert Path(env["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
                self.daemons.add(env["CUDA_MPS_PIPE_DIRECTORY"])
            case (mps.CONTROL,):
                if env["CUDA_MPS_PIPE_DIRECTORY"] not in self.daemons:
                    raise Retry("Cannot find MPS control daemon process", after=1.0)
                if said == "quit":
                    self.daemons.remove(env["CUDA_MPS_PIPE_DIRECTORY"])
            case _:
                raise AssertionError(command)

    def check_untouched(self):
        assert set(self.slices.values()) <= {0}
        assert set(self.modes.values()) <= {"DEFAULT"}
        assert self.daemons == set()


class Node:
    """The plugin's lives on one node, and what kubelet wants of it."""

    def __init__(self, gpus, fuse, monkeypatch):
        self.gpus, self.fuse = gpus, fuse
        root = gpus.root / "driver"
        self.driver = Driver(root, fuse)
        home = gpus.kit.places.home(GPU_DRIVER) / "mps"
        # The daemon's root sees the plugin's directories at the same path.
        home.mkdir(parents=True)
        (root / str(home).lstrip("/")).parent.mkdir(parents=True)
        (root / str(home).lstrip("/")).symlink_to(home)
        unlink, rmtree = Path.unlink, mps.shutil.rmtree

        def fused_unlink(path, missing_ok=False):
            fuse.burn()
            unlink(path, missing_ok)

        def fused_rmtree(path, ignore_errors=False):
            fuse.burn()
            rmtree(path, ignore_errors)

        monkeypatch.setattr(mps.shutil, "rmtree", fused_rmtree)
        monkeypatch.setattr(files.os, "fsync", lambda _handle: fuse.burn())
        monkeypatch.setattr(Path, "unlink", fused_unlink)

    async def start(self):
        """A new life, as after a restart."""
        api = FusedApi(self.gpus.api, self.fuse)
        home = self.gpus.kit.places.home(GPU_DRIVER)
        view = self.gpus.view()
        plain = self.gpus.plugin(view)
        settings = GpuSettings(
            node=self.gpus.kit.node, mps_home=home / "mps", files=plain._settings.files, base_cdi_ids=()
        )
        await view.look()
        return Running(GpuPlugin(settings, view, self.driver), api, self.gpus.kit.host())

    async def set_up(self):
        await self.gpus.kit.boot()
        sliced = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Short"}}
        shared = {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 10}}
        self.claims = [
            await self.gpus.claim(name, *devices, configs=[config(sharing)])
            for name, devices, sharing in (
                ("sliced", ["gpu-0"], sliced),
                ("shared", ["gpu-1", "gpu-2"], shared),
            )
        ]

    async def work(self, one):
        """Kubelet prepares the claims and gives them back."""
        for claim in self.claims:
            await self.prepare(one, claim)
        for claim in self.claims:
            await self.unprepare(one, claim)

    async def prepare(self, one, claim):
        (answer,) = (await one.requests.prepare([claim.ref])).values()
        assert not answer.error, answer.error
        assert self.gpus.edits(claim.uid)
        assert one.checkpoint.claims[claim.uid].state is State.COMPLETED

    async def unprepare(self, one, claim):
        (answer,) = (await one.requests.unprepare([claim.ref])).values()
        assert not answer.error, answer.error

    async def check_released(self, one):
        """Nothing is left once the marks of given-up claims have expired."""
        self.gpus.kit.now += 100
        await one.sweeper.sweep()
        assert one.checkpoint.claims == {}
        self.driver.check_untouched()
        assert list((self.gpus.kit.places.home(GPU_DRIVER) / "mps").iterdir()) == []
        assert list((self.driver.root / "dev/shm").glob("*")) == []
        assert list(self.gpus.kit.places.cdi.iterdir()) == []


def config(sharing):
    return ("FromClaim", [], {"apiVersion": API, "kind": "GpuConfig", "sharing": sharing})


async def live_and_die(node):
    """Work until the fuse burns down; whether it did."""
    try:
        await node.work(await node.start())
    except Killed:
        return True
    return False


async def kubelet_goes_on(node):
    one = await node.start()
    for claim in node.claims:
        entry = one.checkpoint.claims.get(claim.uid)
        if entry is None or entry.state is not State.ABORTED:
            await node.prepare(one, claim)
    assert set(node.driver.slices.values()) <= {0, 1}
    for claim in node.claims:
        await node.unprepare(one, claim)
    await node.check_released(one)


async def the_pod_is_deleted(node):
    one = await node.start()
    for claim in node.claims:
        await node.unprepare(one, claim)
    await node.check_released(one)


async def everything_is_gone_before_the_restart(node):
    for claim in node.claims:
        await node.gpus.api.delete(RESOURCE_CLAIM, claim.ref.name, claim.ref.namespace)
    one = await node.start()
    await one.sweeper.sweep()
    # What was completed is known to kubelet, which gives it back; what was only begun is swept by us.
    for claim in node.claims:
        entry = one.checkpoint.claims.get(claim.uid)
        if entry is not None and entry.state is State.COMPLETED:
            await node.unprepare(one, claim)
    await node.check_released(one)


async def the_node_is_rebooted(node):
    node.gpus.kit.boot_id = "boot-2"
    node.driver.boot()
    for file in node.gpus.kit.places.cdi.iterdir():
        file.unlink()
    await kubelet_goes_on(node)


ENDINGS = (kubelet_goes_on, the_pod_is_deleted, everything_is_gone_before_the_restart, the_node_is_rebooted)


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_killed_at_any_point_no_gpu_stays_as_a_claim_left_it(ending, make_gpus):
    def one_death(death):
        with pytest.MonkeyPatch.context() as monkeypatch:
            node = Node(make_gpus(), Fuse(None), monkeypatch)

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
    assert deaths > 50
