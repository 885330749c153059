"""A daemon that does not start: how often it is tried, how it is reported, and with how many writes."""

import asyncio
import json
import random
from itertools import pairwise

import pytest
from tests.claim.imex.test_daemon_writes import Rack, calls

from rackloom.claim.imex.config import ImexConfig, ImexFiles
from rackloom.claim.imex.daemon import ImexDaemon
from rackloom.claim.imex.supervisor import LONGEST_RESTART_DELAY, RESTART_DELAY, PeerLayout, Peers, Supervisor
from rackloom.core.cluster import names
from rackloom.errors import Refused
from rackloom.lab.imex.in_process import ImexNetwork, InMemoryImex, InMemoryImexControl
from rackloom.lab.imex.settings import ImexHost
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.virtual import event_loop


class Doomed:
    """A child that ends after a while."""

    def __init__(self, lasts, code=255, complaint="no such device"):
        self.returncode = None
        self.complaint = complaint
        self._lasts, self._code = lasts, code

    def send_signal(self, signal):
        pass

    async def wait(self):
        await asyncio.sleep(self._lasts)
        self.returncode = self._code
        return self._code


def supervisor_of(folder, spawn):
    hosts = folder / "hosts"
    hosts.write_text("")
    return Supervisor(PeerLayout("dns", 3), ImexFiles(folder, hosts), None, spawn)


def starts_of(folder, spawn, seconds, disturb=lambda supervisor: None):
    """The times of the daemon's starts, and the supervisor's failure after `seconds` of virtual time."""

    async def story():
        began = []

        async def noted():
            began.append(asyncio.get_running_loop().time())
            return await spawn(len(began))

        supervisor = supervisor_of(folder, noted)
        supervisor.set_peers(Peers(0, {0: "10.0.0.1"}))
        running = asyncio.create_task(supervisor.run())
        for number in range(int(seconds)):
            await asyncio.sleep(1)
            disturb(supervisor, number)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return began, supervisor.failure

    return event_loop.run_simulation(1, story)


def gaps(began):
    return [round(after - before, 1) for before, after in pairwise(began)]


@pytest.mark.parametrize("refused", [False, True])
def test_one_that_does_not_start_is_tried_less_and_less(tmp_path, refused):
    async def spawn(_number):
        if refused:
            raise Refused("nvidia-imex does not start: No such file", nearest_fix="install it")
        return Doomed(0.2)

    def join(supervisor, number):
        supervisor.set_peers(Peers(0, {0: "10.0.0.1", 1: f"10.0.1.{number % 200}"}))

    began, failure = starts_of(tmp_path, spawn, 200, join)
    lasted = 0.0 if refused else 0.2
    assert gaps(began)[:6] == [round(lasted + delay, 1) for delay in (1, 2, 4, 8, 16, 30)]
    assert len(began) <= 11, "although a peer came or moved every second"
    expected = "nvidia-imex does not start: No such file; install it"
    assert failure == (expected if refused else "exit status 255: no such device")


def test_one_that_ran_for_long_is_started_again_soon(tmp_path):
    async def spawn(number):
        return Doomed(0.2 if number <= 4 else LONGEST_RESTART_DELAY + 1, -9, "")

    began, failure = starts_of(tmp_path, spawn, 120, lambda *_: None)
    soon = LONGEST_RESTART_DELAY + 1 + RESTART_DELAY
    assert gaps(began)[3:6] == [8.2, soon, soon]
    assert failure == "killed by SIGKILL"


class Broken:
    """A rack with one daemon on the stand-in. `bind` chooses the old configuration, which never starts."""

    def __init__(self, folder):
        self.rack = Rack()
        self.network = ImexNetwork()
        self.files = ImexFiles(folder, folder / "hosts")
        (folder / "hosts").write_text("")

    def configure(self, bind):
        self.files.write_config(ImexConfig("10.0.0.1", self.files.nodes, None, "ip" if bind else "dns"))

    async def start(self):
        place = await self.rack.place(0)

        async def spawn():
            return InMemoryImex(
                self.files.config, ImexHost(self.files.config.with_name("hosts")), self.network
            )

        supervisor = Supervisor(PeerLayout("dns", 3), self.files, None, spawn)
        control = InMemoryImexControl(self.files.config, place.address, self.network)
        api = DirectApi(self.rack.kube, "daemon")
        daemon = ImexDaemon(api, place, supervisor, control, random.Random(1))
        self.rack.tasks.append(asyncio.create_task(daemon.run()))

    async def annotations(self):
        return (await self.rack.pod(0)).get("annotations", {})


def test_why_it_does_not_start_is_on_the_pod_once_and_goes_when_it_is_ready(tmp_path):
    async def story():
        broken = Broken(tmp_path)
        broken.configure(bind=True)
        await broken.start()
        await asyncio.sleep(600)
        output = (await broken.annotations())[names.IMEX_ERROR_ANNOTATION]
        assert output == (
            "exit status 255: Configured bind IP address '10.0.0.1' does not match the discovered IP address"
            " 'compute-domain-daemon-0000'; Validation of network configuration failed"
        )
        assert calls(broken.rack.kube, "patch", "pods") <= 2, "one for the label, one for the error"
        assert await broken.rack.ready() == 0

        broken.configure(bind=False)
        await asyncio.sleep(60)
        found = await broken.annotations()
        assert names.IMEX_ERROR_ANNOTATION not in found
        assert json.loads(found[names.MESH_ANNOTATION])["complete"]
        assert await broken.rack.ready() == 1
        await broken.rack.end()

    event_loop.run_simulation(1, story)


def test_a_daemon_that_has_ended_reaches_nobody(tmp_path):
    """The pod's annotation about its peers came from a daemon that no longer exists."""

    async def story():
        broken = Broken(tmp_path)
        broken.configure(bind=False)
        await broken.start()
        await asyncio.sleep(60)
        assert names.MESH_ANNOTATION in await broken.annotations()
        broken.configure(bind=True)
        (running,) = broken.network.running.values()
        running.send_signal(9)
        await asyncio.sleep(60)
        found = await broken.annotations()
        assert names.MESH_ANNOTATION not in found
        assert found[names.IMEX_ERROR_ANNOTATION].startswith("exit status 255")
        assert await broken.rack.ready() == 0
        await broken.rack.end()

    event_loop.run_simulation(1, story)


def test_an_error_that_cannot_be_written_ends_nothing(tmp_path):
    async def story():
        broken = Broken(tmp_path)
        broken.configure(bind=True)
        await broken.start()
        broken.rack.kube.faults.add(RequestFault(user="daemon", verb="patch"))
        await asyncio.sleep(60)
        assert names.IMEX_ERROR_ANNOTATION not in await broken.annotations()
        broken.rack.kube.faults.clear()
        await asyncio.sleep(60)
        assert names.IMEX_ERROR_ANNOTATION in await broken.annotations()
        await broken.rack.end()

    event_loop.run_simulation(1, story)
