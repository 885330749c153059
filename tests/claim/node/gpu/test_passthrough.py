"""GPUs that a claim takes from NVIDIA's driver for a virtual machine, and gives back.

`PciBus` stands in for the kernel: it acts on writes to the files of /sys/bus/pci as the kernel does. The real
kernel has a function of another kind in `test_binding_in_the_kernel.py`.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.claim.node.crash_points import ENDINGS, Fuse, FusedApi, Lives, deaths_survived
from tests.claim.node.takeover import nvidia_files
from tests.node.hardware import LIBRARIES, gpu_table, install_nvml

from rackloom.claim.node.cdi import DriverFiles
from rackloom.claim.node.gpu.monitor import GpuMonitor, GpuReader
from rackloom.claim.node.gpu.nvml import NvmlGpus, read_gpus
from rackloom.claim.node.gpu.passthrough import PciBinder, read_vfio
from rackloom.claim.node.gpu.plugin import GPU_DRIVER, GpuPlugin, GpuSettings
from rackloom.claim.node.plugin import CheckpointEntry, PrepareState
from rackloom.claim.node.run import PluginProcess
from rackloom.claim.node.takeover.node_files import apply_takeover
from rackloom.core.cluster.objects import RESOURCE_SLICE
from rackloom.errors import Refused, Retry
from rackloom.lab.virtual.event_loop import run_simulation
from rackloom.topology.discovery.sysfs import Sysroot

ROWS = gpu_table(1, 1).splitlines()
ADDRESSES = [row.split("\t")[2].lower() for row in ROWS[1:]]
FIRST = ADDRESSES[0]


class PciBus:
    """GPUs on the bus of a machine below `root`, and NVML's list of those that NVIDIA's driver has."""

    def __init__(self, root: Path, nvml: Path, fuse: Fuse) -> None:
        self.root, self.nvml, self.fuse = root, nvml, fuse
        self.bus = root / "sys/bus/pci"
        for driver in ("nvidia", "vfio-pci"):
            (self.bus / "drivers" / driver).mkdir(parents=True)
        (self.bus / "devices").mkdir()
        (root / "dev/vfio").mkdir(parents=True)
        (root / "proc").mkdir()
        for group, address in enumerate(ADDRESSES):
            at = root / f"sys/devices/pci0000:00/{address}"
            at.mkdir(parents=True)
            for name, text in (("vendor", "0x10de"), ("device", "0x2330"), ("class", "0x030200")):
                (at / name).write_text(f"{text}\n")
            (at / "resource").write_text("0x0000000000000000 0x0000001fffffffff 0x0000000000000200\n")
            (at / "sriov_numvfs").write_text("0\n")
            (root / f"sys/kernel/iommu_groups/{group}").mkdir(parents=True)
            (at / "iommu_group").symlink_to(f"../../../kernel/iommu_groups/{group}")
            (self.bus / "devices" / address).symlink_to(f"../../../devices/pci0000:00/{address}")
            (root / f"dev/vfio/{group}").symlink_to("/dev/null")
        self.boot()

    def boot(self) -> None:
        for address in ADDRESSES:
            (self.bus / "devices" / address / "driver_override").write_text("\n")
            self._give(address, "nvidia")

    def driver(self, address: str) -> str | None:
        link = self.bus / "devices" / address / "driver"
        return link.readlink().name if link.is_symlink() else None

    def write(self, path: Path, text: str) -> None:
        """As the kernel takes a write."""
        self.fuse.burn()
        if path.name == "unbind":
            assert self.driver(text) == path.parent.name
            self._give(text, None)
        elif path.name == "drivers_probe":
            if self.driver(text) is None:
                override = (self.bus / "devices" / text / "driver_override").read_text().strip()
                self._give(text, override or "nvidia")
        else:
            assert path.name == "driver_override"
            path.write_text(text)
        self.fuse.burn()

    def _give(self, address: str, driver: str | None) -> None:
        link = self.bus / "devices" / address / "driver"
        link.unlink(missing_ok=True)
        if driver is not None:
            link.symlink_to(f"../../../bus/pci/drivers/{driver}")
        known = [row for row in ROWS[1:] if self.driver(row.split("\t")[2].lower()) == "nvidia"]
        (self.nvml / LIBRARIES / "libnvidia-ml.gpus").write_text("\n".join([ROWS[0], *known]) + "\n")


class Programs:
    """nvidia-smi on a machine with GPUs in persistence mode. It knows only those of NVIDIA's driver."""

    def __init__(self, machine: PciBus) -> None:
        self.root = Path("/")
        self.machine = machine
        self.persistent = set(ADDRESSES)

    async def run(self, *command: str, **_: Any) -> str:
        address = command[2]
        if self.machine.driver(address) != "nvidia":
            raise Retry(f"No devices were found at {address}", after=1.0)
        match command[3:]:
            case ("--query-gpu=persistence_mode", "--format=csv,noheader"):
                return "Enabled\n" if address in self.persistent else "Disabled\n"
            case ("-pm", "0"):
                self.persistent.discard(address)
            case ("-pm", "1"):
                self.persistent.add(address)
            case _:
                raise AssertionError(command)
        return ""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nvml")
    install_nvml(root, gpu_table(1, 1))
    return root


