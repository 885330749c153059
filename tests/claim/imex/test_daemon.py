"""Whole daemons: the fake API server, the stand-in for nvidia-imex, one loopback address each."""

import asyncio
import json
import random
import sys
import time
from functools import partial

import pytest
from tests.waiting import until

from rackloom.claim.cluster.certificates import issue_certificate, new_authority
from rackloom.claim.imex.config import ImexConfig, ImexFiles, ImexTls
from rackloom.claim.imex.daemon import ImexDaemon
from rackloom.claim.imex.member import DaemonIdentity
from rackloom.claim.imex.nvidia_imex import ImexControl, start_imex
from rackloom.claim.imex.supervisor import PeerLayout, Supervisor
from rackloom.claim.kube.api import NotFound
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ObjectRef, Readiness, read_clique
from rackloom.core.cluster.objects import COMPUTE_DOMAIN_CLIQUE, POD
from rackloom.errors import Refused
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube

pytestmark = pytest.mark.slow

DRIVER = "rackloom-imex"
DOMAIN, CLIQUE = "0a1b2c3d-0000-4000-8000-000000000001", "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1"
OBJECT = names.clique_object_name(DOMAIN, CLIQUE)


class Rack:
    """Nodes of one clique. `start` runs the daemon of one of them."""

    def __init__(self, home, max_nodes: int = 3) -> None:
        self.kube = FakeKube(namespaces=("default", DRIVER), seed=3)
        self.api = DirectApi(self.kube, "controller")
        self._home = home
        self._net = f"127.{random.randint(1, 254)}.{random.randint(0, 255)}"
        self._max_nodes = max_nodes
        self._identity = issue_certificate(
            authority := new_authority("d", time.time()), ("imex-d",), time.time()
        )
        self._authority = authority
        self._starts = 0

    async def start(self, node: int) -> asyncio.Task[None]:
        pod = await self.api.create(POD, self._pod(node))
        address = f"{self._net}.{node + 1}"
        directory = self._home / f"{node}-{self._starts}"
        self._starts += 1
        self._fill(directory)
        tls = ImexTls(directory, "imex-d")
        files = ImexFiles(directory, directory / "hosts")
        files.write_config(ImexConfig(address, files.nodes, tls))

        command = (
            *("env", f"RACKLOOM_TWIN_IMEX_HOSTS={directory / 'hosts'}", "RACKLOOM_TWIN_IMEX_SPEED=20"),
            *(sys.executable, "-m", "rackloom.lab.imex.service", "-c", str(files.config)),
        )
        place = DaemonIdentity(
            DOMAIN,
            CLIQUE,
            DRIVER,
            f"node-{node}",
            address,
            ObjectRef(pod["metadata"]["name"], pod["metadata"]["uid"]),
            self._max_nodes,
        )
        spawn = partial(start_imex, command)
        supervisor = Supervisor(PeerLayout("dns", self._max_nodes), files, tls, spawn)
        control = ImexControl((sys.executable, "-m", "rackloom.lab.imex.ctl"), files.config)
        daemon = ImexDaemon(
            DirectApi(self.kube, f"daemon-{node}"), place, supervisor, control, random.Random(node)
        )
        return asyncio.create_task(daemon.run())

    def _pod(self, node: int) -> dict:
        meta = {"name": f"daemon-{node}-{self._starts}", "namespace": DRIVER}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": meta,
            "spec": {"nodeName": f"node-{node}", "containers": [{"name": "imex", "image": "rackloom"}]},
        }

    def _fill(self, directory) -> None:
        directory.mkdir()
        (directory / "hosts").write_text("127.0.0.1\tlocalhost\n")
        (directory / "tls.key").write_bytes(self._identity.key)
        (directory / "tls.crt").write_bytes(self._identity.certificate)
        (directory / "ca.crt").write_bytes(self._authority.certificate)

    async def members(self) -> dict[str, tuple[int, str]]:
        try:
            found = read_clique(await self.api.get(COMPUTE_DOMAIN_CLIQUE, OBJECT, DRIVER))
        except NotFound:
            return {}
        return {daemon.node_name: (daemon.index, str(daemon.status)) for daemon in found.daemons}

    async def meshes(self) -> list[dict]:
        pods = (await self.api.list(POD, DRIVER)).items
        reported = [(pod["metadata"].get("annotations") or {}).get(names.MESH_ANNOTATION) for pod in pods]
        return [json.loads(text) for text in reported if text]


