"""Child processes of a test run: their logs kept, their end certain."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TAIL = 30
"""Lines of a log that are shown."""
_PATIENCE = 10.0
"""Seconds that a process has to end before it is killed."""


@dataclass(frozen=True, slots=True)
class Child:
    """One process that was started here."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def ended(self) -> bool:
        return self.process.poll() is not None

    def stop(self) -> None:
        """Terminate it, and kill it if it does not end."""
        self.process.terminate()
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        """Kill it without a warning, as a failing machine does."""
        self.process.kill()
        self.process.wait()

    def tail(self) -> str:
        """The end of its log, under its name."""
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL:]
        return "\n".join([f"--- {self.name} ({self.log}), the last {len(lines)} lines", *lines])


def start(name: str, argv: Sequence[str | Path], logs: Path) -> Child:
    """Start a program in its own process group.

    The kernel ends it with the thread that started it (prctl PDEATHSIG, through setpriv), so that a killed
    test run leaves nothing behind.
    """
    log = logs / f"{name}.log"
    command = ["setpriv", "--pdeathsig", "KILL", "--", *map(str, argv)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    return Child(name, process, log)