@pytest.fixture
def machine(built, tmp_path, monkeypatch) -> PciBus:
    return make_machine(built, tmp_path / "machine", monkeypatch, Fuse(None))


def make_machine(built, root, monkeypatch, fuse) -> PciBus:
    shutil.rmtree(root, ignore_errors=True)
    bus = PciBus(root, built, fuse)
    monkeypatch.setattr(PciBinder, "_write", lambda _, path, text: bus.write(path, text))
    monkeypatch.setattr("rackloom.claim.node.gpu.monitor.gpu_locations", lambda _machine: {})
    return bus


def binder(machine: PciBus) -> PciBinder:
    return PciBinder(machine.bus, machine.root / "proc")


def watched(machine: PciBus) -> GpuMonitor:
    sysroot, source = Sysroot(machine.root), NvmlGpus(machine.nvml)
    vfio = lambda: read_vfio(sysroot, binds_from="nvidia")  # noqa: E731
    nowhere: Any = lambda: None  # noqa: E731
    return GpuMonitor(GpuReader(source, nowhere, vfio), frozenset(), lambda: 0.0, lambda: 0.0)


def passing_plugin(gpus: Any, machine: PciBus, programs: Any) -> GpuPlugin:
    files = DriverFiles(proc_devices=gpus.root / "devices", devices=machine.root / "dev")
    settings = GpuSettings(node=gpus.kit.node, mps_home=gpus.kit.places.home(GPU_DRIVER) / "mps", files=files)
    return GpuPlugin(gpus.api, settings, watched(machine), programs, binder=binder(machine))


# Binding.


def test_a_gpu_goes_to_vfio_and_back(machine):
    for _ in range(2):
        binder(machine).bind(FIRST, "nvidia0")
        assert machine.driver(FIRST) == "vfio-pci"
    assert len(read_gpus(machine.nvml).gpus) == 7
    for _ in range(2):
        binder(machine).release(FIRST)
        assert machine.driver(FIRST) == "nvidia"
    assert (machine.bus / "devices" / FIRST / "driver_override").read_text() == "\n"


