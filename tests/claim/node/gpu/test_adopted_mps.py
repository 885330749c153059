"""MPS daemons of NVIDIA's driver after a takeover: they stay with their claims, and end with them."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.claim.node.conftest import NODE_NAME
from tests.claim.node.crash_points import ENDINGS, deaths_survived
from tests.claim.node.gpu.test_gpu_crash_points import GpuLives
from tests.claim.node.takeover import nvidia_files
from tests.node.nvidia_driver import NAMESPACE as NVIDIA
from tests.node.nvidia_driver import mps_deployment

from rackloom.claim.kube.api import NotFound, Rejected
from rackloom.claim.node.gpu.adopted_mps import AdoptedMpsDaemon, AdoptedMpsDaemons
from rackloom.claim.node.gpu.mps_launcher import OwnContainer
from rackloom.claim.node.gpu.plugin import GPU_DRIVER
from rackloom.claim.node.takeover.node_files import apply_takeover, plan_way_back
from rackloom.core.cluster.objects import DEPLOYMENT, NAMESPACE, POD, ResourceKind
from rackloom.errors import Retry
from rackloom.lab.virtual.event_loop import run_simulation


async def start_daemon(api: Any, home: Path, daemon: AdoptedMpsDaemon) -> None:
    """Make the objects of NVIDIA's driver for a claim, except the mount."""
    try:
        await api.get(NAMESPACE, NVIDIA)
    except NotFound:
        await api.create(NAMESPACE, {"metadata": {"name": NVIDIA}})
    made = await api.create(DEPLOYMENT, mps_deployment(daemon.id, NODE_NAME, "GPU-1"))
    owner = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": daemon.deployment,
        "uid": made["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    pod = {"name": f"{daemon.deployment}-1", "namespace": NVIDIA, "ownerReferences": [owner]}
    # On no node, since no kubelet is here that would end it.
    containers = made["spec"]["template"]["spec"]["containers"]
    await api.create(POD, {"metadata": pod, "spec": {"containers": containers}})
    for name in ("shm", "pipe", "log"):
        (home / daemon.id / name).mkdir(parents=True)
    (home / daemon.id / "pipe/control").touch()


async def deployments(api: Any) -> list[Any]:
    return list((await api.list(DEPLOYMENT, NVIDIA)).items)


class AdoptedLives(GpuLives):
    """A claim whose GPUs are shared through a daemon of NVIDIA's driver, which was taken over."""

    async def set_up(self) -> None:
        await self.kit.boot()
        sharing = {"strategy": "MPS"}
        parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing}
        claim = await self.gpus.claim("shared", "gpu-1", "gpu-2", configs=[("FromClaim", [], parameters)])
        self.claims = [claim]
        self.daemon = AdoptedMpsDaemon(id=f"{claim.uid}-0a1b2", namespace=NVIDIA)
        await start_daemon(self.gpus.api, self.home, self.daemon)
        uuids = [gpu.uuid for gpu in self.gpus.inventory.gpus[1:3]]
        self.driver.modes = dict.fromkeys(uuids, "EXCLUSIVE_PROCESS")
        state = {"mpsControlDaemonID": self.daemon.id}
        prepared = nvidia_files.gpu_claim(claim.uid, "gpu-1", "gpu-2", config=parameters, state=state)
        for part, uuid in zip(prepared["preparedDevices"][0]["devices"], uuids, strict=True):
            part["gpu"]["info"]["uuid"] = uuid
        node = nvidia_files.Node(self.kit.places.plugins.parent)
        node.install(nvidia_files.checkpoint_file({claim.uid: prepared}), GPU_DRIVER)
        held = nvidia_files.kubelet_state(claim.uid, named={claim.uid: "shared"})
        node.places.kubelet_state.write_bytes(held)
        spec = self.kit.places.cdi / f"k8s.{GPU_DRIVER}-claim_{claim.uid}.yaml"
        spec.parent.mkdir(exist_ok=True)
        spec.write_text(json.dumps({"devices": [{"containerEdits": {"env": ["of NVIDIA's driver"]}}]}))
        (plan,) = apply_takeover(node.places, [GPU_DRIVER])
        assert not plan.blocked

    async def work(self, plugin_process: Any) -> None:
        (claim,) = self.claims
        await plugin_process.sweeper.sweep()
        await self.prepare(plugin_process, claim)
        assert self.edits(claim.uid) == [{"env": ["of NVIDIA's driver"]}]
        assert len(await deployments(self.gpus.api)) == 1, "its containers go on using it"
        assert (self.home / self.daemon.id / "pipe/control").exists()
        await self.unprepare(plugin_process, claim)

    async def check_held(self) -> None:
        """Either the daemon of NVIDIA's driver is there, or it is gone and ours is."""
        others = {path.name for path in self.home.iterdir()} - {self.daemon.id}
        assert len(await deployments(self.gpus.api)) + len(others) == 1

    async def check_untouched(self) -> None:
        await super().check_untouched()
        assert await deployments(self.gpus.api) == []


