"""Published incidents on the monitors of every node: which GPUs are kept from new work.

The lines go through a stand-in for /dev/kmsg and the reader and parser of the plugin. NVML is a stand-in.
"""

import asyncio

import msgspec
import pytest
from tests.claim.node.gpu.kernel_records import RecordPipe

from rackloom.claim.node.gpu.inventory import GpuInventory, NodeGpu, RecoveryAction, XidError
from rackloom.claim.node.gpu.monitor import GpuMonitor, GpuReader
from rackloom.claim.node.plugin import Health
from rackloom.errors import Retry
from rackloom.topology.machine import Machine

BUSES = ("0008:01:00", "0009:01:00", "0018:01:00", "0019:01:00")


class StandInNvml:
    """The GPUs of one tray and their events. NVML names the number of an error alone."""

    def __init__(self, tray, recovery):
        self.gpus = [
            NodeGpu(
                minor=index,
                uuid=f"GPU-{tray}-{index}",
                pci_address=f"{bus}.0",
                product="NVIDIA GB300",
                memory_bytes=1 << 38,
                recovery=recovery,
                fabric_health=Health.HEALTHY,
            )
            for index, bus in enumerate(BUSES)
        ]
        self.events = []

    def change(self, index, **changes):
        self.gpus[index] = msgspec.structs.replace(self.gpus[index], **changes)

    def read(self):
        return GpuInventory(gpus=tuple(self.gpus), driver_version="580.95.05")

    def wait(self, seconds):
        # NVML returns one event a call.
        return (self.events.pop(0),) if self.events else ()

    def unmonitored(self):
        return frozenset()

    def close(self):
        pass


class Node:
    """A tray with its GPU plugin's monitor."""

    def __init__(self, tray, clock, recovery=RecoveryAction.NONE):
        self.nvml, self.kernel, self._clock = StandInNvml(tray, recovery), RecordPipe(lambda: clock[0]), clock
        self.boot()

    def boot(self):
        """The plugin starts, and knows nothing of before."""
        reader = GpuReader(
            self.nvml,
            lambda: Machine(name="tray", note="", origin=(), gpus=(), nics=()),
            kernel_log=self.kernel.log.read,
        )
        self.monitor = GpuMonitor(reader, frozenset(), lambda: 0.0, lambda: self._clock[0])

    def error(self, index, number, text):
        self.nvml.events.append(XidError(uuid=self.nvml.gpus[index].uuid, number=number))
        self.kernel.write(f"NVRM: Xid (PCI:{BUSES[index]}): {number}, {text}")


class Rack:
    """Trays that are looked at together, at a time that the test sets."""

    def __init__(self, trays, **settings):
        self.clock = [1000.0]
        self.nodes = [Node(tray, self.clock, **settings) for tray in range(trays)]

    def look(self, seconds):
        """Time passes, and each plugin looks at its GPUs and listens."""
        self.clock[0] += seconds

        async def look_at_all():
            for node in self.nodes:
                await node.monitor.observe()
                await node.monitor.listen()
                while node.nvml.events:
                    await node.monitor.listen()

        asyncio.run(look_at_all())

    def taints(self):
        async def pools():
            return [await node.monitor.pool("node") for node in self.nodes]

        return {
            f"tray-{tray}/{device.name}": [
                (taint.key.rpartition("/")[2], taint.value, taint.effect) for taint in device.taints
            ]
            for tray, pool in enumerate(asyncio.run(pools()))
            for device in pool.devices
        }

    def kept_off(self):
        return [
            gpu for gpu, taints in self.taints().items() if any(effect != "None" for _, _, effect in taints)
        ]


@pytest.fixture
def make_rack():
    made = []

    def make(trays, **settings):
        made.append(Rack(trays, **settings))
        made[-1].look(0.0)
        return made[-1]

    yield make
    for rack in made:
        for node in rack.nodes:
            node.kernel.close()


def words(info, status):
    return f"(0x{info:08x} 0x{status:08x} 0x00000000 0x00000000 0x00000000 0x00000000)"


LINK_DOWN = f"NETIR_LINK_DOWN Fatal XC0 i0 Link 14 {words(0x00200011, 0)}"
"""A link of this GPU lost its signal."""
PEER_GONE = [
    f"RLW_SRC_TRACK Nonfatal XC1 i0 Link 03 {words(0x7, 0x4)}",
    f"RLW_REMAP Nonfatal XC1 i0 Link 10 {words(0x4, 0x10)}",
    f"RLW_REMAP  Nonfatal XC1 i0 Link 10 {words(0x82, 0x1)}",
]
"""The lines of XID 145 on GPUs whose peer is gone. The last one is of a driver before R575."""
DRAIN = "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"
RECOVER_IMEX = "GPU recovery action changed from 0x0 (None) to 0x5 (Recover IMEX Domain)"


