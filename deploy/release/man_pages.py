"""hatchling's hook for the wheel: `rackloom help --man` of this source tree writes what `man` reads.

The pages are data of the wheel, which an installer puts into share/man/man1 of the environment; `man` looks
there where the environment's bin is on the PATH. An editable installation has none, and neither has a wheel
that a Python makes which Rackloom does not run on.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_OLDEST = (3, 11)
"""What rackloom/program.py asks for."""


class ManPages(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the pages while a wheel is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write them into a folder that is gone after the build."""
        if version == "editable" or sys.version_info < _OLDEST:
            return
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        subprocess.run(
            [sys.executable, "-m", "rackloom.cli.main", "help", "--man", folder],
            # The commands of this tree, whatever else is installed here.
            env={**os.environ, "PYTHONPATH": str(Path(self.root) / "src")},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        for page in sorted(folder.iterdir()):
            build_data["shared_data"][str(page)] = f"share/man/man1/{page.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Take the folder away."""
        if version != "editable" and sys.version_info >= _OLDEST:
            self._folder.cleanup()
