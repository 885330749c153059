"""NVIDIA's programs, run below the driver's root (chroot) with the paths of a driver in a container."""

import os
from collections.abc import Mapping
from pathlib import Path

from rackloom.claim.node.cdi import DRIVER_PROGRAMS, DriverSpec
from rackloom.errors import Retry
from rackloom.runtime import programs

PROGRAM_SECONDS = 20.0
PROGRAM_RETRY_SECONDS = 2.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LONGEST_COMPLAINT = 300


class ProgramFailed(Retry):
    """A program ran to its end and reports a failure."""


class DriverPrograms:
    """Programs of the host's root, and those of a driver that is in a container below it."""

    def __init__(self, root: Path, driver: DriverSpec | None = None) -> None:
        self.root = root
        self._driver = driver

    async def run(self, *command: str, stdin: str = "", env: Mapping[str, str] | None = None) -> str:
        """The output of the program. Raises `ProgramFailed`, and `Retry` if it does not end in time."""
        result = await programs.run_program(
            *programs.chroot_prefix(self.root),
            *command,
            seconds=PROGRAM_SECONDS,
            again=PROGRAM_RETRY_SECONDS,
            given=stdin.encode(),
            env={**self.environment(), **(env or {})},
        )
        if result.code != 0:
            raise ProgramFailed(
                f"`{' '.join(command)}` failed with {result.code}: {result.output[-_LONGEST_COMPLAINT:]}",
                after=PROGRAM_RETRY_SECONDS,
            )
        return result.output

    def environment(self) -> Mapping[str, str]:
        """The environment of programs: for a driver in a container with the paths in its root as well."""
        path = os.environ.get("PATH", _PATH)
        driver = None if self._driver is None else self._driver.driver
        if driver is None or driver.root == driver.base:
            return {"PATH": path}
        below = Path("/") / driver.root.relative_to(driver.base)
        folders = {
            kind: dict.fromkeys(str(below.joinpath(*file.path.parent.parts[1:])) for file in files)
            for kind, files in (
                ("PATH", driver.programs(*DRIVER_PROGRAMS)),
                ("LD", driver.libraries("libcuda")),
            )
        }
        return {"PATH": ":".join((path, *folders["PATH"])), "LD_LIBRARY_PATH": ":".join(folders["LD"])}
