"""The GPU plugin, a kubelet and an API server."""

import asyncio
import stat
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.claim.node.gpu.conftest import launcher_pod
from tests.claim.node.plugin_manager import NotPrepared
from tests.waiting import until, until_so

from rackloom.claim.node.gpu import plugin
from rackloom.claim.node.gpu.inventory import MigDevice
from rackloom.claim.node.gpu.plugin import GPU_DRIVER
from rackloom.core.cluster.objects import RESOURCE_SLICE

pytestmark = pytest.mark.slow

API = "resource.nvidia.com/v1beta1"


def config(kind="GpuConfig", source="FromClaim", requests=(), **fields):
    return (source, list(requests), {"apiVersion": API, "kind": kind, **fields})


def reported(gpus, work, in_pod=False):
    """Run `work(one, kubelet)` with a registered plugin, and its MPS daemons in a pod if `in_pod`."""

    async def story():
        await gpus.kit.boot()
        async with AsyncExitStack() as stack:
            pod = launcher_pod(gpus.kit.places.home(GPU_DRIVER) / "mps")
            launcher = await stack.enter_async_context(pod) if in_pod else None
            process = await stack.enter_async_context(gpus.kit.plugin(gpus.plugin(launcher=launcher)))
            kubelet = await stack.enter_async_context(gpus.kit.kubelet())
            await kubelet.registered(GPU_DRIVER)
            await process.publisher.published.wait()
            return await work(process, kubelet)

    return asyncio.run(story())


def uuid(gpus, index):
    return gpus.inventory.gpus[index].uuid


def test_a_gpu_is_given_by_its_device_files_and_given_back(gpus, read_specs):
    async def work(process, kubelet):
        claim = await gpus.claim("c", "gpu-3")
        (device,) = (await kubelet.prepare(claim))[claim.uid]
        own = f"k8s.gpu.nvidia.com/claim={claim.uid}-gpu-3"
        assert device.cdi_ids == ("k8s.gpu.nvidia.com/device=all", own)
        (edits,) = gpus.edits(claim.uid)
        nodes = {node["path"]: (node["major"], node["minor"]) for node in edits["deviceNodes"]}
        assert nodes == {
            "/dev/nvidia3": (195, 3),
            "/dev/nvidiactl": (195, 255),
            "/dev/nvidia-uvm": (507, 0),
            "/dev/nvidia-uvm-tools": (507, 1),
            "/dev/nvidia-modeset": (195, 254),
        }
        assert edits["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]
        # This host has none of these files.
        (container,) = read_specs(gpus.kit.places.cdi, device.cdi_ids).containers
        assert {made["path"]: (made["major"], made["minor"]) for made in container.devices} == nodes
        assert container.allowed == {(*numbers, "rwm") for numbers in nodes.values()}
        await kubelet.unprepare(claim)
        assert process.checkpoint.claims == {}
        assert gpus.log == []

    reported(gpus, work)


def test_time_slices_are_set_and_set_back(gpus):
    async def work(_process, kubelet):
        sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}
        claim = await gpus.claim("c", "gpu-0", configs=[config(sharing=sharing)])
        await kubelet.prepare(claim)
        gpu = uuid(gpus, 0)
        assert gpus.log == [
            f"nvidia-smi -i {gpu} -c DEFAULT",
            f"nvidia-smi compute-policy -i {gpu} --set-timeslice 3",
        ]
        gpus.forget_log()
        await kubelet.unprepare(claim)
        assert gpus.log == [f"nvidia-smi compute-policy -i {gpu} --set-timeslice 0"]

    reported(gpus, work)


def test_a_program_that_fails_is_told_and_tried_again(gpus):
    async def work(process, kubelet):
        claim = await gpus.claim("c", "gpu-0", configs=[config(sharing={"strategy": "TimeSlicing"})])
        gpus.programs_fail(True)
        waiting = asyncio.create_task(kubelet.prepare(claim))
        await until_so(lambda: len(gpus.log) > 1, "a second attempt")
        assert process.checkpoint.claims[claim.uid].state.value == "PrepareStarted"
        gpus.programs_fail(False)
        await waiting
        assert gpus.log[-1].endswith("--set-timeslice 0")

    reported(gpus, work)


