"""nvidia-imex without sockets says of its peers what is so."""

import asyncio
import signal
from pathlib import Path

import pytest

from rackloom.claim.imex.config import ImexConfig, daemon_host, nodes_text
from rackloom.claim.imex.files import ImexFiles
from rackloom.claim.imex.status import READY, Mesh, mesh_of
from rackloom.errors import Retry
from rackloom.twin.imex.memory import ImexNetwork, MemoryControl, MemoryImex
from rackloom.twin.imex.settings import Surroundings

ADDRESSES = {index: f"10.0.0.{index + 1}" for index in range(3)}


class Daemon:
    def __init__(self, folder: Path, index: int, network: ImexNetwork) -> None:
        folder.mkdir()
        self.index, self.network = index, network
        (folder / "hosts").write_text("")
        self.files = ImexFiles(folder, folder / "hosts")
        self.files.write_config(ImexConfig(ADDRESSES[index], self.files.nodes, None))
        self.files.write_nodes(nodes_text([daemon_host(peer) for peer in range(18)]))
        self.control = MemoryControl(self.files.config, ADDRESSES[index], network)

    def start(self, *peers: int) -> None:
        self.know(*peers)
        around = Surroundings(self.files.config.with_name("hosts"))
        self.child = MemoryImex(self.files.config, around, self.network)

    def know(self, *peers: int) -> None:
        self.files.write_hosts({peer: ADDRESSES[peer] for peer in peers})

    async def mesh(self) -> Mesh:
        return mesh_of(await self.control.domain(), self.index, ADDRESSES)


def test_a_mesh_is_whole_when_all_run_and_know_one_another(tmp_path: Path) -> None:
    async def run() -> None:
        network = ImexNetwork()
        a, b, c = (Daemon(tmp_path / str(index), index, network) for index in ADDRESSES)
        with pytest.raises(Retry):
            await a.control.local_status()
        a.start(0, 1)
        b.start(0, 1, 2)
        assert await a.control.local_status() == READY
        assert not (await a.mesh()).complete
        c.start(0, 1, 2)
        assert [one.split(":")[0] for one in (await a.mesh()).missing] == ["0 -> 2", "2 -> 0"]
        a.know(0, 1, 2)
        a.child.send_signal(signal.SIGUSR1)
        assert (await a.mesh()).complete
        assert (await b.mesh()).complete
        network.cut.add(frozenset((ADDRESSES[0], ADDRESSES[1])))
        assert not (await a.mesh()).complete
        assert not (await b.mesh()).complete
        assert (await c.mesh()).complete
        network.cut.clear()
        c.child.send_signal(signal.SIGKILL)
        assert (c.child.returncode, await c.child.wait()) == (-9, -9)
        assert not (await a.mesh()).complete

    asyncio.run(run())