def test_a_gpu_that_a_process_has_open_is_not_taken(machine):
    """NVIDIA's driver would wait in the kernel until it is closed."""
    handles = machine.root / "proc/4711/fd"
    handles.mkdir(parents=True)
    (handles.parent / "comm").write_text("training\n")
    (handles / "3").symlink_to("/run/nvidia/driver/dev/nvidia1")
    binder(machine).bind(FIRST, "nvidia0")
    (handles / "4").symlink_to("/dev/nvidia1")
    with pytest.raises(Retry, match=r"is used by training \(4711\)"):
        binder(machine).bind(ADDRESSES[1], "nvidia1")
    assert machine.driver(ADDRESSES[1]) == "nvidia"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda bus: shutil.rmtree(bus.bus / "drivers/vfio-pci"), "vfio-pci is not loaded"),
        (
            lambda bus: (bus.bus / "devices" / FIRST / "sriov_numvfs").write_text("2\n"),
            "has virtual functions",
        ),
        (lambda bus: bus._give(FIRST, "nouveau"), "not bound to nvidia but to nouveau"),
    ],
)
def test_what_cannot_be_taken_is_refused(machine, change, why):
    change(machine)
    with pytest.raises(Refused, match=why):
        binder(machine).bind(FIRST, "nvidia0")


# Publishing.


def pool_of(machine):
    async def story():
        return await watched(machine).pool("n")

    return run_simulation(1, story)


def test_each_gpu_is_offered_twice_and_given_once(machine):
    pool = pool_of(machine)
    assert [device.name for device in pool.devices] == [
        *(f"gpu-{number}" for number in range(8)),
        *(f"gpu-vfio-{number}" for number in range(8)),
    ]
    draws = [device.consumes_counters for device in pool.devices]
    assert draws[:8] == draws[8:]
    assert [counters.name for counters in pool.counters] == [f"gpu-vfio-{n}-counter-set" for n in range(8)]
    assert [device.name for device in pool.without_counters] == [f"gpu-{number}" for number in range(8)]


def test_what_an_operator_has_bound_is_for_virtual_machines_alone(machine):
    machine._give(FIRST, "vfio-pci")
    pool = pool_of(machine)
    names = {device.name: device.consumes_counters for device in pool.devices}
    assert "gpu-0" not in names
    assert names["gpu-vfio-0"] == ()
    assert len(pool.counters) == 7


# For claims.


