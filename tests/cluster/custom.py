"""Custom resource definitions for tests: any fields, and a status of its own."""

from tests.waiting import until

from rackloom.claim.kube.api import Kind, KubeApi, NotFound, Object
from rackloom.claim.kube.kinds import CRD

MPI_JOB = Kind("kubeflow.org", "v2beta1", "MPIJob", "mpijobs", namespaced=True)


def definition(kind: Kind) -> Object:
    """The definition of a kind."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": kind.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    names = {"kind": kind.kind, "plural": kind.plural, "singular": kind.kind.lower()}
    scope = "Namespaced" if kind.namespaced else "Cluster"
    return {
        "metadata": {"name": f"{kind.plural}.{kind.group}"},
        "spec": {"group": kind.group, "scope": scope, "names": names, "versions": [version]},
    }


async def serve(api: KubeApi, kind: Kind) -> None:
    """Define a kind and wait until it is served."""
    await api.create(CRD, definition(kind))

    async def served() -> bool:
        try:
            await api.list(kind)
        except NotFound:
            return False
        return True

    await until(served, f"{kind.plural} are served")
