"""Runs a tutorial: its commands as they stand on the page, in one shell, in an empty home.

On a page, a block `sh` is run and must succeed. A block `sh refused` must end with a nonzero status. A block
`sh server` is started and runs until the end. A block `text` behind one is its output: its lines must occur
in the output in their order, and `...` stands for anything. A server's output is waited for.

If it may (root), the shell has its own network, so that the ports on the page are free. Otherwise they must
be free here.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue

ROOT = Path(__file__).parents[2]
OF_A_CHECKOUT = "tutorial-contributor"
"""The page whose reader has a checkout. Readers of the other pages have only the program."""
COPIED = ("src", "tests", "pyproject.toml")
"""The parts that a contributor changes."""
LINKED = ("examples", "docs", "deploy", "benchmarks", "Makefile", "requirements", "README.md", ".venv")
PORTS = (8080, 1079, 9108, 8443)
PATIENCE_SECONDS = 240
_BLOCK = re.compile(r"^```(sh(?: \w+)?|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Step:
    """A block of commands, with its output on the page."""

    way: str
    """Empty, `refused` or `server`."""
    commands: str
    printed: list[str] = field(default_factory=list)


def steps(page: Path) -> list[Step]:
    """The commands that a reader of a page types, in order. Raises ValueError if output has no command."""
    found: list[Step] = []
    for kind, text in _BLOCK.findall(page.read_text()):
        if kind != "text":
            found.append(Step(kind.removeprefix("sh").strip(), text))
        elif not found:
            raise ValueError(f"{page.name}: output stands before any command")
        else:
            found[-1].printed += text.splitlines()
    return found


def missing(printed: list[str], output: str) -> str | None:
    """The first line of a page that is not in its place in the output, or None if all are."""
    lines = iter(output.splitlines())
    for line in printed:
        wanted = re.compile(".*".join(map(re.escape, line.strip().split("..."))) + r"\s*")
        if not any(wanted.fullmatch(found.strip()) for found in lines):
            return line
    return None


def copy_checkout(folder: Path) -> None:
    """A contributor's working folder: copies of the parts to change, and links to the rest."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, folder / name)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)


class Lesson:
    """A shell whose home is `folder`. `close` ends all that it started.

    `program` is the directory of `rackloom`. `source` has the packages that it imports. None means its own.
    """

    def __init__(self, folder: Path, program: Path, source: Path | None) -> None:
        environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("RACKLOOM_", "PYTEST_", "PYTHON", "KUBE"))
            },
            "PATH": f"{program}:{os.environ['PATH']}",
            **({} if source is None else {"PYTHONPATH": str(source)}),
            "HOME": str(folder),
        }
        own_network = may_have_a_network()
        self._shell = subprocess.Popen(
            [*(("unshare", "--net") if own_network else ()), "bash"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            cwd=folder, env=environment, start_new_session=True, text=True,
        )  # fmt: skip
        self._folder = folder
        self._servers = 0
        self._lines: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if own_network:
            self._run("ip link set lo up\n")

    def take(self, step: Step) -> None:
        """Do a step. Raises AssertionError if its result differs from the page."""
        if step.way == "server":
            self._start(step)
            return
        output, status = self._run(step.commands)
        assert (status != 0) == (step.way == "refused"), f"status {status}:\n{step.commands}\n{output}"
        line = missing(step.printed, output)
        assert line is None, f"not printed: {line}\n{step.commands}\n{output}"

    def close(self) -> None:
        """End the shell and its servers: first as Ctrl-C would, and finally with SIGKILL."""
        group = os.getpgid(self._shell.pid)
        for sign, seconds in ((signal.SIGINT, 0), (signal.SIGTERM, 20), (signal.SIGKILL, 5)):
            try:
                os.killpg(group, sign)
                if seconds:
                    self._shell.wait(seconds)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self._shell.wait()
        self._reader.join()
        for end in (self._shell.stdin, self._shell.stdout):
            assert end is not None
            end.close()

    def _start(self, step: Step) -> None:
        self._servers += 1
        log = self._folder / f"server-{self._servers}.log"
        log.touch()
        self._run(f"{{ {step.commands.strip()}\n}} > {log.name} 2>&1 &\n")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (line := missing(step.printed, log.read_text())) is not None:
            assert time.monotonic() < deadline, f"not printed: {line}\n{step.commands}\n{log.read_text()}"
            time.sleep(0.2)

    def _run(self, commands: str) -> tuple[str, int]:
        """Output and status of commands. The first that fails ends them, without ending the shell."""
        assert self._shell.stdin is not None
        self._shell.stdin.write(
            f"failed=0; trap 'failed=1' ERR\n{commands}\ntrap - ERR; echo; echo __END__ $failed\n"
        )
        self._shell.stdin.flush()
        lines: list[str] = []
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                line = self._lines.get(timeout=max(0.1, deadline - time.monotonic()))
            except Empty:
                raise AssertionError(f"no end of:\n{commands}\n{''.join(lines)}") from None
            if line.startswith("__END__"):
                return "".join(lines), int(line.split()[1])
            lines.append(line)

    def _read(self) -> None:
        assert self._shell.stdout is not None
        for line in self._shell.stdout:
            self._lines.put(line)


def may_have_a_network() -> bool:
    """Whether a process of this user may have its own network."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode == 0


def taken_port() -> int | None:
    """A port of the pages that is in use, or None if all are free or a lesson has its own network."""
    if may_have_a_network():
        return None
    for port in PORTS:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return port
    return None
