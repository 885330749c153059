"""The supervisor with the stand-in for nvidia-imex: real processes, each on a separate loopback address."""

import asyncio
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

import pytest
from tests.waiting import until

from rackloom.claim.cluster.certificates import CertifiedKey, issue_certificate, new_authority
from rackloom.claim.imex.config import ImexConfig, ImexFiles, ImexTls
from rackloom.claim.imex.nvidia_imex import ImexControl, ImexProcess, mesh_of, start_imex
from rackloom.claim.imex.supervisor import PeerLayout, Peers, Supervisor
from rackloom.errors import Retry

pytestmark = pytest.mark.slow

SERVICE = ("RACKLOOM_TWIN_IMEX_SPEED=20", sys.executable, "-m", "rackloom.lab.imex.service")
CTL = (sys.executable, "-m", "rackloom.lab.imex.ctl")
LAYOUT = PeerLayout("dns", max_nodes=3)


@dataclass
class Daemon:
    """One supervised daemon and its parts."""

    supervisor: Supervisor
    control: ImexControl
    children: list[ImexProcess]
    secret: Path


class Domain:
    """Daemons at 127.a.b.1 and on, each with its own directory and hosts file."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._net = f"127.{random.randint(1, 254)}.{random.randint(0, 255)}"
        self.authority = new_authority("domain-a", time.time())
        self.identity = issue_certificate(self.authority, ("imex-a",), time.time())

    def address(self, index: int) -> str:
        return f"{self._net}.{index + 1}"

    def peers(self, own: int, *indexes: int) -> Peers:
        return Peers(own, {index: self.address(index) for index in indexes})

    def daemon(self, index: int, identity: CertifiedKey | None = None, *, secret: bool = True) -> Daemon:
        directory = self._home / str(index)
        directory.mkdir()
        (directory / "hosts").write_text("127.0.0.1\tlocalhost\n")
        tls = ImexTls(directory, "imex-a")
        if secret:
            self.project(directory, identity or self.identity)
        files = ImexFiles(directory, directory / "hosts")
        files.write_config(ImexConfig(self.address(index), files.nodes, tls))
        children: list[ImexProcess] = []

        async def spawn() -> ImexProcess:
            hosts = f"RACKLOOM_TWIN_IMEX_HOSTS={directory / 'hosts'}"
            child = await start_imex(("env", hosts, *SERVICE, "-c", str(files.config)))
            children.append(child)
            return child

        supervisor = Supervisor(LAYOUT, files, tls, spawn)
        return Daemon(supervisor, ImexControl(CTL, files.config), children, directory)

    def project(self, directory: Path, identity: CertifiedKey) -> None:
        (directory / "tls.key").write_bytes(identity.key)
        (directory / "tls.crt").write_bytes(identity.certificate)
        (directory / "ca.crt").write_bytes(self.authority.certificate)


@pytest.fixture
def domain(tmp_path):
    return Domain(tmp_path)


class Running:
    """Supervisors in tasks, cancelled at the end. Afterwards no child is left."""

    def __init__(self, *daemons: Daemon) -> None:
        self._daemons = daemons

    async def __aenter__(self) -> None:
        self._tasks = [asyncio.create_task(daemon.supervisor.run()) for daemon in self._daemons]

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert all(child.returncode is not None for daemon in self._daemons for child in daemon.children)


async def ready(daemon: Daemon) -> bool:
    try:
        return await daemon.control.local_status() == "READY"
    except Retry:
        return False


async def meshed(daemon: Daemon, own: int, *peers: int) -> bool:
    try:
        return mesh_of(await daemon.control.domain(), own, peers).complete
    except Retry:
        return False


def test_daemons_that_join_later_are_found_without_a_restart(domain):
    async def story() -> None:
        first, second = domain.daemon(0), domain.daemon(1)
        async with Running(first, second):
            first.supervisor.set_peers(domain.peers(0, 0))
            await until(lambda: ready(first), "the first is ready")
            second.supervisor.set_peers(domain.peers(1, 0, 1))
            first.supervisor.set_peers(domain.peers(0, 0, 1))
            await until(lambda: meshed(first, 0, 0, 1), "the first is meshed")
            await until(lambda: meshed(second, 1, 0, 1), "the second is meshed")
            assert (len(first.children), len(second.children)) == (1, 1)

    asyncio.run(story())


def test_peers_that_join_while_it_starts_are_told_to_it(domain):
    async def story() -> None:
        first, second = domain.daemon(0), domain.daemon(1)
        spawn = first.supervisor.spawn

        async def slowly() -> ImexProcess:
            child = await spawn()
            first.supervisor.set_peers(domain.peers(0, 0, 1))
            return child

        first.supervisor.spawn = slowly
        second.supervisor.set_peers(domain.peers(1, 0, 1))
        first.supervisor.set_peers(domain.peers(0, 0))
        async with Running(first, second):
            await until(lambda: meshed(first, 0, 0, 1), "the first is meshed")

    asyncio.run(story())


def test_a_daemon_that_dies_is_started_again(domain):
    async def story() -> None:
        daemon = domain.daemon(0)
        async with Running(daemon):
            daemon.supervisor.set_peers(domain.peers(0, 0))
            await until(lambda: ready(daemon), "it is ready")
            daemon.children[0].send_signal(SIGKILL)
            await daemon.children[0].wait()
            await until(lambda: ready(daemon), "it is ready")
            assert len(daemon.children) == 2

    asyncio.run(story())


def test_a_daemon_whose_index_moved_is_restarted_under_the_new_one(domain):
    async def story() -> None:
        daemon = domain.daemon(0)
        async with Running(daemon):
            daemon.supervisor.set_peers(Peers(0, {0: domain.address(0)}))
            await until(lambda: ready(daemon), "it is ready")
            daemon.supervisor.set_peers(Peers(2, {2: domain.address(0)}))

            async def moved() -> bool:
                try:
                    answer = await daemon.control.domain()
                except Retry:
                    return False
                return answer.nodes["2"].status == "READY"

            await until(moved, "it runs under the new index")

    asyncio.run(story())


def test_no_daemon_starts_before_its_certificate_is_there(domain):
    async def story() -> None:
        daemon = domain.daemon(0, secret=False)
        async with Running(daemon):
            daemon.supervisor.set_peers(domain.peers(0, 0))
            await asyncio.sleep(0.5)
            assert daemon.children == []
            domain.project(daemon.secret, domain.identity)
            await until(lambda: ready(daemon), "it is ready")

    asyncio.run(story())


def test_a_daemon_of_another_domain_is_not_let_in(domain):
    async def story() -> None:
        stranger = issue_certificate(new_authority("domain-b", time.time()), ("imex-a",), time.time())
        first, second = domain.daemon(0), domain.daemon(1, stranger)
        async with Running(first, second):
            for index, daemon in enumerate((first, second)):
                daemon.supervisor.set_peers(domain.peers(index, 0, 1))
            await until(lambda: ready(first), "the first is ready")
            await until(lambda: ready(second), "the second is ready")
            await asyncio.sleep(1)
            assert not await meshed(first, 0, 0, 1)
            # The secret is corrected, and both recheck: now they meet.
            domain.project(second.secret, domain.identity)
            second.supervisor.recheck()
            await until(lambda: meshed(first, 0, 0, 1), "the first is meshed")

    asyncio.run(story())
