"""The GPU plugin killed at every single point of its work, and started again."""

from pathlib import Path

import pytest
from tests.claim.node.crash_points import ENDINGS, FusedApi, Lives, deaths_survived

from rackloom.claim.node.gpu import mps, mps_launcher
from rackloom.claim.node.gpu.driver_programs import ProgramFailed
from rackloom.claim.node.gpu.mps_launcher import OwnContainer
from rackloom.claim.node.gpu.plugin import GPU_DRIVER, GpuPlugin, GpuSettings
from rackloom.claim.node.run import PluginProcess

API = "resource.nvidia.com/v1beta1"


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
        self.under_way = []

    def environment(self):
        return {}

    async def run(self, *command, stdin="", env=None):
        self.fuse.burn()
        output = self._do(command, stdin.strip(), env or {})
        self.fuse.burn()
        return output

    def _do(self, command, output, env):
        match command:
            case ("nvidia-smi", "compute-policy", "-i", gpu, "--set-timeslice", number):
                self.slices[gpu] = int(number)
            case ("nvidia-smi", "-i", gpu, "-c", mode):
                self.modes[gpu] = mode
            case ("unshare", *_):
                assert env["CUDA_MPS_PIPE_DIRECTORY"] not in self.daemons
                assert Path(env["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
                self.daemons.add(env["CUDA_MPS_PIPE_DIRECTORY"])
            case (mps_launcher.MPS_CONTROL,):
                if env["CUDA_MPS_PIPE_DIRECTORY"] not in self.daemons:
                    raise ProgramFailed("Cannot find MPS control daemon process", after=1.0)
                if output == "quit":
                    self.daemons.remove(env["CUDA_MPS_PIPE_DIRECTORY"])
            case _:
                raise AssertionError(command)

    def end_what_is_under_way(self):
        self.daemons.update(self.under_way)
        self.under_way = []

    def check_untouched(self):
        self.end_what_is_under_way()
        assert set(self.slices.values()) <= {0}
        assert set(self.modes.values()) <= {"DEFAULT"}
        assert self.daemons == set()


class LatePod:
    """The launcher in a separate pod. It carries out its requests even if the plugin is gone.

    It does so as late as possible: when a caller waits for it, or never makes another request.
    """

    def __init__(self, driver):
        self.driver = driver

    async def start(self, daemon):
        self.driver.fuse.burn()
        self.driver.under_way.append(daemon.env["CUDA_MPS_PIPE_DIRECTORY"])
        self.driver.fuse.burn()
        self.driver.end_what_is_under_way()
        self.driver.fuse.burn()

    async def settle(self):
        self.driver.fuse.burn()
        self.driver.end_what_is_under_way()
        self.driver.fuse.burn()


class GpuLives(Lives):
    """A GPU in time slices, and two that are shared under one MPS daemon."""

    def __init__(self, gpus, monkeypatch, launcher_type):
        super().__init__(gpus.kit, monkeypatch)
        self.gpus = gpus
        root = gpus.root / "driver"
        self.driver = Driver(root, self.fuse)
        self.launcher = launcher_type(self.driver)
        self.home = gpus.kit.places.home(GPU_DRIVER) / "mps"
        # The daemon's root sees the plugin's directories at the same path.
        self.home.mkdir(parents=True)
        (root / str(self.home).lstrip("/")).parent.mkdir(parents=True)
        (root / str(self.home).lstrip("/")).symlink_to(self.home)
        rmtree = mps.shutil.rmtree

        def fused_rmtree(path, ignore_errors=False):
            self.fuse.burn()
            rmtree(path, ignore_errors)

        monkeypatch.setattr(mps.shutil, "rmtree", fused_rmtree)

    async def set_up(self):
        await self.kit.boot()
        sliced = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Short"}}
        shared = {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 10}}
        self.claims = [
            await self.gpus.claim(name, *devices, configs=[config(sharing)])
            for name, devices, sharing in (
                ("sliced", ["gpu-0"], sliced),
                ("shared", ["gpu-1", "gpu-2"], shared),
            )
        ]

    async def start(self):
        api = FusedApi(self.gpus.api, self.fuse)
        view = self.gpus.view()
        plain = self.gpus.plugin(view)
        settings = GpuSettings(node=self.kit.node, mps_home=self.home, files=plain._settings.files)
        await view.observe()
        plugin = GpuPlugin(api, settings, view, self.driver, launcher=self.launcher)
        return PluginProcess(plugin, api, self.kit.host())

    def edits(self, uid):
        return self.gpus.edits(uid)

    async def check_held(self):
        assert set(self.driver.slices.values()) <= {0, 1}

    async def check_untouched(self):
        self.driver.check_untouched()
        assert list(self.home.iterdir()) == []
        assert list((self.driver.root / "dev/shm").glob("*")) == []

    def reboot(self):
        self.driver.boot()
        super().reboot()


def config(sharing):
    return ("FromClaim", [], {"apiVersion": API, "kind": "GpuConfig", "sharing": sharing})


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [OwnContainer, LatePod], ids=["own container", "pod"])
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_killed_at_any_point_no_gpu_stays_as_a_claim_left_it(ending, launcher, make_gpus):
    assert deaths_survived(lambda monkeypatch: GpuLives(make_gpus(), monkeypatch, launcher), ending) > 50
