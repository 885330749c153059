"""The commands that the pages show for a cluster, run as they stand there.

A command is read from the code blocks of the pages. NAME stands for a ComputeDomain of the reader, and
`kubectl` is the one that is built with the nodes.
"""

import os
import re
import shlex
import subprocess

import pytest
from tests.docs.markdown import lines
from tests.node.conftest import ROOT
from tests.node.nodes import NodeCluster
from tests.node.workloads import compute_domain

PAGES = ("README.md", "docs/compute-domains.md", "docs/nics.md", "docs/gpus.md")
ELSEWHERE = {
    "kubectl --kubeconfig ./site/kubeconfig": "the simulated cluster of `rackloom up`",
    "kubectl patch clusterpolicy": "an object of GPU Operator",
    "kubectl -n NAMESPACE get resourceclaim CLAIM": "run by tests/cluster/test_extended_resources.py",
    "kubectl label nodes NODE nvidia.com/gpu.deploy": "a label that GPU Operator acts on",
    "kubectl -n rackloom-system delete daemonset": "it takes the plugins from under the other tests",
    "kubectl apply -k deploy/kubernetes/one-process": "installed by tests/node/run.py --chart=one-process",
    "make test-cluster": "the tests of the simulated nodes, a stage of their own",
}
"""Commands that name a cluster and are not run here, each with the reason."""


def _commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for line in lines(page) if (ROOT / page).exists() else []:
            command = re.sub(r"\s+#.*$", "", line.removeprefix("$ ")).strip()
            if command.startswith("kubectl ") and not any(command.startswith(start) for start in ELSEWHERE):
                found.append((page, command))
    return found


@pytest.mark.parametrize(("page", "command"), _commands())
def test_a_documented_command_does_what_it_says(installed: NodeCluster, page: str, command: str) -> None:
    installed.apply(compute_domain("documented", "documented-channel"))
    words = ["documented" if word == "NAME" else word for word in shlex.split(command)]
    environment = {
        **os.environ,
        "KUBECONFIG": str(installed.plane.admin),
        "PATH": f"{installed.binaries}:{os.environ['PATH']}",
    }
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{page}: {command}: {done.stdout}{done.stderr}"
    installed.kubectl("delete", "computedomain", "documented", "--timeout=60s")
    if words[1:3] == ["apply", "-f"]:  # a later test applies the same examples, in another isolation mode
        installed.kubectl("delete", "-f", str(ROOT / words[3]), "--ignore-not-found", "--timeout=60s")


def test_pages_show_commands_for_a_cluster() -> None:
    """A change in the reading of pages must not leave nothing to run."""
    assert {page for page, _ in _commands()} >= {"README.md", "docs/compute-domains.md"}
