"""The Pythons of this machine: interpreters that run, not shims that only name one.

`python -m tests.install.interpreters` ends with 1 if none of them is too old for Rackloom.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
"""Those that Rackloom supports."""
OLD_VERSIONS = ("3.10", "3.9", "3.8")
_SHOW = "import sys; print(sys.executable, '%d.%d' % sys.version_info[:2])"


def interpreter(version: str) -> Path | None:
    """The interpreter of a version, or None if this machine has none."""
    for candidate in _candidates(version):
        try:
            shown = subprocess.run(
                [candidate, "-c", _SHOW], capture_output=True, text=True, check=False, timeout=60
            )
        except OSError:
            continue
        # A shim of pyenv is found on the PATH, and fails if its version is not the chosen one.
        found, _, runs_as = shown.stdout.strip().rpartition(" ")
        if shown.returncode == 0 and runs_as == version:
            return Path(found).resolve()
    return None


def old_interpreter() -> Path | None:
    """An interpreter that is older than Rackloom supports."""
    return next(filter(None, map(interpreter, OLD_VERSIONS)), None)


def _candidates(version: str) -> Iterator[Path | str]:
    # The only old Python that Debian 12 has is PyPy.
    for name in (f"python{version}", "python3", *(("pypy3",) if version in OLD_VERSIONS else ())):
        if found := shutil.which(name):
            yield found
    yield from Path.home().glob(f".pyenv/versions/{version}.*/bin/python")


if __name__ == "__main__":
    sys.exit(old_interpreter() is None)
