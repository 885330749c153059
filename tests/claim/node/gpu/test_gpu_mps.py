"""MPS daemons, the places of their start, and the programs that control them."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.claim.node.gpu.conftest import launcher_pod
from tests.waiting import until_seen

from rackloom.claim.node.gpu.driver_programs import DriverPrograms
from rackloom.claim.node.gpu.mps import MpsDaemon, MpsDaemons
from rackloom.claim.node.gpu.mps_launcher import OwnContainer, PodLauncher, daemons_home, launcher_socket
from rackloom.errors import Refused, Retry

DAEMON = MpsDaemon(name="uid-0", uuids=("GPU-1", "GPU-2"), memory_limits={"GPU-1": "953M"}, multi_user=True)
OTHER = MpsDaemon(name="uid-1", uuids=("GPU-3",))


class Log:
    def __init__(self, folder):
        self._path = folder / "log"

    def taken(self):
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def log(programs):
    return Log(programs)


@pytest.fixture
def home(tmp_path):
    return tmp_path / "mps"


PROGRAMS = DriverPrograms(Path("/"))


@asynccontextmanager
async def own_container(_home):
    yield OwnContainer(PROGRAMS)


@pytest.fixture(params=[own_container, launcher_pod], ids=["own container", "pod"])
def launching(request, home):
    """A context with the launcher of the daemons."""
    return lambda: request.param(home)


async def launched(launching, story):
    async with launching() as launcher:
        await story(launcher)


def listens(path):
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def modes_of_shared_memory():
    found = Path("/dev/shm").glob("rackloom-mps-uid-*")
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in found}


def test_a_daemon_is_started_once_and_ended(home, log, launching):
    async def story(launcher):
        daemons = MpsDaemons(PROGRAMS, launcher, home)
        limit = "set_default_device_pinned_mem_limit GPU-1 953M"
        await daemons.ensure(DAEMON)
        assert log.taken() == ["start GPU-1,GPU-2 -multiuser-server", limit]
        assert modes_of_shared_memory() == {"rackloom-mps-uid-0": 0o1777}
        await daemons.ensure(DAEMON)
        assert log.taken() == [limit]
        await daemons.stop("uid-0")
        assert log.taken() == ["quit"]
        assert modes_of_shared_memory() == {}
        await daemons.stop("uid-0")
        assert log.taken() == []

    asyncio.run(launched(launching, story))


def test_a_daemon_that_died_is_started_again_unless_it_was_ended(home, log, launching):
    async def story(launcher):
        daemons = MpsDaemons(PROGRAMS, launcher, home)
        await daemons.ensure(DAEMON)
        await daemons.ensure(OTHER)
        await daemons.stop("uid-1")
        log.taken()
        await daemons.revive()
        assert log.taken() == ["set_default_device_pinned_mem_limit GPU-1 953M"]
        (home / "uid-0/pipe/running").unlink()
        await daemons.revive()
        assert log.taken()[0] == "start GPU-1,GPU-2 -multiuser-server"

    asyncio.run(launched(launching, story))


def test_after_a_restart_daemons_in_use_are_looked_after_and_others_ended(home, log, launching):
    async def story(launcher):
        before = MpsDaemons(PROGRAMS, launcher, home)
        await before.ensure(DAEMON)
        await before.ensure(OTHER)
        log.taken()
        daemons = MpsDaemons(PROGRAMS, launcher, home)
        await daemons.keep([DAEMON], [DAEMON.name])
        assert log.taken() == ["quit"]
        assert [path.name for path in home.iterdir() if path.is_dir()] == ["uid-0"]
        (home / "uid-0/pipe/running").unlink()
        await daemons.revive()
        assert log.taken()[0].startswith("start GPU-1,GPU-2")

    asyncio.run(launched(launching, story))


def test_a_driver_root_that_does_not_see_the_sockets_is_refused(home, log, tmp_path):
    async def story():
        elsewhere = DriverPrograms(tmp_path / "driver")
        with pytest.raises(Refused, match="would not find"):
            await MpsDaemons(elsewhere, OwnContainer(elsewhere), home).ensure(DAEMON)

    asyncio.run(story())


def test_without_its_pod_a_daemon_is_waited_for_and_one_that_is_gone_is_cleared_away(home, log):
    async def story():
        daemons = MpsDaemons(PROGRAMS, PodLauncher(launcher_socket(home)), home)
        with pytest.raises(Retry, match="the pod of DaemonSet rackloom-node-mps does not run on this node"):
            await daemons.ensure(DAEMON)
        # A launcher that was killed leaves its socket behind.
        async with launcher_pod(home):
            await daemons.ensure(DAEMON)
        (home / "uid-0/pipe/running").unlink()
        assert launcher_socket(home).exists()
        await daemons.stop("uid-0")
        assert modes_of_shared_memory() == {}

    asyncio.run(story())


def test_why_a_daemon_does_not_start_in_the_pod_is_told(home, log, programs):
    async def story():
        control = programs / "nvidia-cuda-mps-control"
        control.write_text("#!/bin/sh\necho no MPS here; exit 7\n")
        async with launcher_pod(home) as launcher:
            with pytest.raises(Retry, match="failed with 7: no MPS here"):
                await MpsDaemons(PROGRAMS, launcher, home).ensure(DAEMON)

    asyncio.run(story())


def test_what_is_under_way_is_waited_for_before_a_daemon_is_ended(home, log, programs):
    """Also requests of a plugin that did not live to see the result."""
    slowly = programs / "unshare"
    slowly.write_text(slowly.read_text().replace("shift 4", "sleep 0.5; shift 4"))

    async def story():
        async with launcher_pod(home) as launcher:
            before = asyncio.create_task(MpsDaemons(PROGRAMS, launcher, home).ensure(OTHER))
            await asyncio.to_thread(until_seen, (home / "uid-1/pipe").exists, "it is under way")
            await asyncio.sleep(0.2)
            before.cancel()
            await MpsDaemons(PROGRAMS, launcher, home).stop("uid-1")
        assert log.taken() == ["start GPU-3 ", "quit"]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        (b"null\n", {}),
        (b'{"env": 3}\n', "does not know what it was asked"),
        (b'{"later": 1, "memory": "/dev/shm", "env": {"PATH": "/none"}}\n', "cannot run unshare"),
        (b"nul", None),
        (b"x" * 100_000 + b"\n", None),
    ],
)
def test_a_request_is_answered_by_one_line_and_what_is_none_by_nothing(home, line, reply):
    """Also requests of another release, with unknown fields."""

    async def story():
        async with launcher_pod(home) as launcher:
            reader, writer = await asyncio.open_unix_connection(str(launcher_socket(home)))
            writer.write(line)
            writer.write_eof()
            try:
                answer = await reader.read()
            except ConnectionError:
                answer = b""
            writer.close()
            # The next one is served.
            await launcher.settle()
            return answer

    answer = asyncio.run(story())
    if reply is None:
        assert answer == b""
    elif isinstance(reply, str):
        assert reply in msgspec.json.decode(answer)["error"]
    else:
        assert msgspec.json.decode(answer) == {"error": None}


def test_the_program_of_the_pod_starts_daemons_for_its_owner_only_and_ends_by_a_signal(tmp_path, programs):
    command = [sys.executable, "-m", "rackloom.cli.main", "node", "mps", "--driver-root", "/"]
    home = daemons_home(tmp_path)
    with subprocess.Popen([*command, "--plugins", str(tmp_path)], stdout=subprocess.PIPE, text=True) as pod:
        until_seen(lambda: listens(launcher_socket(home)), "it listens", 30)
        assert stat.S_IMODE(launcher_socket(home).stat().st_mode) == 0o600
        launcher = PodLauncher(launcher_socket(home))
        asyncio.run(MpsDaemons(PROGRAMS, launcher, home).ensure(OTHER))
        asyncio.run(MpsDaemons(PROGRAMS, launcher, home).stop(OTHER.name))
        os.kill(pod.pid, signal.SIGTERM)
        assert pod.wait(10) == 0
        assert str(launcher_socket(home)) in pod.stdout.read()


def test_a_program_is_heard_out(programs):
    async def story():
        run = DriverPrograms(Path("/")).run
        assert (
            await run("sh", "-c", "read word; echo $word $WHO", stdin="hello\n", env={"WHO": "you"})
            == "hello you"
        )
        with pytest.raises(Retry, match="`sh -c echo no; exit 3` failed with 3: no"):
            await run("sh", "-c", "echo no; exit 3")
        with pytest.raises(Retry, match="cannot run no-such-program"):
            await run("no-such-program")

    asyncio.run(story())


def test_a_daemon_that_does_not_answer_in_time_is_not_taken_for_gone(home):
    """It holds its GPUs. A plugin that finds its directories gone would start another."""

    class Hanging(DriverPrograms):
        async def run(self, *command, **_):
            raise Retry(f"{command[0]} did not end within 20 s", after=2.0)

    async def story():
        daemons = MpsDaemons(Hanging(Path("/")), OwnContainer(PROGRAMS), home)
        (home / "uid-0/pipe").mkdir(parents=True)
        with pytest.raises(Retry, match="did not end"):
            await daemons.stop("uid-0")
        assert (home / "uid-0/pipe").is_dir()

    asyncio.run(story())
