"""`rackloom claim`: the example claims on the machine of the example, and a refusal with its reason."""

import json
from pathlib import Path

import pytest

from rackloom.cli.claim import app
from rackloom.errors import Refused

EXAMPLE = Path(__file__).parents[2] / "examples" / "nixl-kv-transfer"
ALIGNED = str(EXAMPLE / "resource-claim-template-aligned.yaml")
UNALIGNED = str(EXAMPLE / "resource-claim-template-unaligned.yaml")
ON = ["--profile", "azure-nd96isr-h100-v5"]


def ran(*words: str) -> object:
    return app(list(words), result_action="return_value")


def test_both_claims_on_two_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("allocate", "-f", ALIGNED, UNALIGNED, *ON, "--nodes", "2") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    nics = {row[0]: [] for row in rows[1:]}  # type: ignore[var-annotated]
    for row in rows[1:]:
        nics[row[0]] += [word.removeprefix("rdmaDevice=") for word in row if word.startswith("rdma")]
    assert nics["h100-4gpu-4nic-numa-aligned"] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert nics["h100-4gpu-4nic-numa-unaligned"] == ["mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7"]
    assert {row[1] for row in rows[1:]} == {"node-0", "node-1"}


def test_a_refusal_names_the_holder_and_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("allocate", "-f", ALIGNED, "-f", UNALIGNED, *ON) == 1
    out = capsys.readouterr().out
    assert "h100-4gpu-4nic-numa-unaligned is refused" in out
    assert "in use: h100-4gpu-4nic-numa-aligned" in out


def test_json_is_the_allocation_of_the_api(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("allocate", "-f", ALIGNED, *ON, "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)[0]
    assert answer["outcome"] == "placed"
    assert answer["allocation"]["devices"]["results"][0] == {
        "request": "gpu",
        "driver": "gpu.nvidia.com",
        "pool": "node-0",
        "device": "gpu-0",
    }


def test_explain_accounts_for_every_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("explain", "-f", ALIGNED, *ON, "-o", "json") == 0
    for account in json.loads(capsys.readouterr().out)[0]["requests"]:
        gone = sum(len(removal["devices"]) for removal in account["removed"])
        assert gone + len(account["left"]) == account["devices"] == 16


def test_explain_in_words_exits_1_where_the_claim_cannot_be_met(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("explain", "-f", ALIGNED, "--profile", "oci-bm.gpu.gb200-v3.4") == 1
    assert "cannot be met: h100-4gpu-4nic-numa-aligned/gpu" in capsys.readouterr().out


def test_slices_of_a_cluster_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
  devices: [{name: gpu-7, attributes: {productName: {string: H100}}}]
"""
    )
    claim = tmp_path / "claim.yaml"
    claim.write_text(
        """\
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: one}
spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]}}
"""
    )
    assert ran("allocate", "-f", str(claim), "--slices", str(slices)) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:5] == [
        "one",
        "worker",
        "gpu",
        "gpu.nvidia.com",
        "gpu-7",
    ]


@pytest.mark.parametrize("words", [["-f", ALIGNED], ["-f", str(EXAMPLE / "device-classes.yaml"), *ON]])
def test_nothing_to_work_on_is_refused_with_a_fix(words: list[str]) -> None:
    with pytest.raises(Refused) as refused:
        ran("allocate", *words)
    assert refused.value.nearest_fix


def test_mode_best_says_what_the_answer_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "aligned.yaml").write_text(Path(ALIGNED).read_text())
    assert ran("allocate", "-f", str(tmp_path), *ON, "--mode", "best", "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)[0]
    assert answer["optimality"]["proved"] is True
    assert answer["optimality"]["cost"]["alternatives"] == 0
    assert ran("allocate", "-f", str(tmp_path), *ON, "--mode", "best") == 0
    assert "(proved best)" in capsys.readouterr().out
