"""The discovery requests that clients send to an API server before anything else."""

from rackloom.core.cluster.objects import COMPUTE_DOMAIN, NODE
from rackloom.lab.kube.kubectl.discovery import discovery_document
from rackloom.lab.kube.objects import TYPE_SCHEMAS


def test_every_type_is_found_from_the_groups_down() -> None:
    groups = discovery_document("/apis", TYPE_SCHEMAS)
    assert groups is not None
    paths = [
        f"/apis/{version['groupVersion']}" for group in groups["groups"] for version in group["versions"]
    ]
    found = {
        (document["groupVersion"], resource["name"], resource["namespaced"])
        for path in ["/api/v1", *paths]
        if (document := discovery_document(path, TYPE_SCHEMAS)) is not None
        for resource in document["resources"]
    }
    assert {(kind.api_version, kind.plural, kind.namespaced) for kind in TYPE_SCHEMAS} <= found
    assert (COMPUTE_DOMAIN.api_version, f"{COMPUTE_DOMAIN.plural}/status", True) in found


def test_what_is_not_served_is_not_told_of() -> None:
    assert discovery_document("/apis/example.com/v1", TYPE_SCHEMAS) is None
    assert discovery_document(f"/api/v1/{NODE.plural}", TYPE_SCHEMAS) is None
    assert discovery_document("/openapi/v3/apis/example.com/v1", TYPE_SCHEMAS) is None


def test_every_document_of_openapi_is_there() -> None:
    index = discovery_document("/openapi/v3", TYPE_SCHEMAS)
    assert index is not None
    for place in index["paths"].values():
        document = discovery_document(place["serverRelativeURL"], TYPE_SCHEMAS)
        assert document is not None
        assert document["paths"]
