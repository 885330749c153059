"""nvidia-imex without sockets reports the true state of its peers."""

import asyncio
import signal
from collections.abc import Awaitable
from pathlib import Path

import pytest

from rackloom.claim.imex.config import ImexConfig, ImexFiles, daemon_host, nodes_text
from rackloom.claim.imex.nvidia_imex import READY, PeerMesh, mesh_of
from rackloom.errors import Retry
from rackloom.lab.imex.in_process import START_SECONDS, ImexNetwork, InMemoryImex, InMemoryImexControl
from rackloom.lab.imex.service import RELOAD_SECONDS, RELOAD_WINDOW
from rackloom.lab.imex.settings import ImexHost
from rackloom.lab.virtual import event_loop

ADDRESSES = {index: f"10.0.0.{index + 1}" for index in range(3)}


class Daemon:
    def __init__(self, folder: Path, index: int, network: ImexNetwork, places: int = 3) -> None:
        folder.mkdir()
        self.index, self.network = index, network
        (folder / "hosts").write_text("")
        self.files = ImexFiles(folder, folder / "hosts")
        self.files.write_config(ImexConfig(ADDRESSES[index], self.files.nodes, None))
        self.files.write_nodes(nodes_text([daemon_host(peer) for peer in range(places)]))
        self.control = InMemoryImexControl(self.files.config, ADDRESSES[index], network)

    def start(self, *peers: int) -> None:
        self.know(*peers)
        around = ImexHost(self.files.config.with_name("hosts"))
        self.child = InMemoryImex(self.files.config, around, self.network)

    def know(self, *peers: int) -> None:
        self.files.write_hosts({peer: ADDRESSES[peer] for peer in peers})

    async def mesh(self) -> PeerMesh:
        return mesh_of(await self.control.domain(), self.index, ADDRESSES)


async def seconds_of(work: Awaitable[object]) -> float:
    began = asyncio.get_running_loop().time()
    await work
    return asyncio.get_running_loop().time() - began


def test_it_is_as_slow_and_as_strict_as_nvidias(tmp_path: Path) -> None:
    async def run() -> None:
        network = ImexNetwork()
        daemon = Daemon(tmp_path / "0", 0, network, places=18)
        daemon.start(0)
        with pytest.raises(Retry):
            await daemon.control.local_status()
        await asyncio.sleep(START_SECONDS + 0.01)
        assert await daemon.control.local_status() == READY
        assert await seconds_of(daemon.control.domain()) == pytest.approx(3.0)
        absent = (await daemon.control.domain()).nodes["1"]
        assert (absent.status, absent.connections["0"].status) == ("UNAVAILABLE", "INVALID")
        await asyncio.sleep(RELOAD_WINDOW)
        daemon.know(0, 1)
        daemon.child.send_signal(signal.SIGUSR1)
        await asyncio.sleep(0.01)
        daemon.know(0, 1, 2)
        daemon.child.send_signal(signal.SIGUSR1)
        await asyncio.sleep(RELOAD_SECONDS + 0.01)
        assert daemon.child.peers == {"10.0.0.1", "10.0.0.2"}, "a second signal within 5 s is ignored"
        daemon.child.send_signal(signal.SIGTERM)
        assert await seconds_of(daemon.child.wait()) == pytest.approx(3.9)
        assert daemon.child.returncode == 0

        without, written = "BIND_INTERFACE_IP=\n", daemon.files.config.read_text()
        daemon.files.config.write_text(written.replace(without, f"{without.strip()}10.0.0.1\n"))
        daemon.start(0)
        assert await daemon.child.wait() == 255
        assert "does not match" in daemon.child.complaint

    event_loop.run_simulation(1, run)


def test_a_mesh_is_whole_when_all_run_and_know_one_another(tmp_path: Path) -> None:
    async def run() -> None:
        network = ImexNetwork()
        a, b, c = (Daemon(tmp_path / str(index), index, network) for index in ADDRESSES)
        with pytest.raises(Retry):
            await a.control.local_status()
        a.start(0, 1)
        b.start(0, 1, 2)
        await asyncio.sleep(START_SECONDS + 0.01)
        assert await a.control.local_status() == READY
        assert not (await a.mesh()).complete
        c.start(0, 1, 2)
        await asyncio.sleep(START_SECONDS + 0.01)
        assert [link.split(":")[0] for link in (await a.mesh()).missing] == ["0 -> 2", "2 -> 0"]
        a.know(0, 1, 2)
        await asyncio.sleep(RELOAD_WINDOW)
        a.child.send_signal(signal.SIGUSR1)
        await asyncio.sleep(RELOAD_SECONDS + 0.01)
        assert (await a.mesh()).complete
        assert (await b.mesh()).complete
        network.cut.add(frozenset((ADDRESSES[0], ADDRESSES[1])))
        assert not (await a.mesh()).complete
        assert not (await b.mesh()).complete
        assert (await c.mesh()).complete
        network.cut.clear()
        c.child.send_signal(signal.SIGKILL)
        assert (await c.child.wait(), c.child.returncode) == (-9, -9)
        assert not (await a.mesh()).complete

    event_loop.run_simulation(1, run)
