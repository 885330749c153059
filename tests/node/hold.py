"""`python tests/node/run.py --hold`: two real nodes with deploy/kubernetes/base on them, to look at by hand
until Ctrl-C."""

import os
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.node.nodes import NodeCluster

BASE = Path(__file__).parents[2] / "deploy/kubernetes/base"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="nodes-", ignore_cleanup_errors=True) as folder:
        images, containerd = (
            Path(os.environ[name]) for name in ("RACKLOOM_NODE_IMAGES", "RACKLOOM_CONTAINERD_ROOT")
        )
        cluster = NodeCluster(Path(folder), images, containerd)
        try:
            cluster.start()
            cluster.kubectl("apply", "-k", str(BASE))
            print(
                f"kubectl, in the namespaces of process {os.getpid()}:",
                f"{cluster.binaries}/kubectl --kubeconfig {cluster.plane.admin}",
            )
            for node in cluster.nodes:
                print(f"logs of {node.name}: {node.state}/logs")
            sys.stdout.flush()
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
        finally:
            cluster.stop()


if __name__ == "__main__":
    main()
