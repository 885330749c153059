"""GPUs of which MIG devices are made on demand, on a stand-in for NVML that keeps them as the driver does.

NVIDIA's own Python bindings load the stand-in (tests/node/driver/nvml.c). It does not show a real GPU's
behaviour beyond NVML's published interface.
"""

import asyncio
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pynvml
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.claim.node.crash_points import ENDINGS, FusedApi, Lives, deaths_survived
from tests.node.hardware import LIBRARIES, gpu_table, install_nvml

from rackloom.claim.node.cdi import DriverFiles
from rackloom.claim.node.gpu.inventory import PlaceTaken
from rackloom.claim.node.gpu.monitor import GpuMonitor, GpuReader
from rackloom.claim.node.gpu.nvml import NvmlGpus, read_gpus
from rackloom.claim.node.gpu.plugin import GPU_DRIVER, GpuPlugin, GpuSettings
from rackloom.claim.node.gpu.sharing import DriverPrograms
from rackloom.claim.node.plugin import CheckpointEntry, PrepareState
from rackloom.claim.node.run import PluginProcess
from rackloom.core.cluster.objects import RESOURCE_SLICE
from rackloom.errors import Refused, Retry
from rackloom.lab.virtual.event_loop import run_simulation
from rackloom.topology.discovery.nvidia_driver import nvml_session

API = "resource.nvidia.com/v1beta1"
CAPABILITIES = "proc/driver/nvidia/capabilities"
CHANGES = (
    "nvmlDeviceSetMigMode",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
)
SMALLEST, MIDDLE, LARGEST = "gpu-0-mig-1g10gb-19-0", "gpu-0-mig-3g40gb-9-4", "gpu-0-mig-7g80gb-0-0"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nvml")
    install_nvml(root, gpu_table(1, 1))
    (root / CAPABILITIES).mkdir(parents=True)
    return root


@pytest.fixture
def driver(built: Path) -> Path:
    """The root of a driver whose GPUs have no MIG devices."""
    reset(built)
    return built


def reset(root: Path) -> None:
    for state in ("libnvidia-ml.mig", "libnvidia-ml.busy"):
        (root / LIBRARIES / state).unlink(missing_ok=True)
    for gpu in (root / CAPABILITIES).iterdir():
        shutil.rmtree(gpu)


def busy(root: Path, busy: bool) -> None:
    mark = root / LIBRARIES / "libnvidia-ml.busy"
    mark.touch() if busy else mark.unlink()


def partition(root: Path, profile: str, start: int, gpu: int = 0) -> Any:
    gpus = read_gpus(root, dynamic_mig=True).gpus
    found = (
        part for part in gpus[gpu].partitions if (part.profile, part.placement_start) == (profile, start)
    )
    return next(found)


# Through NVML.


def test_every_profile_is_offered_at_each_of_its_places(driver):
    gpu = read_gpus(driver, dynamic_mig=True).gpus[0]
    assert gpu.mig_switchable
    assert [(part.profile, part.placement_start) for part in gpu.partitions] == [
        *(("1g.10gb", start) for start in range(7)),
        *(("2g.20gb", start) for start in (0, 2, 4)),
        *(("3g.40gb", start) for start in (0, 4)),
        ("4g.40gb", 0),
        ("7g.80gb", 0),
        *(("1g.10gb+me", start) for start in range(7)),
        *(("1g.20gb", start) for start in (0, 2, 4, 6)),
    ]
    assert read_gpus(driver).gpus[0].partitions == ()


def test_a_mig_device_is_made_and_destroyed_and_mig_mode_with_it(driver):
    source = NvmlGpus(driver, dynamic_mig=True)
    wanted = partition(driver, "1g.10gb", 2)
    made = source.make(wanted, began=False)
    assert (made.profile, made.placement_start, made.memory_bytes) == ("1g.10gb", 2, wanted.memory_bytes)
    (gpu, other, *_) = source.read().gpus
    assert (gpu.mig_mode, gpu.migs) == (True, (made,))
    assert not other.mig_mode
    assert gpu.partitions == partition_list(driver)
    source.destroy(wanted)
    assert not source.read().gpus[0].mig_mode
    source.destroy(wanted)


def partition_list(root: Path) -> Any:
    return read_gpus(root, dynamic_mig=True).gpus[0].partitions


