"""The console script: says in one line where Rackloom cannot run, before it imports what is not there.

The wheel installs on an older Python and on Windows too, but without its dependencies: an installer that
refused would name whichever of them it tried first. This file therefore runs on Python 3.8.
"""

import os
import sys

_OLDEST = (3, 11)


def why_not_here() -> "str | None":
    """What keeps Rackloom from running on this machine, in a sentence; None: nothing."""
    if sys.version_info < _OLDEST:
        found = ".".join(map(str, sys.version_info[:2]))
        return "rackloom: needs Python 3.11 or newer; this is Python " + found
    if sys.platform == "win32":
        return "rackloom: runs on Linux and macOS; on Windows use the Windows Subsystem for Linux"
    return None


def is_kubectl_plugin() -> bool:
    """Whether this runs as `kubectl rackloom`, by the name of the file that kubectl starts for it.

    Whoever names no hardware and no site there means the cluster of the kubeconfig.
    """
    return os.path.basename(sys.argv[0]).startswith("kubectl-")  # noqa: PTH119 (pathlib takes long to import)


def main() -> None:
    """Run the command line, or say why not."""
    problem = why_not_here()
    if problem is not None:
        sys.exit(problem)
    from rackloom.cli.main import main as run_command_line

    run_command_line()
