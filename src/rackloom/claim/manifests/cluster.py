"""What a live cluster publishes, asked through kubectl, whose credentials and contexts stay its own."""

import shutil
import subprocess

from rackloom.claim.manifests.documents import Document, parse_documents
from rackloom.claim.manifests.read import Manifests, gathered
from rackloom.errors import Refused, Retry

_KINDS = "resourceslices.resource.k8s.io,deviceclasses.resource.k8s.io,nodes"
_PATIENCE = 60.0
_DUMP = "name a dump with --slices instead"


def read_cluster(context: str | None = None) -> Manifests:
    """The slices, classes and nodes of the cluster that kubectl talks to, or of another of its contexts.

    Raises:
        Refused: there is no kubectl, or it could not answer.
        Retry: it did not answer in time.
    """
    return gathered(ask_cluster(_KINDS, context))


def ask_cluster(kinds: str, context: str | None = None) -> list[Document]:
    """All objects of `kinds` (comma-separated) in all namespaces. Raises like `read_cluster`."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise Refused("kubectl is not on the PATH, and a cluster is asked through it", nearest_fix=_DUMP)
    chosen = [] if context is None else ["--context", context]
    try:
        done = subprocess.run(
            [kubectl, *chosen, "get", kinds, "--all-namespaces", "-o", "json"],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired as slow:
        raise Retry(f"kubectl did not answer within {_PATIENCE:.0f} s", after=_PATIENCE) from slow
    if done.returncode != 0:
        raise Refused(f"kubectl could not read the cluster: {done.stderr.strip()}", nearest_fix=_DUMP)
    return parse_documents(done.stdout, "the cluster")