@pytest.mark.parametrize("recovery", [RecoveryAction.NONE, None], ids=["", "driver without recovery action"])
@pytest.mark.parametrize("announced", [True, False], ids=["with XID 154", "without"])
def test_one_link_fails_and_sixty_four_gpus_complain(make_rack, announced, recovery):
    """marin-community/marin #9086: XID 149 on one GPU and XID 145 on the other 63 of its domain."""
    rack = make_rack(16, recovery=recovery)
    culprit = rack.nodes[8]
    culprit.error(0, 149, LINK_DOWN)
    if announced:
        culprit.error(0, 154, DRAIN)
    for tray, node in enumerate(rack.nodes):
        for index in range(4):
            if (tray, index) != (8, 0):
                node.error(index, 145, PEER_GONE[(tray + index) % 3])
                node.error(index, 45, "pid=4118, name=python3, Ch 00000008")
    rack.look(1.0)
    assert rack.kept_off() == ["tray-8/gpu-0"]
    found = rack.taints()
    assert found["tray-8/gpu-0"][0] == ("xid", "149", "NoSchedule")
    assert found["tray-0/gpu-1"] == [("xid", "145-needs-domain-view", "None")]
    rack.look(10.0)
    assert rack.kept_off() == ["tray-8/gpu-0"]


def test_no_gpu_is_kept_off_while_the_subcodes_are_unknown(make_rack):
    rack = make_rack(16)
    for node in rack.nodes:
        for gpu in node.nvml.gpus:
            node.nvml.events.append(XidError(uuid=gpu.uuid, number=145))
    rack.look(1.0)
    rack.look(5.0)
    assert rack.kept_off() == []
    assert set(map(tuple, rack.taints().values())) == {(("xid", "145-no-kernel-line", "None"),)}


def test_a_reboot_of_every_node_keeps_nothing_off(make_rack):
    """NVIDIA/NVSentinel #1701: after planned reboots the links train for a moment, and no GPU has a fault.

    The reading of a GPU that is still registering has no health: `gpu_fabric`.
    """
    rack = make_rack(18)
    for half in (rack.nodes[:9], rack.nodes[9:]):
        for node in half:
            for index in range(4):
                node.error(index, 45, "pid=31, name=python3, Ch 00000008")
                node.nvml.change(index, fabric_health=Health.UNKNOWN, clique="")
            node.boot()
        for node in rack.nodes:
            if node not in half:
                for index in range(4):
                    node.error(index, 145, PEER_GONE[index % 3])
        for _ in range(3):
            rack.look(10.0)
            assert rack.kept_off() == []
        for node in half:
            for index in range(4):
                node.nvml.change(index, fabric_health=Health.HEALTHY)
    rack.look(300.0)
    assert set(map(tuple, rack.taints().values())) == {()}


@pytest.mark.parametrize("recovery", [RecoveryAction.NONE, RecoveryAction.RECOVER_IMEX_DOMAIN])
def test_a_host_without_an_imex_daemon_keeps_nothing_off(make_rack, recovery):
    """A healthy GB300 whose IMEX daemons run in pods, or are not needed."""
    rack = make_rack(18, recovery=recovery)
    for node in rack.nodes:
        node.kernel.write(f"NVRM: Xid (PCI:{BUSES[1]}): 154, {RECOVER_IMEX}")
    rack.look(1.0)
    assert rack.kept_off() == []
    health = {device.health for node in rack.nodes for device in node.monitor.health("node")}
    assert health == {Health.HEALTHY}


def test_a_log_that_cannot_be_read_is_named_in_the_taint(make_rack):
    rack = make_rack(1)
    node = rack.nodes[0]
    node.kernel.log.close()
    node.kernel.log._path = node.kernel.log._path.parent / "gone"
    node.nvml.events.append(XidError(uuid="GPU-0-0", number=149))
    rack.look(1.0)
    assert rack.taints()["tray-0/gpu-0"] == [("xid", "149-no-kernel-log", "None")]
    (device, *_) = node.monitor.health("node")
    assert (device.health, device.message.rpartition(": ")[2]) == (
        Health.UNKNOWN,
        "No such file or directory",
    )


def test_a_line_without_an_event_counts_and_so_does_a_line_while_nvml_is_deaf(make_rack):
    """A GPU whose events NVML cannot report, and a driver that is being replaced."""
    rack = make_rack(1)
    node = rack.nodes[0]

    def deaf(seconds):
        raise Retry("NVML reports no events", after=1.0)

    node.nvml.wait = deaf
    node.kernel.write(f"NVRM: Xid (PCI:{BUSES[2]}): 119, Timeout after 45s of waiting for RPC response")
    with pytest.raises(Retry):
        rack.look(1.0)
    assert rack.kept_off() == ["tray-0/gpu-2"]


def test_a_restart_of_the_plugin_keeps_the_taint_of_an_error(make_rack):
    """Also of an error that came while no plugin ran."""
    rack = make_rack(1)
    node = rack.nodes[0]
    node.kernel.write(f"NVRM: Xid (PCI:{BUSES[2]}): 119, Timeout after 45s of waiting for RPC response")
    node.kernel.restart_reader()
    rack.clock[0] += 1800.0
    node.boot()
    asyncio.run(node.monitor.listen())
    # Its first pool already has the taint.
    assert rack.kept_off() == ["tray-0/gpu-2"]
    rack.look(1799.0)
    assert rack.kept_off() == ["tray-0/gpu-2"]
    rack.look(1.0)
    assert rack.kept_off() == []
