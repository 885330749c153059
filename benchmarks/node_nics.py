"""The plugin of dra.net on a host with eight interfaces, in network namespaces of the benchmark's own.

An interface is one end of a veth pair: the kernel moves and configures it as it does hardware, without the
time that a driver takes for its rings. `attach` and `detach` are from the runtime's request on the NRI socket
to the answer. The runtime is simulated; the pod's namespace is there already, and stays.
"""

import asyncio
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The kubelet is that of the tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

from node_kit import NODE_NAME, claim, cluster, host_below, latency, row, timed
from pyroute2 import IPRoute  # type: ignore[import-untyped]
from site_figures import resident_mib
from tests.claim.node.nri.nri_runtime import NriRuntime
from tests.claim.node.plugin_manager import KubeletPluginManager, plugin_manager_on

from rackloom.app.node.nic import NicOptions, nic_node
from rackloom.app.node.process import NodeOptions
from rackloom.claim.node.nic.plugin import NIC_DRIVER
from rackloom.claim.node.run import PluginHost
from rackloom.lab.nodes.dra_manager import PodClaim
from rackloom.topology.nics import ExclusionPolicy

NICS = 8
PLUGIN = "nic"
STEPS = ("prepare", "attach", "detach", "unprepare")
CONFIG = {
    "interface": {"name": "rdma0", "addresses": ["10.90.0.2/24"], "mtu": 1400, "arpIgnore": 1},
    "routes": [{"destination": "10.91.0.0/16", "gateway": "10.90.0.1"}],
    "rules": [{"source": "10.90.0.2/32", "table": 101, "priority": 100}],
}
NEWNET = 0x40000000
libc = ctypes.CDLL(None, use_errno=True)


async def measured(root: Path, claims: int) -> list[dict[str, Any]]:
    """Claims through all four steps, and memory; a row with the reason where there can be no namespaces."""
    if libc.unshare(NEWNET):
        return [row(PLUGIN, "skipped", reason=f"no network namespace: {os.strerror(ctypes.get_errno())}")]
    with namespace(root / "network") as network, namespace(root / "pod") as pod:
        # In a thread: the library runs an event loop of its own.
        await asyncio.to_thread(plug_in, network)
        return await stepped(root, claims, pod)


async def stepped(root: Path, claims: int, pod: Path) -> list[dict[str, Any]]:
    """The rows."""
    api, host = await cluster(), host_below(root)
    made = [await claim(api, number, NIC_DRIVER, f"nic{number % NICS}", CONFIG) for number in range(claims)]
    before = resident_mib()
    async with (
        NriRuntime(root / "nri.sock").serving() as runtime,
        nic_node(common(root, host), options(root), api) as node,
        plugin_manager_on(host.directories.registry, api, NODE_NAME) as kubelet,
    ):
        await node.publisher.published.wait()
        await kubelet.registered(NIC_DRIVER)
        await runtime.ready.wait()
        times = [await through(kubelet, runtime, pod, number, claim) for number, claim in enumerate(made)]
        rows = [
            latency(PLUGIN, step, list(of)) for step, of in zip(STEPS, zip(*times, strict=True), strict=True)
        ]
        return [*rows, row(PLUGIN, "memory", before_mib=before, resident_mib=resident_mib(), devices=NICS)]


async def through(
    kubelet: KubeletPluginManager, runtime: NriRuntime, pod: Path, number: int, pod_claim: PodClaim
) -> tuple[float, float, float, float]:
    """One claim from the host into the pod and back: milliseconds of each step."""

    async def accepted(asked: Any) -> None:
        complaint = await asked
        assert not complaint, complaint

    return (
        await timed(kubelet.prepare(pod_claim)),
        await timed(accepted(runtime.run(f"pod-{number}", pod))),
        await timed(accepted(runtime.stop(f"pod-{number}"))),
        await timed(kubelet.unprepare(pod_claim)),
    )


def common(root: Path, host: PluginHost) -> NodeOptions:
    """A machine without PCI devices: the interfaces are virtual."""
    boot = root / "machine/proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text(host.boot_id)
    return NodeOptions(node=NODE_NAME, directories=host.directories, sysroot=root / "machine")


def options(root: Path) -> NicOptions:
    """All kinds of interfaces are offered."""
    return NicOptions(nri_socket=root / "nri.sock", left_out=ExclusionPolicy(kinds=frozenset(), names=()))


def plug_in(network: Path) -> None:
    """Interfaces that are up, with an address, the other ends in the namespace `network`."""
    handle = os.open(network, os.O_RDONLY)
    with IPRoute() as kernel:
        for number in range(NICS):
            peer = {"ifname": f"tor{number}", "net_ns_fd": handle}
            kernel.link("add", ifname=f"nic{number}", kind="veth", peer=peer)
            (index,) = kernel.link_lookup(ifname=f"nic{number}")
            kernel.link("set", index=index, state="up")
            kernel.addr("add", index=index, address=f"10.80.{number}.2", prefixlen=24)
    os.close(handle)


@contextmanager
def namespace(path: Path) -> Iterator[Path]:
    """A network namespace at `path`, which a thread of its own keeps."""
    made, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=keep(path, made, ended), daemon=True)
    thread.start()
    made.wait()
    try:
        yield path
    finally:
        ended.set()
        thread.join()


def keep(path: Path, made: threading.Event, ended: threading.Event) -> Callable[[], None]:
    """The work of the thread that a namespace lives with."""

    def work() -> None:
        assert libc.unshare(NEWNET) == 0
        path.symlink_to(f"/proc/self/task/{threading.get_native_id()}/ns/net")
        made.set()
        ended.wait()

    return work