@pytest.mark.parametrize("in_pod", [False, True], ids=["own container", "pod"])
def test_mps_runs_a_daemon_for_the_devices_that_are_shared_alike(gpus, in_pod):
    mps = {
        "defaultActiveThreadPercentage": 50,
        "defaultPinnedDeviceMemoryLimit": "10G",
        "defaultPerDevicePinnedMemoryLimit": {"1": "1G"},
    }

    async def work(process, kubelet):
        sharing = {"strategy": "MPS", "mpsConfig": mps}
        claim = await gpus.claim("c", "gpu-0", "gpu-1", configs=[config(sharing=sharing)])
        await kubelet.prepare(claim)
        first, second = uuid(gpus, 0), uuid(gpus, 1)
        assert gpus.log == [
            f"nvidia-smi -i {first} -c EXCLUSIVE_PROCESS",
            f"nvidia-smi -i {second} -c EXCLUSIVE_PROCESS",
            f"start {first},{second} ",
            f"set_default_device_pinned_mem_limit {first} 9536M",
            f"set_default_device_pinned_mem_limit {second} 953M",
            "set_default_active_thread_percentage 50",
        ]
        home = gpus.kit.places.home(GPU_DRIVER) / "mps" / f"{claim.uid}-0"
        for edits in gpus.edits(claim.uid):
            assert "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps" in edits["env"]
            places = {mount["hostPath"]: mount["containerPath"] for mount in edits["mounts"]}
            assert places == {
                str(home / "pipe"): "/tmp/nvidia-mps",
                f"/dev/shm/rackloom-mps-{claim.uid}-0": "/dev/shm",
            }
        gpus.forget_log()
        await kubelet.unprepare(claim)
        assert gpus.log == ["quit", f"nvidia-smi -i {first} -c DEFAULT", f"nvidia-smi -i {second} -c DEFAULT"]
        assert not home.exists()

    reported(gpus, work, in_pod)


@pytest.mark.parametrize(
    ("configs", "complaint"),
    [
        ([config(sharing={"strategy": "Magic"})], "Magic"),
        ([config(sharing={"strategy": "MPS", "timeSlicingConfig": {}})], "does not go with strategy MPS"),
        ([config("MigDeviceConfig", requests=["r0"])], "cannot be applied to request r0"),
        ([config(colour="red")], "colour"),
        ([("FromClaim", [], {"apiVersion": "v1", "kind": "GpuConfig"})], "apiVersion"),
    ],
)
def test_a_wrong_config_is_refused_before_anything_is_touched(gpus, configs, complaint):
    async def work(process, kubelet):
        claim = await gpus.claim("c", "gpu-0", configs=configs)
        with pytest.raises(NotPrepared, match="Permanent error") as failed:
            await kubelet.prepare(claim)
        assert complaint in str(failed.value)
        assert claim.uid not in process.checkpoint.claims
        assert gpus.log == []

    reported(gpus, work)


def test_a_config_for_all_requests_is_for_those_that_it_fits(gpus):
    async def work(_process, kubelet):
        await kubelet.prepare(await gpus.claim("c", "gpu-0", configs=[config("MigDeviceConfig")]))

    reported(gpus, work)


def test_an_admin_sees_the_gpu_of_another_claim_and_changes_nothing(gpus):
    async def work(_process, kubelet):
        sharing = {"strategy": "TimeSlicing"}
        user = await gpus.claim("user", "gpu-0")
        of_class = config(source="FromClass", sharing=sharing)
        admin = await gpus.claim("admin", "gpu-0", configs=[of_class], adminAccess=True)
        await kubelet.prepare(user)
        await kubelet.prepare(admin)
        assert gpus.edits(user.uid) == gpus.edits(admin.uid)
        assert gpus.log == []
        asked = config(requests=["r0"], sharing=sharing)
        forward = await gpus.claim("forward", "gpu-0", configs=[asked], adminAccess=True)
        with pytest.raises(NotPrepared, match="has adminAccess and asks for sharing"):
            await kubelet.prepare(forward)

    reported(gpus, work)


