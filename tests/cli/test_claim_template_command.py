"""`rackloom claim template`: transcripts, the way into `claim allocate` and `claim check`, refusals."""

import json
from pathlib import Path

import pytest
import yaml
from cyclopts import App
from inline_snapshot import external_file

from rackloom.cli.claim import app as claim_app
from rackloom.cli.claim import check, template
from rackloom.core.allocate.driver_slices import slices_of
from rackloom.errors import Refused
from rackloom.topology import profiles

EXAMPLE = Path(__file__).parents[2] / "examples" / "nixl-kv-transfer"
H100 = ["--profile", "azure-nd96isr-h100-v5"]
FOUR = ["--gpus", "4", "--nics", "4"]


@pytest.fixture
def ran(capsys):
    app = App(result_action="return_value")
    app.command(template)
    app.command(check)

    def run(*words):
        code = app([str(word) for word in words])
        return code or 0, capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("h100-numa", "--gpus 4 --nics 4 --align numa --profile azure-nd96isr-h100-v5"),
        (
            "p6-b200-pcie-pairs",
            "--gpus 2 --nics 2 --align pcie --pairs --profile aws-p6-b200.48xlarge-b200x8-efa",
        ),
        (
            "p4d-units",
            "--gpus 4 --nics 2 --align pcie --pairs --profile aws-p4d.24xlarge-a100x8-dranet-slices",
        ),
        (
            "gb200-rail-pairs",
            "--gpus 2 --nics 2 --align rail --pairs --rail 2 4 --profile gb200-nvl72 --name prefill",
        ),
    ],
)
def test_transcripts(ran, title, words):
    code, printed = ran("template", *words.split())
    assert code == 0
    assert printed == external_file(f"transcripts/claim-template-{title}.txt")


@pytest.mark.parametrize(("arm", "more"), [("aligned", []), ("unaligned", ["--unaligned"])])
def test_the_claim_is_worth_that_of_the_example(ran, tmp_path, capsys, arm, more):
    made = tmp_path / "made.yaml"
    made.write_text(ran("template", *FOUR, "--align", "numa", *more, *H100)[1])
    hand = EXAMPLE / f"resource-claim-template-{arm}.yaml"
    given = []
    for path in (hand, made):
        claim_app(["allocate", "-f", str(path), *H100, "-o", "json"], result_action="return_value")
        results = json.loads(capsys.readouterr().out)[0]["allocation"]["devices"]["results"]
        given.append([(result["request"], result["device"]) for result in results])
    assert given[0] == given[1]


def test_what_is_printed_passes_the_check(ran, tmp_path):
    made = tmp_path / "made.yaml"
    made.write_text(ran("template", *FOUR, "--align", "pcie", "--pairs", *H100)[1])
    assert ran("check", made, *H100) == (0, "no traps found\n")
    assert ran("check", made) == (0, "no traps found\n")


def test_json_and_yaml_are_the_same_object(ran):
    words = ["template", *FOUR, "--align", "rail", "--name", "rails", *H100]
    assert yaml.safe_load(ran(*words)[1]) == json.loads(ran(*words, "-o", "json")[1])


def test_slices_of_a_cluster(ran, tmp_path):
    machine = profiles.load_machine("azure-nd96isr-h100-v5")
    path = tmp_path / "slices.yaml"
    path.write_text(_dump(slices_of(machine, "worker-1")))
    words = ["template", *FOUR, "--align", "numa", "--slices", path]
    with pytest.raises(Refused) as refused:
        ran(*words)
    assert refused.value.nearest_fix == "add --profile azure-nd96isr-h100-v5"
    code, printed = ran(*words, *H100)
    assert code == 0
    assert "for worker-1 (azure-nd96isr-h100-v5)" in printed
    assert "1 of 1 nodes" in printed


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ([*FOUR, "--align", "numa"], "--profile"),
        ([*FOUR, "--align", "numa", "--profile", "azure-nd128isr-gb300-v6"], "--pairs"),
        ([*FOUR, "--align", "pcie", *H100], "--pairs"),
    ],
)
def test_refusals_name_the_nearest_fix(ran, words, fix):
    with pytest.raises(Refused) as refused:
        ran("template", *words)
    assert fix in refused.value.nearest_fix


def test_where_nothing_helps_the_refusal_says_so(ran):
    with pytest.raises(Refused) as refused:
        ran("template", *FOUR, "--align", "numa", "--profile", "oci-bm.gpu.h100.8")
    assert refused.value.nearest_fix is None
    assert "neither fewer devices nor another alignment helps" in refused.value.reason


def test_a_rack_without_a_published_tray_is_refused(ran):
    with pytest.raises(Refused, match="no machine like a tray"):
        ran("template", *FOUR, "--align", "numa", "--profile", "vera-rubin-nvl72")


def _dump(slices):
    import msgspec

    return yaml.safe_dump_all(
        {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", **msgspec.to_builtins(slice_)}
        for slice_ in slices
    )


def test_a_live_cluster_is_asked_through_kubectl(ran, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match="kubectl is not on the PATH"):
        ran("template", *FOUR, "--align", "numa", "--cluster")