class PassedLives(Lives):
    """A GPU for a virtual machine, and another one whole."""

    def __init__(self, gpus: Any, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(gpus.kit, monkeypatch)
        self.gpus = gpus
        gpus.kit.places.home(GPU_DRIVER).mkdir(parents=True)
        self.machine = make_machine(built, gpus.root / "machine", monkeypatch, self.fuse)
        self.programs = Programs(self.machine)

    async def set_up(self):
        await self.kit.boot()
        self.claims = [await self.gpus.claim("vm", "gpu-vfio-0"), await self.gpus.claim("whole", "gpu-1")]

    async def start(self):
        plugin = passing_plugin(self.gpus, self.machine, self.programs)
        process = PluginProcess(plugin, FusedApi(self.gpus.api, self.fuse), self.kit.host())
        await plugin._monitor.observe()
        return process

    def edits(self, uid):
        return self.gpus.edits(uid)

    async def check_held(self):
        assert self.machine.driver(FIRST) == "vfio-pci"
        assert self.machine.driver(ADDRESSES[1]) == "nvidia"

    async def check_untouched(self):
        assert {self.machine.driver(address) for address in ADDRESSES} == {"nvidia"}
        assert (self.machine.bus / "devices" / FIRST / "driver_override").read_text() == "\n"

    def reboot(self):
        self.machine.boot()
        super().reboot()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_killed_at_any_point_the_gpu_goes_back(ending, make_gpus, built):
    assert deaths_survived(lambda monkeypatch: PassedLives(make_gpus(), built, monkeypatch), ending) > 30


@pytest.mark.slow
def test_a_virtual_machine_gets_its_files_and_the_slices_stay(gpus, machine):
    programs = Programs(machine)

    async def story():
        await gpus.kit.boot()
        plugin = passing_plugin(gpus, machine, programs)
        async with gpus.kit.plugin(plugin) as process, gpus.kit.kubelet() as kubelet:
            await kubelet.registered(GPU_DRIVER)
            await process.publisher.published.wait()
            slices = await published(gpus.api)
            claim, whole = await gpus.claim("c", "gpu-vfio-0"), await gpus.claim("w", "gpu-0")
            await kubelet.prepare(claim)
            (edits,) = gpus.edits(claim.uid)
            assert [node["path"] for node in edits["deviceNodes"]] == ["/dev/vfio/0"]
            assert FIRST not in programs.persistent
            await plugin._monitor.observe()
            await process.publisher.publish()
            assert await published(gpus.api) == slices
            # kubelet may prepare the next pod before it has ended the previous one.
            waiting = asyncio.ensure_future(process.requests.prepare([whole.ref]))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            await kubelet.unprepare(claim)
            assert not (await waiting)[whole.uid].error
            assert FIRST in programs.persistent
            later = asyncio.ensure_future(process.requests.prepare([claim.ref]))
            await asyncio.sleep(0.5)
            assert not later.done()
            assert machine.driver(FIRST) == "nvidia"
            await kubelet.unprepare(whole)
            assert not (await later)[claim.uid].error
            await kubelet.unprepare(claim)
            assert machine.driver(FIRST) == "nvidia"

    asyncio.run(story())


async def published(api):
    """The published devices. A look while the GPU had no driver may have written them again."""
    specs = [obj["spec"] for obj in (await api.list(RESOURCE_SLICE)).items]
    return [[spec.get(part) for part in ("devices", "sharedCounters")] for spec in specs]


@pytest.mark.slow
def test_a_stale_attempt_that_is_undone_leaves_the_gpu_of_a_later_claim(gpus, machine):
    """nvidia-smi does not know a bound GPU: a claim that does not give it back leaves its mode alone."""
    programs = Programs(machine)

    async def story():
        await gpus.kit.boot()
        plugin = passing_plugin(gpus, machine, programs)
        async with gpus.kit.plugin(plugin) as process, gpus.kit.kubelet() as kubelet:
            await kubelet.registered(GPU_DRIVER)
            await process.publisher.published.wait()
            old, new = await gpus.claim("old", "gpu-vfio-0"), await gpus.claim("new", "gpu-vfio-0")
            record = {"sharing": {}, "partitions": [], "passedThrough": [FIRST]}
            process.checkpoint.put(
                CheckpointEntry(ref=old.ref, state=PrepareState.STARTED, fingerprint="f", record=record)
            )
            await kubelet.prepare(new)
            answers = await process.requests.unprepare([old.ref], 3.0)
            assert not answers[old.uid].error
            assert machine.driver(FIRST) == "vfio-pci"
            await kubelet.unprepare(new)
            assert machine.driver(FIRST) == "nvidia"
            assert FIRST in programs.persistent

    asyncio.run(story())


# Claims of NVIDIA's driver.


def test_a_gpu_that_nvidias_driver_has_bound_is_given_back_with_its_claim(machine, gpus):
    programs = Programs(machine)
    programs.persistent.discard(FIRST)
    machine._give(FIRST, "vfio-pci")

    async def story():
        await gpus.kit.boot()
        claim = await gpus.claim("vm", "gpu-vfio-0")
        node = nvidia_files.Node(gpus.kit.places.plugins.parent)
        found = nvidia_files.gpu_claim(claim.uid, "gpu-vfio-0", kind="vfio", pci_address=FIRST)
        node.install(nvidia_files.checkpoint_file({claim.uid: found}), GPU_DRIVER)
        node.set_state(claim.uid)
        node.add_cdi(GPU_DRIVER, claim.uid)
        apply_takeover(node.places, [GPU_DRIVER])
        async with gpus.kit.plugin(passing_plugin(gpus, machine, programs)) as process:
            (answer,) = (await process.requests.prepare([claim.ref])).values()
            assert (answer.error, machine.driver(FIRST)) == ("", "vfio-pci")
            (answer,) = (await process.requests.unprepare([claim.ref])).values()
            assert answer.error == ""
        assert machine.driver(FIRST) == "nvidia"
        assert FIRST in programs.persistent

    asyncio.run(story())
