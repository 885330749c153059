"""What clients ask an API server before anything else."""

from rackloom.claim.kube.kinds import COMPUTE_DOMAIN, NODE
from rackloom.twin.kube.discovery import discovery
from rackloom.twin.kube.shapes import SHAPES


def test_every_type_is_found_from_the_groups_down() -> None:
    groups = discovery("/apis", SHAPES)
    assert groups is not None
    paths = [
        f"/apis/{version['groupVersion']}" for group in groups["groups"] for version in group["versions"]
    ]
    found = {
        (document["groupVersion"], one["name"], one["namespaced"])
        for path in ["/api/v1", *paths]
        if (document := discovery(path, SHAPES)) is not None
        for one in document["resources"]
    }
    assert {(kind.api_version, kind.plural, kind.namespaced) for kind in SHAPES} <= found
    assert (COMPUTE_DOMAIN.api_version, f"{COMPUTE_DOMAIN.plural}/status", True) in found


def test_what_is_not_served_is_not_told_of() -> None:
    assert discovery("/apis/example.com/v1", SHAPES) is None
    assert discovery(f"/api/v1/{NODE.plural}", SHAPES) is None
    assert discovery("/openapi/v3/apis/example.com/v1", SHAPES) is None


def test_every_document_of_openapi_is_there() -> None:
    index = discovery("/openapi/v3", SHAPES)
    assert index is not None
    for place in index["paths"].values():
        document = discovery(place["serverRelativeURL"], SHAPES)
        assert document is not None
        assert document["paths"]
