"""Manifests become values. Any fault in them is refused with file, line and field."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.manifests.documents import SITE_KINDS, Source, parse_documents, read_documents
from rackloom.claim.manifests.read import decode_object, manifests_of, read_manifests
from rackloom.core.allocate.objects import ResourceSlice, readable
from rackloom.errors import Refused
from rackloom.runtime.yaml_events import line_of_field

CLAIM = """\
apiVersion: resource.k8s.io/{version}
kind: ResourceClaim
metadata:
  name: c
spec:
  devices:
    requests:
{request}
"""
NESTED = """\
      - name: gpu
        exactly:
          deviceClassName: gpu.nvidia.com
          tolerations:
            - key: t
"""
FLAT = """\
      - name: gpu
        deviceClassName: gpu.nvidia.com
        tolerations:
          - key: t
"""


def written(folder: Path, text: str, name: str = "f.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("version", "request_text"), [("v1", NESTED), ("v1beta2", NESTED), ("v1beta1", FLAT)]
)
def test_versions_become_v1_with_the_servers_defaults(
    tmp_path: Path, version: str, request_text: str
) -> None:
    path = written(tmp_path, CLAIM.format(version=version, request=request_text))
    asked = read_manifests([path]).claims[0].spec.devices.requests[0].exactly
    assert asked is not None
    assert (asked.device_class_name, asked.allocation_mode, asked.count) == (
        "gpu.nvidia.com",
        "ExactCount",
        1,
    )
    assert asked.tolerations[0].operator == "Equal"


def test_defaults_do_not_replace_what_is_written(tmp_path: Path) -> None:
    text = "      - name: gpu\n        exactly: {deviceClassName: c, allocationMode: All}\n"
    asked = read_manifests([written(tmp_path, CLAIM.format(version="v1", request=text))]).claims[0]
    exactly = asked.spec.devices.requests[0].exactly
    assert exactly is not None
    assert (exactly.allocation_mode, exactly.count) == ("All", 0)


def test_alternatives_get_defaults_too(tmp_path: Path) -> None:
    text = "      - name: gpu\n        firstAvailable: [{name: a, deviceClassName: c}]\n"
    claim = read_manifests([written(tmp_path, CLAIM.format(version="v1", request=text))]).claims[0]
    alternative = claim.spec.devices.requests[0].first_available[0]
    assert (alternative.allocation_mode, alternative.count) == ("ExactCount", 1)


def test_devices_of_v1beta1_slices_lose_their_wrapper(tmp_path: Path) -> None:
    text = """\
apiVersion: resource.k8s.io/v1beta1
kind: ResourceSlice
metadata: {name: s}
spec:
  driver: d
  nodeName: n
  pool: {name: p, generation: 1, resourceSliceCount: 1}
  devices:
    - name: gpu-0
      basic:
        attributes: {model: {string: h100}}
        capacity: {memory: {value: 80Gi}}