def test_what_kubelet_and_the_scheduler_are_told_of_a_failing_gpu_is_taken_back(gpus, monkeypatch):
    monkeypatch.setattr(plugin, "OBSERVE_SECONDS", 0.2)

    async def taints(name):
        (slice_,) = (await gpus.api.list(RESOURCE_SLICE)).items
        device = next(entry for entry in slice_["spec"]["devices"] if entry["name"] == name)
        return {(taint["key"], taint.get("value", ""), taint["effect"]) for taint in device.get("taints", [])}

    async def tainted(name, wanted):
        async def look():
            return await taints(name) == wanted

        await until(look, f"{name} has {wanted}")

    async def work(_process, kubelet):
        calls = kubelet.plugins[GPU_DRIVER]
        assert (await anext(calls.health()))["gpu-2"] == (1, "")
        gpus.change(2, xids=(79,), recovery="gpu-reset")
        xid = ("gpu.nvidia.com/xid", "79", "NoSchedule")
        await tainted("gpu-2", {xid, ("gpu.nvidia.com/recovery", "gpu-reset", "NoSchedule")})
        assert (await anext(calls.health()))["gpu-2"] == (2, "XID 79: the GPU fell off the bus")
        gpus.change(2, recovery="none")
        gpus.kit.now += 400
        await tainted("gpu-2", set())
        assert (await anext(calls.health()))["gpu-2"] == (1, "")

    reported(gpus, work)


def test_mig_devices_take_the_place_of_their_gpu(gpus):
    mig = MigDevice(
        uuid="MIG-1",
        profile="1g.10gb+me",
        gpu_instance=7,
        profile_id=20,
        placement_start=2,
        memory_bytes=10 << 30,
    )
    access = gpus.root / "capabilities/gpu0/mig/gi7"
    (access / "ci0").mkdir(parents=True)
    (access / "access").write_text("DeviceFileMinor: 12\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    (access / "ci0/access").write_text("DeviceFileMinor: 13\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    gpus.change(0, mig_mode=True, migs=(mig,))

    async def work(process, kubelet):
        (slice_,) = (await gpus.api.list(RESOURCE_SLICE)).items
        names = [device["name"] for device in slice_["spec"]["devices"]]
        assert names[:2] == ["gpu-0-mig-1g10gbme-20-2", "gpu-1"]
        claim = await gpus.claim("c", names[0])
        await kubelet.prepare(claim)
        (edits,) = gpus.edits(claim.uid)
        paths = [node["path"] for node in edits["deviceNodes"]]
        caps = ["/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13"]
        assert paths[0] == "/dev/nvidia0"
        assert paths[-2:] == caps
        assert process.checkpoint.claims[claim.uid].devices[0].kind == "mig"

    reported(gpus, work)


def test_a_gpu_for_a_virtual_machine_is_given_by_its_group(gpus, read_specs):
    at = gpus.root / "vfio-host/sys/devices/pci0000:40/0000:41:00.0"
    at.mkdir(parents=True)
    for name, value in (("class", "0x030200"), ("vendor", "0x10de"), ("device", "0x2330")):
        (at / name).write_text(value)
    for link, target in (("driver", "bus/pci/drivers/vfio-pci"), ("iommu_group", "groups/17")):
        (gpus.root / "vfio-host/sys" / target).mkdir(parents=True)
        (at / link).symlink_to(f"../../../{target}")
    listed = gpus.root / "vfio-host/sys/bus/pci/devices"
    listed.mkdir()
    (listed / "0000:41:00.0").symlink_to("../../../devices/pci0000:40/0000:41:00.0")
    gpus.vfio_root = gpus.root / "vfio-host"
    # Not every user may make device files. Any character device will do.
    (gpus.root / "dev/vfio").mkdir(parents=True)
    (gpus.root / "dev/vfio/17").symlink_to("/dev/null")
    null_mode = stat.S_IMODE(Path("/dev/null").stat().st_mode)

    async def work(process, kubelet):
        claim = await gpus.claim("c", "gpu-vfio-0")
        (device,) = (await kubelet.prepare(claim))[claim.uid]
        assert device.cdi_ids == (f"k8s.gpu.nvidia.com/claim={claim.uid}-gpu-vfio-0",)
        (edits,) = gpus.edits(claim.uid)
        (node,) = edits["deviceNodes"]
        assert (node["path"], node["major"], node["minor"]) == ("/dev/vfio/17", 1, 3)
        assert node["fileMode"] == null_mode
        (container,) = read_specs(gpus.kit.places.cdi, device.cdi_ids).containers
        assert container.allowed == {(1, 3, "rwm")}
        assert process.checkpoint.claims[claim.uid].devices[0].kind == "vfio"
        health = await anext(kubelet.plugins[GPU_DRIVER].health())
        assert health["gpu-vfio-0"][0] == 0

    reported(gpus, work)
