"""Which resource types an API server serves: from its groups down to their resources.

Source: Kubernetes' API discovery (`/api/v1`, `/apis`, `/apis/<group>/<version>`), in the plain form that
every version of it answers.
"""

import asyncio
from typing import Protocol

import msgspec

from rackloom.claim.kube.api import Kind, KubeError, NotFound, Object

_NEEDED = frozenset({"list", "delete"})


class Documents(Protocol):
    """A client that reads documents which are no objects."""

    async def document(self, path: str) -> Object:
        """Read the document at a path. Raises KubeError."""
        ...


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What an API server answered."""

    kinds: tuple[Kind, ...]
    """Each type once, in the version that its group prefers, if its objects can be listed and deleted."""
    silent: tuple[str, ...] = ()
    """`group/version` of each API whose own server (an APIService) does not answer."""


async def served(api: Documents) -> Served:
    """Ask an API server for its types. Raises KubeError where it does not answer itself."""
    groups = (await api.document("apis"))["groups"]
    preferred = [group["preferredVersion"]["groupVersion"] for group in groups]
    versions = ["v1", *preferred]
    paths = ["api/v1", *(f"apis/{version}" for version in preferred)]
    found = await asyncio.gather(*(_resources(api, path) for path in paths))
    kinds = (kind for document in found if document is not None for kind in kinds_in(document))
    return Served(
        kinds=tuple(dict.fromkeys(kinds)),
        silent=tuple(version for version, one in zip(versions, found, strict=True) if one is None),
    )


def kinds_in(document: Object) -> tuple[Kind, ...]:
    """The types of an APIResourceList whose objects can be listed and deleted."""
    group, _, version = document["groupVersion"].rpartition("/")
    return tuple(
        Kind(group, version, entry["kind"], entry["name"], namespaced=entry["namespaced"])
        for entry in document["resources"]
        if "/" not in entry["name"] and _NEEDED.issubset(entry["verbs"])
    )


async def _resources(api: Documents, path: str) -> Object | None:
    try:
        return await api.document(path)
    except NotFound:
        return {"groupVersion": path.removeprefix("apis/").removeprefix("api/"), "resources": []}
    except KubeError as error:
        if error.code in (0, 401, 403):
            raise
        return None