def test_what_an_attempt_left_is_completed_and_what_others_made_stays(driver):
    source = NvmlGpus(driver, dynamic_mig=True)
    first = source.make(partition(driver, "1g.10gb", 2), began=False)
    assert source.make(partition(driver, "1g.10gb", 2), began=True) == first
    with pytest.raises(PlaceTaken, match="somebody else made"):
        source.make(partition(driver, "1g.10gb", 2), began=False)
    with pytest.raises(Retry, match=r"2g\.20gb cannot be made.*other MIG devices have its place"):
        source.make(partition(driver, "2g.20gb", 2), began=False)
    assert [mig.uuid for mig in source.read().gpus[0].migs] == [first.uuid]


def test_what_is_in_use_is_waited_for(driver):
    source = NvmlGpus(driver, dynamic_mig=True)
    small, uuid = partition(driver, "1g.10gb", 0), read_gpus(driver).gpus[0].uuid
    busy(driver, True)
    with pytest.raises(Retry, match="a program uses the GPU"):
        source.make(small, began=False)
    busy(driver, False)
    source.make(small, began=False)
    with pytest.raises(Retry, match="still has MIG devices"):
        source.leave_mig_mode(uuid)
    busy(driver, True)
    with pytest.raises(Retry, match="cannot be destroyed"):
        source.destroy(small)
    assert len(source.read().gpus[0].migs) == 1
    busy(driver, False)
    source.destroy(small)


