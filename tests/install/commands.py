"""Commands of a user who installs the program. Nothing of this environment reaches them."""

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
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_CONFIGURATION = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
_SHARED = {
    "PIP_CACHE_DIR": _CACHE / "pip",
    "UV_CACHE_DIR": _CACHE / "uv",
    "PIP_CONFIG_FILE": _CONFIGURATION / "pip/pip.conf",
    "UV_CONFIG_FILE": _CONFIGURATION / "uv/uv.toml",
}
"""Parts of the real home that stay in use with an empty one: caches, and the configuration of the index."""


def output_of(
    *command: object, home: Path | None = None, path: str | None = None, cwd: Path = Path("/"), rc: int = 0
) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
    env.pop("VIRTUAL_ENV", None)
    if home is not None:
        shared = {name: str(place) for name, place in _SHARED.items() if place.is_file() or "CACHE" in name}
        env = shared | env | {"HOME": str(home)}
    if path is not None:
        env["PATH"] = path
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=LIMIT, env=env, cwd=cwd
    )
    assert done.returncode == rc, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout + done.stderr
