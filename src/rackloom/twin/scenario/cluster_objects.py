"""The objects that a scenario names or submits: kinds by their names, manifests as objects."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Kind, Object
from rackloom.errors import Refused
from rackloom.twin.kube.controllers.mpi_jobs import MPI_JOB

KINDS: Mapping[tuple[str, str], Kind] = {
    (kind.api_version, kind.kind): kind for kind in (*vars(kinds).values(), MPI_JOB) if isinstance(kind, Kind)
}


def kind_named(name: str) -> Kind:
    """The kind that files call so. Refused for one that Rackloom does not know."""
    found = next((kind for (_, called), kind in KINDS.items() if called == name), None)
    if found is None:
        known = ", ".join(sorted(called for _, called in KINDS))
        raise Refused(f"kind {name} is not known", nearest_fix=f"one of {known}")
    return found


def objects_of(manifest: str, namespace: str) -> Iterator[tuple[Kind, Object]]:
    """The objects of a manifest. Refused for what is not YAML, or of a kind that is not known."""
    try:
        documents: list[Any] = [one for one in yaml.safe_load_all(manifest) if one is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Refused(f"the manifest is not YAML: {error}", nearest_fix="correct that line") from error
    for one in documents:
        kind = KINDS.get((one.get("apiVersion", ""), one.get("kind", ""))) if isinstance(one, dict) else None
        if kind is None:
            known = ", ".join(f"{version} {name}" for version, name in sorted(KINDS))
            raise Refused("the manifest has an object of no known kind", nearest_fix=f"one of {known}")
        if kind.namespaced:
            one.setdefault("metadata", {}).setdefault("namespace", namespace)
        yield kind, one