def test_a_gpu_that_needs_a_reset_is_partitioned_only_in_mig_mode(driver, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlDeviceGetArchitecture", lambda _handle: pynvml.NVML_DEVICE_ARCH_AMPERE)
    source = NvmlGpus(driver, dynamic_mig=True)
    gpu = source.read().gpus[0]
    assert (gpu.partitions, gpu.mig_switchable) == ((), False)
    monkeypatch.undo()
    small = partition(driver, "1g.10gb", 0)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetArchitecture", lambda _handle: pynvml.NVML_DEVICE_ARCH_AMPERE)
    with pytest.raises(Refused, match="would need a reset"):
        source.make(small, began=False)


# Publishing.


def watched(driver: Path, *, dynamic_mig: bool = True) -> GpuMonitor:
    source = NvmlGpus(driver, dynamic_mig=dynamic_mig)
    return GpuMonitor(GpuReader(source, lambda: MACHINE), frozenset(), lambda: 0.0, lambda: 0.0)


class Nowhere:
    """A machine with an unknown PCIe tree."""

    gpus: tuple[Any, ...] = ()
    nics: tuple[Any, ...] = ()


MACHINE: Any = Nowhere()


def pool_of(driver: Path) -> Any:
    async def story():
        return await watched(driver).pool("n")

    return run_simulation(1, story)


def amounts(counters: Any) -> dict[str, int]:
    return {name: int(str(counter.value)) for name, counter in counters.items()}


def test_the_whole_draws_all_and_a_part_its_share(driver, monkeypatch):
    monkeypatch.setattr("rackloom.claim.node.gpu.monitor.gpu_locations", lambda _machine: {})
    pool = pool_of(driver)
    assert len(pool.counters) == 8
    devices = {device.name: device for device in pool.devices}
    assert list(devices) == sorted(devices)
    total = amounts(pool.counters[0].counters)
    assert total["multiprocessors"] == 132
    assert {name for name in total if name.startswith("memory-slice")} == {
        f"memory-slice-{n}" for n in range(8)
    }
    (whole,) = devices["gpu-0"].consumes_counters
    assert amounts(whole.counters) == total
    (part,) = devices[MIDDLE].consumes_counters
    assert part.counter_set == pool.counters[0].name == "gpu-0-counter-set"
    assert {name for name in part.counters if "slice" in name} == {f"memory-slice-{n}" for n in range(4, 8)}
    attributes = devices[MIDDLE].attributes
    assert (attributes["type"].string, attributes["profile"].string) == ("mig", "3g.40gb")
    assert "uuid" not in attributes
    assert [device.name for device in pool.without_counters] == [f"gpu-{minor}" for minor in range(8)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(order=st.permutations(range(25)))
def test_whatever_the_counters_allow_together_the_driver_makes(driver, order):
    """The scheduler counts, and never queries the GPU."""
    reset(driver)
    source = NvmlGpus(driver, dynamic_mig=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rackloom.claim.node.gpu.monitor.gpu_locations", lambda _machine: {})
        pool = pool_of(driver)
    devices = {device.name: device for device in pool.devices}
    left = amounts(pool.counters[0].counters)
    partitions = source.read().gpus[0].partitions
    names = {
        name: part
        for part in partitions
        for name in devices
        if name.endswith(f"-{part.profile_id}-{part.placement_start}") and name.startswith("gpu-0-mig")
    }
    assert len(names) == len(partitions) == 25
    made = 0
    for index in order:
        name = sorted(names)[index]
        (draw,) = devices[name].consumes_counters
        needs = amounts(draw.counters)
        if all(left[counter] >= amount for counter, amount in needs.items()):
            left = {counter: amount - needs.get(counter, 0) for counter, amount in left.items()}
            source.make(names[name], began=False)
            made += 1
    assert made == len(source.read().gpus[0].migs) > 0


def test_a_layout_of_the_operator_is_published_and_left_alone(driver, monkeypatch):
    monkeypatch.setattr("rackloom.claim.node.gpu.monitor.gpu_locations", lambda _machine: {})
    made = NvmlGpus(driver, dynamic_mig=True).make(partition(driver, "3g.40gb", 4), began=False)
    pool = pool_of(driver)
    first = [device for device in pool.devices if device.name.startswith("gpu-0")]
    assert [device.name for device in first] == [MIDDLE]
    assert first[0].attributes["uuid"].string == made.uuid
    assert first[0].consumes_counters == ()
    assert len(pool.counters) == 7


# For claims.


class MigLives(Lives):
    """Two MIG devices of one GPU, and another GPU whole, which MIG mode was left on."""

    def __init__(self, gpus: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(gpus.kit, monkeypatch)
        self.gpus, self.root = gpus, root
        gpus.kit.places.home(GPU_DRIVER).mkdir(parents=True)
        reset(root)
        for name in CHANGES:
            monkeypatch.setattr(pynvml, name, self._fused(getattr(pynvml, name)))
        monkeypatch.setattr("rackloom.claim.node.gpu.monitor.gpu_locations", lambda _machine: {})

    def _fused(self, function):
        def call(*args):
            self.fuse.burn()
            answer = function(*args)
            self.fuse.burn()
            return answer

        return call

    async def set_up(self):
        await self.kit.boot()
        self.leave_mig_mode_on()
        self.claims = [
            await self.gpus.claim("two", SMALLEST, MIDDLE),
            await self.gpus.claim("whole", "gpu-1"),
        ]

    def leave_mig_mode_on(self):
        with nvml_session(self.root) as nvml:
            nvml.nvmlDeviceSetMigMode(nvml.nvmlDeviceGetHandleByIndex(1), 1)

    async def start(self):
        api = FusedApi(self.gpus.api, self.fuse)
        plugin = mig_plugin(self.gpus, self.root)
        process = PluginProcess(plugin, api, self.kit.host())
        await plugin._monitor.observe()
        return process

    def edits(self, uid):
        return self.gpus.edits(uid)

    async def check_held(self):
        first, second, *_ = read_gpus(self.root).gpus
        assert sorted((mig.profile, mig.placement_start) for mig in first.migs) == [
            ("1g.10gb", 0),
            ("3g.40gb", 4),
        ]
        assert not second.mig_mode

    async def check_untouched(self):
        first, *_ = read_gpus(self.root).gpus
        assert (first.mig_mode, first.migs) == (False, ())

    def reboot(self):
        reset(self.root)
        super().reboot()


def mig_plugin(gpus: Any, root: Path, *, dynamic_mig: bool = True) -> GpuPlugin:
    plain = gpus.plugin()
    files = DriverFiles(
        proc_devices=gpus.root / "devices",
        capabilities=root / CAPABILITIES,
        devices=gpus.root / "dev",
    )
    settings = GpuSettings(node=gpus.kit.node, mps_home=plain._settings.mps_home, files=files)
    programs, partitioner = DriverPrograms(Path("/")), NvmlGpus(root, dynamic_mig=True)
    monitor = watched(root, dynamic_mig=dynamic_mig)
    return GpuPlugin(gpus.api, settings, monitor, programs, partitioner=partitioner)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_killed_at_any_point_no_mig_device_stays_behind(ending, make_gpus, driver):
    assert deaths_survived(lambda monkeypatch: MigLives(make_gpus(), driver, monkeypatch), ending) > 30


def reported(gpus, work):
    """Run `work(process, kubelet)` with a plugin that kubelet has registered."""

    async def story():
        await gpus.kit.boot()
        async with gpus.kit.plugin(mig_plugin(gpus, gpus.mig_root)) as process, gpus.kit.kubelet() as kubelet:
            await kubelet.registered(GPU_DRIVER)
            await process.publisher.published.wait()
            return await work(process, kubelet)

    return asyncio.run(story())


@pytest.fixture
def node(gpus, driver, monkeypatch):
    """A node whose plugin makes MIG devices."""
    monkeypatch.setattr("rackloom.claim.node.gpu.monitor.gpu_locations", lambda _machine: {})
    gpus.mig_root = driver
    return gpus


@pytest.mark.slow
def test_a_claim_gets_the_files_of_its_mig_device_and_nothing_stays(node):
    async def work(process, kubelet):
        slices = (await node.api.list(RESOURCE_SLICE)).items
        claim = await node.claim("c", MIDDLE)
        await kubelet.prepare(claim)
        (edits,) = node.edits(claim.uid)
        (made,) = read_gpus(node.mig_root).gpus[0].migs
        caps = [entry["path"] for entry in edits["deviceNodes"] if "caps" in entry["path"]]
        assert len(caps) == 2
        assert edits["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]
        entry = process.checkpoint.claims[claim.uid]
        assert entry.record["uuids"] == {MIDDLE: made.uuid}
        assert entry.devices[0].kind == "mig"
        # The published slices do not change while MIG devices come and go.
        await process._plugin._monitor.observe()
        await process.publisher.publish()
        assert (await node.api.list(RESOURCE_SLICE)).items == slices
        await kubelet.unprepare(claim)
        assert not read_gpus(node.mig_root).gpus[0].mig_mode
        assert not list((node.mig_root / CAPABILITIES).glob("gpu0/mig/gi*/access"))

    reported(node, work)


@pytest.mark.slow
def test_a_part_that_another_claim_still_has_is_waited_for(node):
    """kubelet may prepare the next pod before it has ended the previous one."""

    async def work(process, kubelet):
        part, whole, larger = [
            await node.claim(name, device)
            for name, device in (("part", SMALLEST), ("whole", "gpu-0"), ("larger", LARGEST))
        ]
        await kubelet.prepare(part)
        for later in (whole, larger):
            waiting = asyncio.ensure_future(process.requests.prepare([later.ref]))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            await kubelet.unprepare(part if later is whole else whole)
            assert not (await waiting)[later.uid].error
        (made,) = read_gpus(node.mig_root).gpus[0].migs
        assert made.profile == "7g.80gb"
        await kubelet.unprepare(larger)

    reported(node, work)


@pytest.mark.slow
def test_a_device_goes_with_its_claim_also_when_none_is_made_any_more(node):
    async def story():
        await node.kit.boot()
        async with node.kit.plugin(mig_plugin(node, node.mig_root)), node.kit.kubelet() as kubelet:
            await kubelet.registered(GPU_DRIVER)
            claim = await node.claim("c", SMALLEST)
            await kubelet.prepare(claim)
        plain = mig_plugin(node, node.mig_root, dynamic_mig=False)
        async with node.kit.plugin(plain) as process, node.kit.kubelet() as kubelet:
            await kubelet.registered(GPU_DRIVER)
            await process.publisher.published.wait()
            devices = [device.name for pool in await plain.pools() for device in pool.devices]
            assert devices == [f"gpu-{minor}" for minor in range(1, 8)]
            await kubelet.unprepare(claim)
            assert not read_gpus(node.mig_root).gpus[0].mig_mode

    asyncio.run(story())


@pytest.mark.slow
def test_whoever_observes_a_gpu_does_not_keep_it_from_being_divided(node):
    async def work(process, kubelet):
        observer = await node.claim("observer", "gpu-0", adminAccess=True)
        await kubelet.prepare(observer)
        claim = await node.claim("c", SMALLEST)
        await kubelet.prepare(claim)
        await kubelet.unprepare(claim)
        await kubelet.unprepare(observer)

    reported(node, work)


@pytest.mark.slow
def test_a_claim_that_is_given_up_while_its_device_is_made_leaves_none(node, monkeypatch):
    """NVML cannot be cut off: later steps wait for it."""
    entered, create = threading.Event(), pynvml.nvmlDeviceCreateGpuInstanceWithPlacement

    def slow(*args):
        entered.set()
        time.sleep(0.5)
        return create(*args)

    monkeypatch.setattr(pynvml, "nvmlDeviceCreateGpuInstanceWithPlacement", slow)

    async def work(process, kubelet):
        claim = await node.claim("c", SMALLEST)
        call = asyncio.ensure_future(process.requests.prepare([claim.ref]))
        await asyncio.to_thread(entered.wait, 5)
        call.cancel()
        answers = await process.requests.unprepare([claim.ref])
        assert not answers[claim.uid].error
        assert read_gpus(node.mig_root).gpus[0].migs == ()
        await asyncio.sleep(0.7)
        assert read_gpus(node.mig_root).gpus[0].migs == ()

    reported(node, work)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "result", "why"),
    [
        ({"sharing": {"strategy": "MPS"}}, {}, "asks for MPS on gpu-0-mig"),
        (None, {"adminAccess": True}, "has adminAccess to gpu-0-mig"),
    ],
)
def test_what_a_device_that_is_made_cannot_do_is_refused(node, config, result, why):
    async def work(process, kubelet):
        parameters = {"apiVersion": API, "kind": "MigDeviceConfig", **(config or {})}
        configs = [("FromClaim", [], parameters)] if config else ()
        claim = await node.claim("c", SMALLEST, configs=configs, **result)
        answers = await process.requests.prepare([claim.ref])
        assert why in answers[claim.uid].error
        assert answers[claim.uid].error.startswith("Permanent error")
        assert not read_gpus(node.mig_root).gpus[0].mig_mode

    reported(node, work)


@pytest.mark.slow
def test_a_stale_attempt_that_is_undone_leaves_the_device_of_a_later_claim(node):
    async def work(process, kubelet):
        old, new = await node.claim("old", SMALLEST), await node.claim("new", SMALLEST)
        # The old claim's prepare was begun and never completed (a crash, or a reboot since).
        intent = {
            "sharing": {},
            "partitions": [msgspec.to_builtins(partition(node.mig_root, "1g.10gb", 0))],
        }
        process.checkpoint.put(
            CheckpointEntry(ref=old.ref, state=PrepareState.STARTED, fingerprint="f", record=intent)
        )
        await kubelet.prepare(new)
        (made,) = read_gpus(node.mig_root).gpus[0].migs
        answers = await process.requests.unprepare([old.ref])
        assert not answers[old.uid].error
        assert [mig.uuid for mig in read_gpus(node.mig_root).gpus[0].migs] == [made.uuid]
        await kubelet.unprepare(new)
        assert not read_gpus(node.mig_root).gpus[0].mig_mode

    reported(node, work)


@pytest.mark.slow
def test_a_completed_claim_whose_spec_is_gone_keeps_its_device(node):
    async def work(process, kubelet):
        claim = await node.claim("c", SMALLEST)
        await kubelet.prepare(claim)
        (made,) = read_gpus(node.mig_root).gpus[0].migs
        process.sweeper.preparer.cdi.remove(claim.uid)
        await process.requests.prepare([claim.ref])
        assert [mig.uuid for mig in read_gpus(node.mig_root).gpus[0].migs] == [made.uuid]

    reported(node, work)


@pytest.mark.slow
def test_an_operators_device_made_since_the_last_look_is_not_destroyed(node):
    async def work(process, kubelet):
        claim = await node.claim("c", SMALLEST)
        wanted = partition(node.mig_root, "1g.10gb", 0)
        made = NvmlGpus(node.mig_root, dynamic_mig=True).make(wanted, began=False)
        answers = await process.requests.prepare([claim.ref], 3.0)
        assert "somebody else made" in answers[claim.uid].error
        await kubelet.unprepare(claim)
        assert [mig.uuid for mig in read_gpus(node.mig_root).gpus[0].migs] == [made.uuid]

    reported(node, work)


@pytest.mark.slow
def test_a_claim_ended_while_the_driver_is_away_leaks_nothing(node):
    async def work(process, kubelet):
        claim = await node.claim("c", SMALLEST)
        await kubelet.prepare(claim)
        monitor = process._plugin._monitor
        read = monitor._reader.source.read

        def away():
            raise Refused("no libnvidia-ml.so.1")

        monitor._reader.source.read = away
        await monitor.observe()
        answers = await process.requests.unprepare([claim.ref], 3.0)
        monitor._reader.source.read = read
        await monitor.observe()
        assert "cannot be destroyed" in answers[claim.uid].error
        await kubelet.unprepare(claim)
        assert not read_gpus(node.mig_root).gpus[0].mig_mode

    reported(node, work)
