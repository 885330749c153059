"""Commands of somebody who installs the program: nothing of this environment reaches them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ASKED_BY = "RACKLOOM_TEST_INSTALL"
"""Set by `make test-install`: packages come from the configured index."""
UV = Path(sys.executable).with_name("uv")
LIMIT = 300.0
"""Seconds that a command may take."""


def output_of(*command: object, home: Path | None = None, rc: int = 0) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
    env.pop("VIRTUAL_ENV", None)
    if home is not None:
        env["HOME"] = str(home)
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=LIMIT, env=env, cwd="/"
    )
    assert done.returncode == rc, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout + done.stderr