def begin(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> AdoptedLives:
    return AdoptedLives(gpus, monkeypatch, OwnContainer)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_killed_at_any_point_the_daemon_ends_with_its_claim(ending: Any, make_gpus: Any) -> None:
    assert deaths_survived(lambda monkeypatch: begin(make_gpus(), monkeypatch), ending) > 10


class Forbidding:
    """An API server for an account that may not delete Deployments."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    async def delete(self, kind: ResourceKind, *args: Any, **options: Any) -> None:
        if kind == DEPLOYMENT:
            raise Rejected(403, "Forbidden", "deployments.apps is forbidden")
        await self._api.delete(kind, *args, **options)


async def answering(_name: str) -> bool:
    return True


def test_who_may_not_delete_it_says_what_to_apply(kit: Any, tmp_path: Path) -> None:
    daemon = AdoptedMpsDaemon(id="u-0a1b2", namespace=NVIDIA)
    (tmp_path / daemon.id / "shm").mkdir(parents=True)
    forbidding: Any = Forbidding(kit.api)
    with pytest.raises(
        Retry, match=r"Deployment nvidia-dra-driver-gpu/mps-control-daemon-u-0a1b2 may not be"
    ):
        asyncio.run(AdoptedMpsDaemons(forbidding, tmp_path, answering).end(daemon))
    assert (tmp_path / daemon.id / "shm").is_dir()


def test_a_daemon_that_answers_without_a_deployment_is_not_taken_for_gone(kit: Any, tmp_path: Path) -> None:
    async def story() -> None:
        await kit.boot()
        daemon = AdoptedMpsDaemon(id="u-0a1b2", namespace=NVIDIA)
        await start_daemon(kit.api, tmp_path, daemon)
        wrong = AdoptedMpsDaemon(id=daemon.id, namespace="gpu-operator")
        with pytest.raises(
            Retry, match="there is no Deployment gpu-operator/mps-control-daemon-u-0a1b2, and"
        ):
            await AdoptedMpsDaemons(kit.api, tmp_path, answering).end(wrong)
        assert (tmp_path / daemon.id / "pipe/control").exists()

    asyncio.run(story())


def test_after_a_reboot_the_claim_has_nothing_of_nvidias_driver_any_more(make_gpus: Any) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        lives = begin(make_gpus(), monkeypatch)

        async def story() -> None:
            await lives.set_up()
            lives.reboot()
            (claim,) = lives.claims
            plugin_process = await lives.start()
            await lives.prepare(plugin_process, claim)
            assert await deployments(lives.gpus.api) == []
            node = nvidia_files.Node(lives.kit.places.plugins.parent, boot_id="boot-2")
            (blocked,) = plan_way_back(node.places, GPU_DRIVER).blocked
            assert blocked.why == "NVIDIA's driver would not undo the sharing that was set up for it"
            # An administrator may take the right away once all daemons of NVIDIA's driver have ended.
            plugin: Any = plugin_process.requests.preparer.plugin
            plugin._adopted._api = Forbidding(lives.gpus.api)
            await lives.unprepare(plugin_process, claim)
            await lives.check_released(plugin_process)

        run_simulation(1, story)


# The memory is mounted in the host's namespace. The plugin's container has another. It sees the directory by
# the same path, and below the host's root twice, where one mount covers the other, as in node-gpu.yaml.
STORY = """
import ctypes, subprocess, sys
from pathlib import Path
from rackloom.claim.node.gpu import adopted_mps

plugin, root = Path(sys.argv[1]), Path(sys.argv[2])
home = plugin / "mps/u-0a1b2"
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x00020000) == 0
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "--rbind", plugin, root], check=True)
subprocess.run(["mount", "--rbind", plugin / "mps", root / "mps"], check=True)
assert (home / "shm/segment").exists() and (root / "mps/u-0a1b2/shm/segment").exists()
adopted_mps.remove_with_mounts(home)
assert not home.exists()
assert (root / "mps/other").exists() and (root / "file").exists()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="NEEDS ROOT: mounts cannot be made here")
def test_what_the_host_has_mounted_goes_with_the_directory(tmp_path: Path) -> None:
    plugin, root = tmp_path / "plugin", tmp_path / "driver-root"
    home = plugin / "mps/u-0a1b2"
    for folder in (root, home / "shm", home / "pipe", plugin / "mps/other"):
        folder.mkdir(parents=True)
    (plugin / "file").touch()
    subprocess.run(["mount", "-t", "tmpfs", "shm", str(home / "shm")], check=True)
    try:
        (home / "shm/segment").write_bytes(b"\0" * 4096)
        subprocess.run([sys.executable, "-c", STORY, str(plugin), str(root)], check=True, timeout=60)
        assert not home.exists()
        assert str(home) not in Path("/proc/self/mountinfo").read_text()
    finally:
        subprocess.run(["umount", str(home / "shm")], check=False, capture_output=True)
