"""Kueue, KAI and the controllers of jobs, built once, on request, from the pins beside this file.

They take many minutes of one core, so nothing else builds them: without them the tests that need them skip.

python tests/cluster/renderings/build.py      builds the missing binaries and prints their folder
"""

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.cluster.build import NotBuilt, Tools, at_hand, made

HERE = Path(__file__).parent
KUEUE = "sigs.k8s.io/kueue"
LWS = "sigs.k8s.io/lws"
MPI = "github.com/kubeflow/mpi-operator"
JOB_SET = "sigs.k8s.io/jobset"
KAI = "github.com/NVIDIA/KAI-scheduler"
QUEUES = Tools(HERE, {"kueue": f"{KUEUE}/cmd/kueue", "lws": f"{LWS}/cmd", "jobset": JOB_SET})
KAI_PARTS = Tools(HERE / "kai", {name: f"{KAI}/cmd/{name}" for name in ("scheduler", "podgrouper", "binder")})


def built(tools: Tools) -> Path:
    """The folder of the binaries.

    Raises:
        NotBuilt: they are missing. Nothing is built here.
    """
    folder = at_hand(tools)
    if folder is None:
        named = ", ".join(tools.packages)
        raise NotBuilt(f"{named} are not built: python tests/cluster/renderings/build.py")
    return folder


def source(tools: Tools, module: str) -> Path:
    """Go's folder for the source of a pinned module. CRDs and manifests are read there and never copied."""
    command = ["go", "mod", "download", "-json", module]
    subprocess.run(command, cwd=tools.module, check=True, capture_output=True, timeout=600)
    found = subprocess.run(
        ["go", "list", "-m", "-f", "{{.Dir}}", module],
        cwd=tools.module,
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return Path(found.stdout.strip())


if __name__ == "__main__":
    try:
        for wanted in (QUEUES, KAI_PARTS):
            sys.stdout.write(f"{made(wanted)}\n")
    except NotBuilt as error:
        sys.exit(f"build: {error}")
