"""Objects of the API server as the controller reads them, hostile ones too."""

import msgspec
import pytest

from rackloom.core.cluster import names
from rackloom.core.domains.snapshot import LONGEST_ERROR, read_daemon_pod


@pytest.mark.parametrize("text", ["", "{", "\ud800", "[" * 100_000, '{"complete": "yes"}', "7"])
def test_a_mesh_that_cannot_be_read_has_not_been_said(text: str) -> None:
    pod = read_daemon_pod(
        {
            "metadata": {"name": "daemon", "uid": "1", "annotations": {names.MESH_ANNOTATION: text}},
            "spec": {"nodeName": "tray"},
        }
    )
    assert pod is not None
    assert pod.mesh is None


def test_an_error_of_a_daemon_is_one_short_printable_line() -> None:
    text = "exit status 255: \x1b[31mred\u202e\n" + "x" * 100_000
    mesh = msgspec.json.encode({"complete": False, "missing": [text]}).decode()
    annotations = {names.IMEX_ERROR_ANNOTATION: text, names.MESH_ANNOTATION: mesh}
    pod = read_daemon_pod(
        {
            "metadata": {"name": "daemon", "uid": "1", "annotations": annotations},
            "spec": {"nodeName": "tray"},
        }
    )
    assert pod is not None
    assert pod.mesh is not None
    for line in (pod.imex_error, *pod.mesh.missing):
        assert line.startswith("exit status 255: [31mred xxx")
        assert line.isprintable()
        assert len(line) == LONGEST_ERROR
