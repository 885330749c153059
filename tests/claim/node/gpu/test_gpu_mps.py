"""MPS daemons and the programs by which they are ruled."""

import asyncio
import stat
from pathlib import Path

import pytest

from rackloom.claim.node.gpu.driver_programs import DriverPrograms
from rackloom.claim.node.gpu.mps import MpsDaemon, MpsDaemons
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


def modes_of_shared_memory():
    found = Path("/dev/shm").glob("rackloom-mps-uid-*")
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in found}


def test_a_daemon_is_started_once_and_ended(home, log):
    async def story():
        daemons = MpsDaemons(DriverPrograms(Path("/")), home)
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

    asyncio.run(story())


def test_a_daemon_that_died_is_started_again_unless_it_was_ended(home, log):
    async def story():
        daemons = MpsDaemons(DriverPrograms(Path("/")), home)
        await daemons.ensure(DAEMON)
        await daemons.ensure(OTHER)
        await daemons.stop("uid-1")
        log.taken()
        await daemons.revive()
        assert log.taken() == ["set_default_device_pinned_mem_limit GPU-1 953M"]
        (home / "uid-0/pipe/running").unlink()
        await daemons.revive()
        assert log.taken()[0] == "start GPU-1,GPU-2 -multiuser-server"

    asyncio.run(story())


def test_after_a_restart_daemons_in_use_are_looked_after_and_others_ended(home, log):
    async def story():
        before = MpsDaemons(DriverPrograms(Path("/")), home)
        await before.ensure(DAEMON)
        await before.ensure(OTHER)
        log.taken()
        daemons = MpsDaemons(DriverPrograms(Path("/")), home)
        await daemons.keep([DAEMON], [DAEMON.name])
        assert log.taken() == ["quit"]
        assert [path.name for path in home.iterdir()] == ["uid-0"]
        (home / "uid-0/pipe/running").unlink()
        await daemons.revive()
        assert log.taken()[0].startswith("start GPU-1,GPU-2")

    asyncio.run(story())


def test_a_driver_root_that_does_not_see_the_sockets_is_refused(home, log, tmp_path):
    async def story():
        with pytest.raises(Refused, match="would not find"):
            await MpsDaemons(DriverPrograms(tmp_path / "driver"), home).ensure(DAEMON)

    asyncio.run(story())


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