async def stop(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


READY = str(Readiness.READY)


def test_daemons_form_a_mesh_and_say_so(tmp_path):
    async def story() -> None:
        rack = Rack(tmp_path)
        tasks = [await rack.start(node) for node in range(3)]
        await until(lambda: all_ready(rack, 3), "all are ready")
        await until(lambda: all_meshed(rack, 3), "all are meshed")
        await stop(*tasks)
        assert await rack.members() == {}

    async def all_ready(rack: Rack, count: int) -> bool:
        members = await rack.members()
        return sorted(members.values()) == [(index, READY) for index in range(count)]

    async def all_meshed(rack: Rack, count: int) -> bool:
        meshes = await rack.meshes()
        return len(meshes) == count and all(m["complete"] and m["peers"] == count - 1 for m in meshes)

    asyncio.run(story())


def test_a_node_that_lost_its_daemon_comes_back_under_its_index(tmp_path):
    async def story() -> None:
        rack = Rack(tmp_path)
        first, second = await rack.start(0), await rack.start(1)
        await until(lambda: ready_count(rack, 2), "two are ready")
        index = (await rack.members())["node-1"][0]
        # Killed, not stopped: the entry stays, so the index is still the node's.
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        again = await rack.start(1)
        await until(lambda: ready_count(rack, 2), "two are ready")
        assert (await rack.members())["node-1"][0] == index
        await stop(first, again)

    asyncio.run(story())


async def ready_count(rack: Rack, count: int) -> bool:
    return [status for _, status in (await rack.members()).values()] == [READY] * count


def test_an_entry_that_somebody_took_away_is_made_again(tmp_path):
    async def story() -> None:
        rack = Rack(tmp_path)
        task = await rack.start(0)
        await until(lambda: ready_count(rack, 1), "one is ready")
        await rack.api.delete(COMPUTE_DOMAIN_CLIQUE, OBJECT, DRIVER)
        await until(lambda: entered(rack), "the entry is back")
        await stop(task)

    async def entered(rack: Rack) -> bool:
        return "node-0" in await rack.members()

    asyncio.run(story())


def test_a_daemon_whose_entry_was_taken_while_its_pod_is_deleted_ends_instead_of_coming_back(tmp_path):
    """Its node was lost: another node may have its index by now."""

    async def story() -> None:
        rack = Rack(tmp_path)
        tasks = [await rack.start(node) for node in range(2)]
        await until(lambda: ready_count(rack, 2), "two are ready")
        await rack.api.delete(POD, "daemon-1-1", DRIVER)
        assert len((await rack.api.list(POD, DRIVER)).items) == 2, "no kubelet has ended it"
        found = await rack.api.get(COMPUTE_DOMAIN_CLIQUE, OBJECT, DRIVER)
        left = [daemon for daemon in found["daemons"] if daemon["nodeName"] == "node-0"]
        await rack.api.patch(COMPUTE_DOMAIN_CLIQUE, OBJECT, DRIVER, {"daemons": left})
        async with asyncio.timeout(20):
            await tasks[1]
        assert list(await rack.members()) == ["node-0"]
        await stop(tasks[0])

    asyncio.run(story())


def test_a_full_clique_is_refused_with_the_setting_to_change(tmp_path):
    async def story() -> None:
        rack = Rack(tmp_path, max_nodes=1)
        first = await rack.start(0)
        await until(lambda: ready_count(rack, 1), "one is ready")
        second = await rack.start(1)
        with pytest.raises(Refused, match="max-nodes-per-imex-domain"):
            await second
        await stop(first)

    asyncio.run(story())
