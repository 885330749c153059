"""GPUs of claims that NVIDIA's driver has prepared: kubelet's next calls, and the way back."""

import asyncio

from tests.claim.node.takeover.nvidia_files import (
    Node,
    checkpoint_file,
    gpu_claim,
    gpu_config,
    kubelet_state,
)

from rackloom.claim.node.takeover.node_files import apply_takeover, give_back, plan_way_back
from rackloom.core.cluster.names import GPU_DRIVER


def test_claims_end_like_our_own_and_new_ones_go_back(gpus):
    node = Node(gpus.kit.places.plugins.parent)
    gpu = gpus.inventory.gpus[3]

    async def story():
        await gpus.kit.boot()
        old, new = await gpus.claim("old", "gpu-3"), await gpus.claim("new", "gpu-4")
        other = await gpus.claim("other", "gpu-5")
        sliced = gpu_config("TimeSlicing", timeSlicingConfig={"interval": "Long"})
        claims = {
            old.uid: gpu_claim(old.uid, "gpu-3", config=sliced, state={"timeSliceApplied": True}),
            other.uid: gpu_claim(other.uid, "gpu-5"),
        }
        claims[old.uid]["preparedDevices"][0]["devices"][0]["gpu"]["info"]["uuid"] = gpu.uuid
        path = node.install(checkpoint_file(claims), GPU_DRIVER)
        (node.root / "dra_manager_state").write_bytes(kubelet_state(old.uid, other.uid))
        specs = {uid: node.add_cdi(GPU_DRIVER, uid) for uid in claims}
        apply_takeover(node.places, [GPU_DRIVER])

        async with gpus.kit.plugin(gpus.plugin()) as process, gpus.kit.kubelet() as kubelet:
            await kubelet.registered(GPU_DRIVER)
            (device,) = (await kubelet.prepare(old))[old.uid]
            assert device.cdi_ids == (f"k8s.{GPU_DRIVER}/claim={old.uid}-gpu-3",)
            assert specs[old.uid].read_text() == "of NVIDIA's driver"
            assert gpus.log == []
            await kubelet.unprepare(old)
            assert gpus.log == [f"nvidia-smi compute-policy -i {gpu.uuid} --set-timeslice 0"]
            assert not specs[old.uid].exists()
            await kubelet.prepare(new)
            assert process.checkpoint.claims[new.uid].record["uuids"] == {
                "gpu-4": gpus.inventory.gpus[4].uuid
            }

        assert plan_way_back(node.places, GPU_DRIVER).blocked == ()
        give_back(node.places, [GPU_DRIVER])
        written = path.read_bytes()
        assert old.uid.encode() not in written
        assert gpus.inventory.gpus[4].uuid.encode() in written
        # Over again, as it was given back.
        (node.root / "dra_manager_state").write_bytes(kubelet_state(other.uid))
        apply_takeover(node.places, [GPU_DRIVER])
        async with gpus.kit.plugin(gpus.plugin()), gpus.kit.kubelet() as kubelet:
            await kubelet.registered(GPU_DRIVER)
            (device,) = (await kubelet.prepare(new))[new.uid]
            own = f"k8s.{GPU_DRIVER}/claim={new.uid}-gpu-4"
            assert device.cdi_ids == (f"k8s.{GPU_DRIVER}/device=all", own)

    asyncio.run(story())
