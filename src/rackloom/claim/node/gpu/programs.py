"""Running programs of NVIDIA's driver, below the root that the driver is installed in."""

import os
from collections.abc import Mapping
from pathlib import Path

from rackloom import programs
from rackloom.errors import Retry

PATIENCE_SECONDS = 20.0
AGAIN_SECONDS = 2.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LONGEST_COMPLAINT = 300


class Programs:
    """Programs of one root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    async def run(self, *command: str, stdin: str = "", env: Mapping[str, str] | None = None) -> str:
        """What the program prints. Raises `Retry` when it cannot run, fails, or does not end in time."""
        ended = await programs.run(
            *programs.below(self.root),
            *command,
            seconds=PATIENCE_SECONDS,
            again=AGAIN_SECONDS,
            given=stdin.encode(),
            env={"PATH": os.environ.get("PATH", _PATH), **(env or {})},
        )
        if ended.code != 0:
            raise Retry(
                f"`{' '.join(command)}` failed with {ended.code}: {ended.said[-_LONGEST_COMPLAINT:]}",
                after=AGAIN_SECONDS,
            )
        return ended.said
