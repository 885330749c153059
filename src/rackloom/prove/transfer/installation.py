"""NIXL beside a plain installation of Rackloom: whether it is here, why not, and how to add it.

NIXL is no dependency of Rackloom. Its wheels declare torch, several gigabytes that a transfer between
buffers never imports, and no resolver can leave out the dependencies of a wheel. `installer_command`
therefore installs exactly the wheels of requirements/nixl.txt, by hash and without their dependencies, into
the environment of this interpreter: with pip if the environment has it, otherwise with uv, which makes
environments without pip.

`nixl_missing_reason` decides in this order: no wheels exist for this machine, NIXL is not installed, or it is
installed and cannot be imported. The last is tried in a separate process, because native code for
another machine may crash.
"""

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

from rackloom.errors import Refused
from rackloom.runtime.shipped_files import shipped_path

INSTALL_COMMAND = "rackloom nixl install"
DOWNLOAD_MEGABYTES = 90
"""Approximate size of the download: nixl-cu12 1.5.1 has 69 MB for x86-64, numpy 17."""
_REQUIREMENTS = "requirements/nixl.txt"
_BACKENDS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
_MACHINES = ("x86_64", "aarch64")
_IMPORT_SECONDS = 60.0


def unsupported_reason(system: str, machine: str) -> str | None:
    """The reason why `platform.system()` and `platform.machine()` have no wheels of NIXL, or None."""
    if system == "Linux" and machine in _MACHINES:
        return None
    return f"NIXL has wheels for Linux on {' and '.join(_MACHINES)}, not for {system} on {machine}"


def nixl_missing_reason() -> str | None:
    """The reason why no transfer can run here, or None. Imports nothing into this process."""
    if reason := unsupported_reason(platform.system(), platform.machine()):
        return reason
    if not find_spec("nixl") or not find_spec("numpy") or not any(map(find_spec, _BACKENDS)):
        return f"NIXL is not installed; `{INSTALL_COMMAND}` adds it"
    return _import_problem()


@cache
def _import_problem() -> str | None:
    command = (sys.executable, "-P", "-c", "import nixl._api")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_IMPORT_SECONDS, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"NIXL is installed, but importing it takes more than {_IMPORT_SECONDS:g} s"
    if done.returncode == 0:
        return None
    complaint = (done.stderr.strip().splitlines() or [f"the import ended with {done.returncode}"])[-1]
    return f"NIXL is installed, but cannot be imported: {complaint}"


def require_nixl() -> None:
    """Raise Refused if no transfer can run here."""
    if reason := nixl_missing_reason():
        raise Refused(reason)


def installer_command(
    python: str = sys.executable,
    *,
    has_pip: bool | None = None,
    which: Callable[[str], str | None] = shutil.which,
) -> tuple[str, ...]:
    """The command that installs NIXL into the environment of `python`. Raises Refused if none can.

    `has_pip`: whether that environment has pip. By default, whether this interpreter finds it.
    """
    if reason := unsupported_reason(platform.system(), platform.machine()):
        raise Refused(reason)
    path = shipped_path(_REQUIREMENTS)
    if not path.is_file():
        raise Refused(f"{path} is missing: this installation of Rackloom is not complete")
    options = ("--no-deps", "--require-hashes", "--requirement", str(path))
    if find_spec("pip") is not None if has_pip is None else has_pip:
        return (python, "-m", "pip", "install", "--disable-pip-version-check", *options)
    if (uv := which("uv")) is not None:
        return (uv, "pip", "install", "--python", python, *options)
    raise Refused(
        "this environment has no pip, and there is no uv in $PATH",
        nearest_fix=f"install uv, or run `python -m ensurepip` in it, and call `{INSTALL_COMMAND}` again",
    )
