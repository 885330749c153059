"""Claims that have the right types and that the API server would still refuse."""

import pytest

from rackloom.claim.manifests.read import read_manifests
from rackloom.errors import Refused

CLAIM = """\
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: one}
spec:
  devices:
    requests:
    - name: gpu
      exactly: {deviceClassName: gpu.nvidia.com, count: COUNT}
    - name: OTHER
      exactly: {deviceClassName: gpu.nvidia.com}
    constraints:
    - matchAttribute: resource.kubernetes.io/pcieRoot
      requests: [NAMED]
"""


def claim(tmp_path, *, count="1", other="nic", named="gpu"):
    file = tmp_path / "claim.yaml"
    file.write_text(CLAIM.replace("COUNT", count).replace("OTHER", other).replace("NAMED", named))
    return read_manifests([file])


@pytest.mark.parametrize(
    ("changes", "line", "message"),
    [
        ({"other": "gpu"}, 9, "two requests are called 'gpu'"),
        ({"count": "-1"}, 7, "negative count"),
        ({"named": "ghost"}, 12, "names request 'ghost', which the claim does not have"),
    ],
)
def test_what_the_api_server_refuses_is_refused_with_its_line(tmp_path, changes, line, message):
    with pytest.raises(Refused) as refused:
        claim(tmp_path, **changes)
    assert f"claim.yaml:{line}: " in refused.value.reason
    assert message in refused.value.reason


def test_a_count_of_zero_is_the_default(tmp_path):
    (found,) = claim(tmp_path, count="0").claims
    assert found.spec.devices.requests[0].exactly.count == 1
