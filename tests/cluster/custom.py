"""Custom resource definitions for tests: any fields, and a status subresource."""

import contextlib

from tests.waiting import until

from rackloom.claim.kube.api import KubeApi, KubeError, NotFound
from rackloom.core.cluster.objects import CRD, Object, ResourceKind

MPI_JOB = ResourceKind("kubeflow.org", "v2beta1", "MPIJob", "mpijobs", namespaced=True)


def definition(kind: ResourceKind) -> Object:
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
        "metadata": {"name": name_of(kind)},
        "spec": {"group": kind.group, "scope": scope, "names": names, "versions": [version]},
    }


async def serve(api: KubeApi, kind: ResourceKind) -> None:
    """Define a kind and wait until it is served."""
    await api.create(CRD, definition(kind))
    await until(lambda: is_served(api, kind), f"{kind.plural} are served")


async def is_served(api: KubeApi, *kinds: ResourceKind) -> bool:
    """A type that was just installed answers "storage is (re)initializing" for a moment."""
    try:
        for kind in kinds:
            await api.list(kind)
    except KubeError:
        return False
    return True


async def withdraw(api: KubeApi, *kinds: ResourceKind) -> None:
    """Delete the definitions of kinds and wait until they are gone, as another test may define them again."""
    for kind in kinds:
        with contextlib.suppress(NotFound):
            await api.delete(CRD, name_of(kind))
    await until(lambda: none_is_going(api, CRD), "deleted definitions are gone")


async def none_is_going(api: KubeApi, kind: ResourceKind) -> bool:
    """Definitions and namespaces that were deleted stay until all that belongs to them is gone."""
    return not any("deletionTimestamp" in item["metadata"] for item in (await api.list(kind)).items)


def name_of(kind: ResourceKind) -> str:
    """The name of its definition."""
    return f"{kind.plural}.{kind.group}"