"""
    device = read_manifests([written(tmp_path, text)]).slices[0].spec.devices[0]
    assert device.attributes["model"].string == "h100"
    assert device.capacity["memory"].value == "80Gi"


def test_a_template_gives_one_claim_and_other_kinds_nothing(tmp_path: Path) -> None:
    template = CLAIM.format(version="v1", request=NESTED).replace("ResourceClaim", "ResourceClaimTemplate")
    template = template.replace("spec:\n  devices", "spec:\n spec:\n  devices")
    pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\n"
    manifests = read_manifests([written(tmp_path, f"---\n{template}---\n{pod}---\n")])
    assert [claim.metadata.name for claim in manifests.claims] == ["c"]
    assert (manifests.classes, manifests.slices, manifests.nodes) == ((), (), ())


def test_a_list_in_json_is_unfolded(tmp_path: Path) -> None:
    item = parse_documents(CLAIM.format(version="v1", request=NESTED), "x")[0].value
    text = msgspec.json.encode({"kind": "List", "apiVersion": "v1", "items": [item, item]}).decode()
    assert len(read_manifests([written(tmp_path, text, "f.json")]).claims) == 2


@pytest.mark.parametrize(
    ("change", "line", "says"),
    [
        (("deviceClassName", "deviceClasName"), 9, "deviceClasName"),
        (("      - name: gpu", "      - name: [1]"), 8, "spec.devices.requests[0].name"),
        (("tolerations:\n            - key: t", "count: many"), 11, "count"),
        (("resource.k8s.io/v1", "resource.k8s.io/v2"), 1, "v2"),
        (("  name: c", "  name: c\n\tx: y"), 5, "not YAML"),
    ],
)
def test_what_is_wrong_is_refused_with_the_line(
    tmp_path: Path, change: tuple[str, str], line: int, says: str
) -> None:
    text = CLAIM.format(version="v1", request=NESTED).replace(*change)
    with pytest.raises(Refused) as refused:
        read_manifests([written(tmp_path, text)])
    assert f"f.yaml:{line}" in refused.value.reason
    assert says in refused.value.reason
    assert refused.value.nearest_fix


def test_a_scalar_document_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    for path in (written(tmp_path, "just text\n"), tmp_path / "absent.yaml"):
        with pytest.raises(Refused):
            read_manifests([path])


def test_every_field_of_a_full_claim_survives() -> None:
    text = """\
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: c, namespace: x, labels: {a: b}, annotations: {when: 2026-01-01}}
spec:
  devices:
    requests:
      - name: gpu
        exactly:
          deviceClassName: gpu.nvidia.com
          allocationMode: ExactCount
          count: 2
          adminAccess: true
          selectors: [{cel: {expression: "true"}}]
          tolerations: [{key: k, operator: Exists, effect: NoSchedule, tolerationSeconds: 5}]
          capacity: {requests: {memory: 10Gi}}
    constraints: [{matchAttribute: a/b, requests: [gpu]}]
    config: [{requests: [gpu], opaque: {driver: d, parameters: {x: [1, {y: z}]}}}]
status:
  allocation:
    devices:
      results:
        - {request: gpu, driver: d, pool: p, device: gpu-0, shareID: s, consumedCapacity: {memory: 10Gi}}
  reservedFor: [{resource: pods, name: pod, uid: u}]
