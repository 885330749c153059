"""Running programs of NVIDIA's driver, below the root that the driver is installed in."""

import os
from collections.abc import Mapping
from pathlib import Path

from rackloom import programs
from rackloom.claim.node.driver import PROGRAMS, DriverSpec
from rackloom.errors import Retry

PATIENCE_SECONDS = 20.0
AGAIN_SECONDS = 2.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LONGEST_COMPLAINT = 300


class Programs:
    """Programs of the host's root, and those of a driver that is in a container below it."""

    def __init__(self, root: Path, driver: DriverSpec | None = None) -> None:
        self.root = root
        self._driver = driver

    async def run(self, *command: str, stdin: str = "", env: Mapping[str, str] | None = None) -> str:
        """What the program prints. Raises `Retry` when it cannot run, fails, or does not end in time."""
        ended = await programs.run(
            *programs.below(self.root),
            *command,
            seconds=PATIENCE_SECONDS,
            again=AGAIN_SECONDS,
            given=stdin.encode(),
            env={**self._environment(), **(env or {})},
        )
        if ended.code != 0:
            raise Retry(
                f"`{' '.join(command)}` failed with {ended.code}: {ended.said[-_LONGEST_COMPLAINT:]}",
                after=AGAIN_SECONDS,
            )
        return ended.said

    def _environment(self) -> Mapping[str, str]:
        """Where programs and their libraries are found: for a driver in a container, in its root as well."""
        path = os.environ.get("PATH", _PATH)
        driver = None if self._driver is None else self._driver.driver
        if driver is None or driver.root == driver.base:
            return {"PATH": path}
        below = Path("/") / driver.root.relative_to(driver.base)
        folders = {
            kind: dict.fromkeys(str(below.joinpath(*file.path.parent.parts[1:])) for file in files)
            for kind, files in (("PATH", driver.programs(*PROGRAMS)), ("LD", driver.libraries("libcuda")))
        }
        return {"PATH": ":".join((path, *folders["PATH"])), "LD_LIBRARY_PATH": ":".join(folders["LD"])}
