"""Whether this program was started as a plugin of kubectl."""

import os
import sys


def is_kubectl_plugin() -> bool:
    """Whether this runs as `kubectl rackloom`, by the name of the file that kubectl starts for it.

    Whoever names no hardware and no site there means the cluster of the kubeconfig.
    """
    return os.path.basename(sys.argv[0]).startswith("kubectl-")  # noqa: PTH119 (pathlib takes long to import)
