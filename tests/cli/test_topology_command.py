import json
from pathlib import Path

import pytest
import yaml
from inline_snapshot import external_file, snapshot

from rackloom.cli.main import app
from rackloom.errors import Refused
from rackloom.lab.nodes.host_files import host_files, write_sysroot
from rackloom.topology.profiles import load_machine, load_profile, profile_names


@pytest.fixture
def rackloom(capsys):
    def run(*arguments):
        app(["topology", *arguments])
        return capsys.readouterr().out

    return run


def refusal(*arguments):
    with pytest.raises(Refused) as refused:
        app(["topology", *arguments])
    return refused.value


def test_list(rackloom):
    assert rackloom("list") == external_file("transcripts/topology-list.txt")


@pytest.mark.parametrize(
    "name", ["oci-bm.gpu.gb200-v3.4", "aws-p6-b200.48xlarge-b200x8-efa", "gb200-nvl36x2"]
)
def test_show(rackloom, name):
    assert rackloom("show", name) == external_file(f"transcripts/topology-show-{name}.txt")


@pytest.mark.parametrize(
    "name",
    [
        "alibaba-ecs.gn8is-2x.8xlarge",
        "aws-p5.48xlarge-h100x8-efa32",
        "aws-p6-b200.48xlarge-b200x8-efa",
        "azure-nd96isr-h100-v5",
        "gb200-nvl72",
    ],
)
def test_classes(rackloom, name):
    assert rackloom("classes", name) == external_file(f"transcripts/topology-classes-{name}.txt")


def test_the_page_on_topology_shows_what_is_printed(rackloom):
    page = Path(__file__).parents[2] / "docs" / "topology.md"
    assert rackloom("classes", "azure-nd96asr-a100-v4") in page.read_text()


def test_classes_as_the_guest_sees_them(rackloom):
    assert rackloom("classes", "azure-nd96isr-h100-v5", "--guest") == snapshot("""\
azure-nd96isr-h100-v5: GPU x NIC, as its own kernel shows it

GPU  NIC 0-3     NIC 4-7
0    NODE/sysfs  SYS/sysfs
1    NODE/sysfs  SYS/sysfs
2    NODE/sysfs  SYS/sysfs
3    NODE/sysfs  SYS/sysfs
4    SYS/sysfs   NODE/sysfs
5    SYS/sysfs   NODE/sysfs
6    SYS/sysfs   NODE/sysfs
7    SYS/sysfs   NODE/sysfs
""")


def test_classes_for_programs(rackloom):
    printed = json.loads(rackloom("classes", "aws-p6-b200.48xlarge-b200x8-efa", "-o", "json"))
    assert printed["machine"] == "aws-p6-b200.48xlarge-b200x8-efa"
    assert printed["rows"][4][6] == {
        "gpu": 4,
        "nic": 6,
        "class": "PIX",
        "source": "sysfs",
        "reason": "common bridge 0000:67:00.0",
    }
    assert printed["excluded"] == [
        {"nic": 6, "reason": "carries NVLink management"},
        {"nic": 7, "reason": "carries NVLink management"},
    ]


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_shows_the_same_in_json_and_yaml(rackloom, name):
    printed = json.loads(rackloom("show", name, "-o", "json"))
    assert printed["name"] == name
    assert yaml.safe_load(rackloom("show", name, "--output", "yaml")) == printed


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_has_a_table(rackloom, name):
    assert load_profile(name).note in rackloom("show", name)


def test_a_saved_machine_is_read_back(rackloom, tmp_path):
    saved = tmp_path / "machine.json"
    saved.write_text(rackloom("show", "azure-nd96isr-h100-v5", "-o", "json"))
    assert rackloom("classes", str(saved)) == rackloom("classes", "azure-nd96isr-h100-v5")


def test_a_rack_without_a_published_tray_says_so():
    refused = refusal("classes", "vera-rubin-nvl72")
    assert refused.reason == snapshot(
        "no machine like a tray of vera-rubin-nvl72 is published, so its classes are not known"
    )
    assert refused.nearest_fix is None


def test_an_unknown_profile_names_the_closest():
    refused = refusal("show", "gb200-nvl7")
    assert refused.reason == snapshot("no machine or rack profile is called 'gb200-nvl7'")
    assert refused.nearest_fix == snapshot("use gb200-nvl72 or gb300-nvl72 or gb200-nvl36x2")


@pytest.mark.parametrize("text", [None, "{", '{"name": 3}'])
def test_a_file_that_is_no_machine_is_refused(text, tmp_path):
    broken = tmp_path / "broken.json"
    if text is not None:
        broken.write_text(text)
    refused = refusal("show", str(broken))
    assert refused.reason.startswith(f"{broken} is not a saved machine: ")
    assert refused.nearest_fix == "name a file that `rackloom topology show -o json` wrote for a machine"


def test_discover_reads_a_copied_host(rackloom, tmp_path):
    copied = host_files(load_machine("azure-nd96isr-h100-v5"))
    write_sysroot(copied, tmp_path / "root")
    (tmp_path / "topo.xml").write_text(copied.nccl_topology or "")
    host = ("--sysroot", str(tmp_path / "root"))
    assert rackloom("discover", *host, "--nccl-topology", str(tmp_path / "topo.xml")) == external_file(
        "transcripts/topology-discover.txt"
    )
    (tmp_path / "saved.json").write_text(rackloom("discover", *host, "-o", "json"))
    assert "azure-nd96isr-h100-v5" in rackloom("show", str(tmp_path / "saved.json"))


def test_discover_says_what_is_wrong_with_its_input(tmp_path):
    assert "no sys directory" in str(refusal("discover", "--sysroot", str(tmp_path)))
    (tmp_path / "declared.json").write_text('{"nics": {"mlx5_77": {"excluded": "storage"}}}')
    message = refusal("discover", "--declared", str(tmp_path / "declared.json"))
    assert "mlx5_77, which this machine does not have" in str(message)
