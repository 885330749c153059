"""Where the API server serves a resource."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from rackloom.claim.kube.api import Kind


def collection(kind: Kind, namespace: str | None) -> str:
    """The path of all objects of a kind: of one namespace, or of all."""
    root = f"apis/{kind.group}" if kind.group else "api"
    within = f"namespaces/{quote(namespace, safe='')}/" if kind.namespaced and namespace else ""
    return f"{root}/{kind.version}/{within}{kind.plural}"


def item(kind: Kind, metadata: Mapping[str, Any], subresource: str = "") -> str:
    """The path of the object of this metadata, or of a subresource of it."""
    path = f"{collection(kind, metadata.get('namespace'))}/{quote(metadata['name'], safe='')}"
    return f"{path}/{subresource}" if subresource else path
