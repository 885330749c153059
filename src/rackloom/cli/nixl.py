"""`rackloom nixl install|status`: NIXL in this environment, without what its wheels declare."""

import shlex
import subprocess
from importlib.metadata import version

from cyclopts import App

from rackloom.cli.common import Flag
from rackloom.errors import Refused
from rackloom.prove.transfer.installation import (
    DOWNLOAD_MEGABYTES,
    installer_command,
    nixl_missing_reason,
)

app = App(name="nixl", help="NIXL moves the data of `rackloom transfer`; Rackloom runs without it.")


@app.command
def install(*, dry_run: Flag = False) -> int:
    """Install NIXL into the environment of this program: pinned wheels, by hash, without their dependencies.

    NIXL's wheels declare torch, which transfers never import; that is why no package installer can add NIXL
    alone. It comes from the index that pip or uv is configured for.

    Parameters
    ----------
    dry_run
        Print the command, and install nothing.
    """
    command = installer_command()
    print(shlex.join(command))
    if dry_run:
        return 0
    print(f"downloads about {DOWNLOAD_MEGABYTES} MB", flush=True)
    ended = subprocess.run(command, check=False).returncode
    if ended != 0:
        raise Refused(f"the installer ended with {ended}; it says above why")
    return status()


@app.command
def status() -> int:
    """Say whether transfers can run over NIXL here, and why not. Exit code 0 if they can."""
    if reason := nixl_missing_reason():
        print(reason)
        return 1
    print(f"NIXL {version('nixl')} is installed")
    return 0
