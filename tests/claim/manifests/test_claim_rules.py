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


DERIVED = """\
apiVersion: resource.k8s.io/VERSION
kind: ResourceClaim
metadata: {name: one}
spec:
  devices:
    requests:
    - name: gpu
      firstAvailable:
      - name: big
        deviceClassName: gpu.nvidia.com
        derivedAttributes:
        - name: derived/place
          expression: "EXPRESSION"
        - {name: OTHER, expression: "1"}
    constraints:
    - matchAttribute: derived/place
    - distinctAttribute: derived/other
"""

TEXTS = "device.attributes['d'].texts"
NAMES = "device.attributes['d']"
DEEP = f"{NAMES}.all(a, {NAMES}.all(b, {NAMES}.all(c, a + b == c || b + c == a)))"
LOOPS = f"{TEXTS}.exists(a, {TEXTS}.exists(b, {TEXTS}.exists(c, {TEXTS}.exists(d, a + b == c + d))))"


def derived(tmp_path, *, expression="device.driver", other="derived/other", version="v1"):
    file = tmp_path / "claim.yaml"
    changed = DERIVED.replace("EXPRESSION", expression).replace("OTHER", other).replace("VERSION", version)
    file.write_text(changed)
    return read_manifests([file])


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_derived_attributes_are_read(tmp_path, version):
    (found,) = derived(tmp_path, version=version).claims
    (ask,) = found.spec.devices.requests[0].first_available
    assert [(of.name, of.expression) for of in ask.derived_attributes] == [
        ("derived/place", "device.driver"),
        ("derived/other", "1"),
    ]


@pytest.mark.parametrize(
    ("changes", "line", "message"),
    [
        ({"other": "derived/place"}, 14, "two derived attributes are called 'derived/place'"),
        ({"other": "derived/ghost"}, 14, "no constraint compares the derived attribute 'derived/ghost'"),
        ({"other": "place"}, 14, "'place' is no name of a derived attribute"),
        ({"expression": DEEP}, 6, "more than 1000000"),
        ({"expression": LOOPS}, 6, "nothing bounds what"),
    ],
)
def test_a_derived_attribute_that_the_api_server_refuses_is_refused(tmp_path, changes, line, message):
    with pytest.raises(Refused) as refused:
        derived(tmp_path, **changes)
    assert message in refused.value.reason
    assert f"claim.yaml:{line}: " in refused.value.reason
    assert refused.value.nearest_fix


def test_an_expression_that_does_not_compile_is_for_the_allocator_to_report(tmp_path):
    assert derived(tmp_path, expression="1 +").claims
