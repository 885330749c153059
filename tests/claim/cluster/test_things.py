"""Objects of the API server as the controller reads them, hostile ones too."""

import pytest

from rackloom.claim.cluster.things import daemon_pod
from rackloom.claim.domain import names


@pytest.mark.parametrize("said", ["", "{", "\ud800", "[" * 100_000, '{"complete": "yes"}', "7"])
def test_a_mesh_that_cannot_be_read_has_not_been_said(said: str) -> None:
    pod = daemon_pod(
        {
            "metadata": {"name": "daemon", "uid": "1", "annotations": {names.MESH_ANNOTATION: said}},
            "spec": {"nodeName": "tray"},
        }
    )
    assert pod is not None
    assert pod.mesh is None