"""
    document = parse_documents(text, "f")[0]
    fields = {name: value for name, value in document.value.items() if name not in ("apiVersion", "kind")}
    assert msgspec.json.decode(msgspec.json.encode(decode_object(document))) == fields


def test_a_directory_is_its_manifests_by_name(tmp_path: Path) -> None:
    for name in ("b.yml", "a.yaml", "c.json"):
        request = f"      - name: {name[0]}\n        exactly: {{deviceClassName: c}}\n"
        text = CLAIM.format(version="v1", request=request).replace("name: c\n", f"name: from-{name[0]}\n", 1)
        if name.endswith("json"):
            text = json.dumps(yaml.safe_load(text))
        written(tmp_path, text, name)
    written(tmp_path, "resources: [a.yaml]\n", "kustomization.yaml")
    written(tmp_path, "not: [yaml", "notes.txt")
    (tmp_path / "deeper").mkdir()
    written(tmp_path / "deeper", "x: [", "d.yaml")
    found = read_manifests([tmp_path])
    assert [claim.metadata.name for claim in found.claims] == ["from-a", "from-b", "from-c"]
    assert (found.classes, found.slices, found.nodes) == ((), (), ())


def test_a_directory_without_manifests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no manifest"):
        read_manifests([tmp_path])


def test_an_item_of_a_list_names_its_own_lines() -> None:
    text = "kind: List\nitems:\n- kind: Node\n- kind: Pod\n  spec:\n    nodeName: n\n"
    node, pod = parse_documents(text, "f")
    assert node.where(("kind",)) == "f:3"
    assert pod.where(("spec", "nodeName")) == "f:6"


WORDS = st.sampled_from(["a", "b", "items", 'q"', "\\\\", "{", "é", "\U0001f680"])
VALUES = st.recursive(
    st.none() | st.integers() | WORDS, lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner)
)


@given(st.dictionaries(WORDS, VALUES), st.lists(WORDS | st.integers(0, 3), max_size=4), st.integers(0, 3))
def test_a_field_of_json_has_the_line_that_it_has_as_yaml(value: Any, path: list[Any], indent: int) -> None:
    """The lines of JSON come from a scan of its text. Those of YAML come from libyaml."""
    text = "\n" + json.dumps(value, indent=indent or None, ensure_ascii=False)
    (document,) = parse_documents(text, "f")
    assert document.source.is_json
    assert document.where(tuple(path)) == f"f:{line_of_field(text, 0, path)}"


@pytest.mark.parametrize(
    "text", ['{"kind": "Pod",}', '{"kind": "Pod"}\n---\n{"kind": "Node"}', "{kind: Pod}"]
)
def test_what_only_starts_like_json_is_yaml(text: str) -> None:
    first, *_ = parse_documents(text, "f")
    assert first.value == {"kind": "Pod"}
    assert not first.source.is_json


def test_an_answer_that_is_no_text_is_refused() -> None:
    with pytest.raises(Refused, match="the cluster cannot be read"):
        parse_documents(b"a: \xff", "the cluster")


def test_a_line_is_found_for_an_error_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for one line reads the file from its start: once for each object would take hours."""
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"p-{number}"}} for number in range(3)]
    path = written(tmp_path, json.dumps({"apiVersion": "v1", "kind": "List", "items": pods}), "dump.json")
    sought: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(Source, "line", lambda _, *where: sought.append(where))
        documents = read_documents(path, SITE_KINDS)
        assert [document.decoded.metadata.name for document in documents] == ["p-0", "p-1", "p-2"]
        manifests_of(documents)
    assert not sought
    # The content is not kept for that: the file is read again. One that is another by then has no such line.
    text = json.dumps(json.loads(path.read_text()), indent=1)
    path.write_text(text)
    line = text.splitlines().index('    "name": "p-1"') + 1
    assert documents[1].where(("metadata", "name")) == f"{path}:{line}"
    other = written(tmp_path, text, "other.json")
    (first, *_) = read_documents(other, SITE_KINDS)
    other.write_text("{")
    assert first.where(("metadata", "name")) == f"{other}:1"


def test_objects_that_a_command_does_not_read_are_left_out(tmp_path: Path) -> None:
    """A dump has far more pods than nodes and slices, and no claim is allocated by them."""
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "labels": {"zone": "a"}}}
    broken = {"apiVersion": "v1", "kind": "Pod", "metadata": 3}
    nested = {"apiVersion": "v1", "kind": "NodeList", "items": [{"metadata": {"name": "m"}}]}
    path = written(tmp_path, json.dumps({"kind": "List", "items": [node, broken, nested]}), "dump.json")
    assert [(node.metadata.name, dict(node.metadata.labels)) for node in read_manifests([path]).nodes] == [
        ("n", {"zone": "a"}),
        ("m", {}),
    ]


EMPTY_SLICE = """\
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: { name: s }
spec:
  driver: d.example.com
  nodeName: n
  pool: { name: n, generation: 1, resourceSliceCount: 1 }
  devices: null
"""


def test_a_null_field_is_an_absent_one(tmp_path: Path) -> None:
    """Kubernetes 1.34 writes a slice without devices so."""
    (found,) = read_manifests([written(tmp_path, EMPTY_SLICE)]).slices
    assert found.spec.devices == ()
    obj = {name: value for name, value in yaml.safe_load(EMPTY_SLICE).items() if name in ("metadata", "spec")}
    assert [each.spec.devices for each in readable([obj], ResourceSlice)] == [()]
