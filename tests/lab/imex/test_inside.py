"""Stand-ins for nvidia-imex in one process connect, take signals and die like separate processes."""

import asyncio
import signal

import pytest
from tests.lab.imex.loopback import LoopbackImexChild, LoopbackImexControl

from rackloom.claim.imex.config import ImexConfig, ImexFiles, daemon_host, nodes_text, with_peers
from rackloom.claim.imex.nvidia_imex import mesh_of
from rackloom.lab.imex.settings import ImexHost


def daemon(folder, around, index):
    """A daemon with a configured address in a network that only `around` makes reachable."""
    here = folder / str(index)
    here.mkdir()
    files = ImexFiles(here, here / "hosts")
    files.write_config(ImexConfig(f"10.0.9.{index + 1}", files.nodes, None))
    files.write_nodes(nodes_text([daemon_host(slot) for slot in range(2)]))
    return LoopbackImexChild(files.config, around), LoopbackImexControl(files.config, around)


async def until(look):
    async with asyncio.timeout(60):
        while not await look():
            await asyncio.sleep(0.05)


def test_two_of_them_mesh_and_one_that_is_killed_is_missed(tmp_path, loopback_network):
    async def story():
        hosts = tmp_path / "hosts"
        hosts.write_text(with_peers("", {0: "10.0.9.1", 1: "10.0.9.2"}))
        around = ImexHost(hosts, loopback_network, speed=20)
        first, asked = daemon(tmp_path, around, 0)
        second, _ = daemon(tmp_path, around, 1)

        async def meshed():
            return mesh_of(await asked.domain(), 0, [0, 1]).complete

        async def ready():
            return first.returncode is None and await asked.local_status() == "READY"

        await asyncio.sleep(0.1)
        await until(ready)
        await until(meshed)
        second.send_signal(signal.SIGKILL)
        assert await second.wait() == -signal.SIGKILL

        async def missed():
            return not await meshed()

        await until(missed)
        first.send_signal(signal.SIGTERM)
        assert await first.wait() == 0

    asyncio.run(story())


@pytest.mark.parametrize("mode", ["dns", "ip"])
def test_one_that_cannot_start_ends_with_255_and_says_why(tmp_path, loopback_network, mode):
    async def story():
        hosts = tmp_path / "hosts"
        hosts.write_text(with_peers("", {0: "10.0.9.1"}))
        files = ImexFiles(tmp_path, hosts)
        files.write_config(ImexConfig("10.0.9.1", files.nodes, None, mode))
        files.write_nodes(nodes_text([daemon_host(0)]))
        around = ImexHost(hosts, loopback_network)
        blocked = await asyncio.start_server(lambda *_: None, around.address("10.0.9.1"), 50005)
        child = LoopbackImexChild(files.config, around)
        assert await child.wait() == 255
        assert ("address already in use" if mode == "dns" else "does not match") in child.complaint
        blocked.close()
        await blocked.wait_closed()

    asyncio.run(story())
