"""`rackloom nixl install|status`: NIXL in this environment, without the dependencies of its wheels."""

import shlex
import subprocess
from importlib.metadata import version

from cyclopts import App

from rackloom.cli.common import Flag, Output, announce, emit, with_common_flags
from rackloom.errors import Refused
from rackloom.prove.transfer.installation import (
    DOWNLOAD_MEGABYTES,
    installer_command,
    nixl_missing_reason,
)

app = App(name="nixl", help="NIXL moves the data of `rackloom transfer`; Rackloom runs without it.")


@app.command
@with_common_flags
def install(*, dry_run: Flag = False) -> int:
    """Install NIXL into the environment of this program: pinned wheels, by hash, without their dependencies.

    NIXL's wheels declare torch, which transfers never import, so no package installer can add NIXL alone. It
    comes from the index that is configured for pip or uv.

    Parameters
    ----------
    dry_run
        Print the command, and install nothing.
    """
    command = installer_command()
    if dry_run:
        print(shlex.join(command))
        return 0
    announce(shlex.join(command))
    announce(f"downloads about {DOWNLOAD_MEGABYTES} MB")
    ended = subprocess.run(command, check=False).returncode
    if ended != 0:
        raise Refused(f"the installer ended with {ended}; it says above why")
    return status()


@app.command
@with_common_flags
def status(*, output: Output = "table") -> int:
    """Report if transfers can run over NIXL here, and if not, why. Exit code 0 if they can."""
    reason = nixl_missing_reason()
    found = {"usable": not reason, "version": None if reason else version("nixl"), "reason": reason or None}
    emit(found, output, lambda: reason or f"NIXL {found['version']} is installed")
    return 1 if reason else 0
