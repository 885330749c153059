"""Two daemons in two network namespaces, as in two pods: only NVIDIA's ports between them."""

import asyncio
import os
import subprocess
import sys
import time
from functools import partial

import pytest
from tests.waiting import until

from rackloom.claim.cluster.certificates import issue_certificate, new_authority
from rackloom.claim.imex.config import ImexConfig, ImexFiles, ImexTls
from rackloom.claim.imex.nvidia_imex import ImexControl, mesh_of, start_imex
from rackloom.claim.imex.supervisor import PeerLayout, Peers, Supervisor
from rackloom.errors import Retry

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
ADDRESSES = ("10.231.7.1", "10.231.7.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@pytest.fixture
def pods():
    names = [f"rlimex{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ends = [f"im{os.getpid() % 100000}{side}" for side in "ab"]
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30)


@pytest.mark.slow
def test_daemons_in_two_pods_meet_on_the_documented_ports(pods, tmp_path):
    authority = new_authority("d", time.time())
    identity = issue_certificate(authority, ("imex-d",), time.time())
    peers = dict(enumerate(ADDRESSES))
    controls: list[ImexControl] = []
    supervisors = []
    for index, pod in enumerate(pods):
        directory = tmp_path / pod
        directory.mkdir()
        (directory / "hosts").write_text("")
        (directory / "tls.key").write_bytes(identity.key)
        (directory / "tls.crt").write_bytes(identity.certificate)
        (directory / "ca.crt").write_bytes(authority.certificate)
        tls = ImexTls(directory, "imex-d")
        files = ImexFiles(directory, directory / "hosts")
        files.write_config(ImexConfig(ADDRESSES[index], files.nodes, tls))
        inside = ("ip", "netns", "exec", pod, sys.executable, "-m")
        hosts = f"RACKLOOM_TWIN_IMEX_HOSTS={directory / 'hosts'}"
        command = ("env", hosts, *inside, "rackloom.lab.imex.service", "-c", str(files.config))
        supervisor = Supervisor(PeerLayout("dns", max_nodes=2), files, tls, partial(start_imex, command))
        supervisors.append((supervisor, Peers(index, peers)))
        controls.append(ImexControl((*inside, "rackloom.lab.imex.ctl"), files.config))

    async def meshed(index: int) -> bool:
        try:
            return mesh_of(await controls[index].domain(), index, peers).complete
        except Retry:
            return False

    async def story() -> None:
        tasks = []
        for supervisor, known in supervisors:
            supervisor.set_peers(known)
            tasks.append(asyncio.create_task(supervisor.run()))
        for index in (0, 1):
            await until(lambda index=index: meshed(index), f"daemon {index} is meshed")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(story())
