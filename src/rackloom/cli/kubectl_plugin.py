"""Detect a start as a plugin of kubectl."""

import os
import sys


def is_kubectl_plugin() -> bool:
    """True for a run as `kubectl rackloom`, by the file name of the program.

    In such a run, the default hardware and site is the cluster of the kubeconfig.
    """
    return os.path.basename(sys.argv[0]).startswith("kubectl-")  # noqa: PTH119 (pathlib takes long to import)
