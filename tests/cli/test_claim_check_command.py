"""`rackloom claim check`: transcripts, exit codes, and the line of the field that is a trap."""

import json
from pathlib import Path

import pytest
import yaml
from cyclopts import App
from inline_snapshot import external_file

from rackloom.cli.claim import check
from rackloom.errors import Refused

EXAMPLE = Path(__file__).parents[2] / "examples" / "nixl-kv-transfer"
H100 = ["--profile", "azure-nd96isr-h100-v5"]
TRAPS = """\
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: nics}
spec:
  selectors:
    - cel: {expression: 'device.attributes["dra.net"].rdma == true'}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: pairs}
spec:
  spec:
    devices:
      requests:
        - name: gpu
          exactly:
            deviceClassName: gpu.nvidia.com
            count: 4
            selectors:
              - cel: {expression: 'device.attributes["resource.kubernetes.io"].pciBusID != "0001:00:00.0"'}
        - name: nic
          exactly:
            deviceClassName: dranet.net
            count: 4
            selectors:
              - cel: {expression: 'device.attributes["dra.net"].rdma == true'}
      constraints:
        - matchAttribute: resource.kubernetes.io/pcieRoot
---
apiVersion: resource.k8s.io/v1beta1
kind: ResourceClaim
metadata: {name: flat}
spec:
  devices:
    requests:
      - name: nic
        deviceClassName: dra.nett
"""


@pytest.fixture
def ran(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traps.yaml").write_text(TRAPS)
    app = App(result_action="return_value")
    app.default(check)

    def run(*words):
        code = app([str(word) for word in words])
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize("profile", ["aws-p6-b200.48xlarge-b200x8-efa", "azure-nd96isr-h100-v5", None])
def test_transcripts(ran, profile):
    code, printed = ran("traps.yaml", *(["--profile", profile] if profile else []))
    assert code == 1
    assert printed == external_file(f"transcripts/claim-check-{profile or 'nowhere'}.txt")


@pytest.mark.parametrize("where", [H100, []])
def test_the_example_has_no_traps_on_its_machine_nor_in_general(ran, where):
    assert ran(*sorted(EXAMPLE.glob("*.yaml")), *where) == (0, "no traps found\n")


def test_the_example_elsewhere(ran):
    code, printed = ran(*sorted(EXAMPLE.glob("*.yaml")), "--profile", "oci-bm.gpu.gb200-v3.4", "-o", "json")
    findings = json.loads(printed)
    assert code == 1
    assert [finding["trap"] for finding in findings] == ["id-of-another-machine"] * 2
    assert [Path(finding["where"]).name for finding in findings] == [
        "resource-claim-template-aligned.yaml:15",
        "resource-claim-template-unaligned.yaml:15",
    ]


def test_yaml_is_the_same_as_json(ran):
    assert yaml.safe_load(ran("traps.yaml", "-o", "yaml")[1]) == json.loads(
        ran("traps.yaml", "-o", "json")[1]
    )


def test_the_lines_are_those_of_the_fields(ran):
    lines = TRAPS.splitlines()
    for load in json.loads(ran("traps.yaml", *H100, "-o", "json")[1]):
        number = int(load["where"].rpartition(":")[2])
        field = load["path"].rpartition(".")[2].partition("[")[0]
        assert field in lines[number - 1]


def test_slices_among_the_files_count(ran, tmp_path):
    slices = tmp_path / "slices.yaml"
    slices.write_text(
        """\
apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: s}
spec:
  driver: gpu.nvidia.com
  nodeName: worker
  pool: {name: worker, generation: 1, resourceSliceCount: 1}
  devices: [{name: gpu-0, attributes: {type: {string: gpu}}}]
"""
    )
    claim = tmp_path / "claim.yaml"
    claim.write_text(
        """\
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: two}
spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com, count: 2}}]}}
"""
    )
    assert ran(claim)[0] == 0
    code, printed = ran(claim, "--slices", slices)
    assert (code, printed.split()[1]) == (1, "count:")
    assert ran(claim, slices)[0] == 1


def test_nothing_to_check_is_refused(ran, tmp_path):
    (tmp_path / "pod.yaml").write_text("apiVersion: v1\nkind: Pod\nmetadata: {name: p}\n")
    with pytest.raises(Refused, match="nothing to check"):
        ran("pod.yaml")
