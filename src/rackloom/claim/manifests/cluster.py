"""The objects of a live cluster, read through kubectl with its credentials and contexts.

The module is separate because it starts a process. Commands that read only files do not load it.
"""

import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from rackloom.claim.manifests.documents import SITE_KINDS, Document, parse_documents
from rackloom.claim.manifests.read import Manifests, manifests_of
from rackloom.errors import Refused, Retry
from rackloom.serving.request_log import asked

_HARDWARE = "resourceslices.resource.k8s.io,deviceclasses.resource.k8s.io,nodes"
_CLAIMS = "resourceclaims.resource.k8s.io"
_TAINT_RULES = "devicetaintrules.resource.k8s.io"
_NOT_SERVED = "doesn't have a resource type"
"""A part of kubectl's message about a resource that the server does not serve."""
_NO_SUCH_VERSION = "(NotFound)"
"""Part of kubectl's error for a path that the server does not serve."""
_TIMEOUT_SECONDS = 60.0
_USE_DUMP = "name a dump with --slices instead"


def read_cluster(
    kubeconfig: Path | None = None, context: str | None = None, *, with_claims: bool = False
) -> Manifests:
    """The slices, classes and nodes of the cluster of a kubeconfig, by default that of kubectl.

    `with_claims`: its claims too, which fewer people may read.

    Raises:
        Refused: there is no kubectl, or it could not answer.
        Retry: it did not answer in time.
    """
    kinds = f"{_HARDWARE},{_CLAIMS}" if with_claims else _HARDWARE
    rules = taint_rules_from_cluster(kubeconfig, context)
    return manifests_of([*rules, *objects_from_cluster(kinds, kubeconfig, context)])


def taint_rules_from_cluster(kubeconfig: Path | None = None, context: str | None = None) -> list[Document]:
    """The DeviceTaintRules, none if the server does not serve them. Raises like `read_cluster`.

    They decide which devices kube-scheduler gives, so a plan that does not know them would promise too much.
    """
    try:
        found = objects_from_cluster(_TAINT_RULES, kubeconfig, context)
    except Refused as refused:
        if _NOT_SERVED in refused.reason:
            return []
        raise
    return [document for document in found if document.value.get("kind") == "DeviceTaintRule"]


def first_served_version(
    kind: str, versions: Iterable[str], kubeconfig: Path | None = None, context: str | None = None
) -> str | None:
    """The first of `versions` (group/version) that has the kind, or None. Raises like `read_cluster`.

    A version may be served for other kinds only, so the resources of each version are read.
    """
    for version in versions:
        try:
            text = _answer_of_kubectl(["get", "--raw", f"/apis/{version}"], kubeconfig, context)
        except Refused as refused:
            if _NO_SUCH_VERSION in refused.reason:
                continue
            raise
        (resources,) = parse_documents(text, f"the resources of {version}")
        if any(resource.get("kind") == kind for resource in resources.value.get("resources") or ()):
            return version
    return None


def objects_from_cluster(
    kinds: str, kubeconfig: Path | None = None, context: str | None = None
) -> list[Document]:
    """All objects of `kinds` (comma-separated) in all namespaces. Raises like `read_cluster`."""
    words = ["get", kinds, "--all-namespaces", "-o", "json"]
    return parse_documents(_answer_of_kubectl(words, kubeconfig, context), "the cluster", SITE_KINDS)


def _answer_of_kubectl(words: list[str], kubeconfig: Path | None, context: str | None) -> bytes:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise Refused("kubectl is not on the PATH, and a cluster is asked through it", nearest_fix=_USE_DUMP)
    chosen = [] if kubeconfig is None else ["--kubeconfig", str(kubeconfig)]
    chosen += [] if context is None else ["--context", context]
    words = [*chosen, *words]
    try:
        with asked("kubectl", shlex.join(words)) as request:
            done = subprocess.run([kubectl, *words], capture_output=True, timeout=_TIMEOUT_SECONDS)
            request.outcome = f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as slow:
        raise Retry(
            f"kubectl did not answer within {_TIMEOUT_SECONDS:.0f} s", after=_TIMEOUT_SECONDS
        ) from slow
    if done.returncode != 0:
        error = done.stderr.decode(errors="replace").strip()
        raise Refused(f"kubectl could not read the cluster: {error}", nearest_fix=_USE_DUMP)
    return done.stdout
