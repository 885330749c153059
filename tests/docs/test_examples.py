"""The programs accept the configurations and files that pages show."""

import re

import pytest
import yaml
from tests.docs.markdown import fenced

from rackloom.app.config import load_config
from rackloom.claim.node.fabric import read_declared_fabric as read_fabric
from rackloom.claim.node.gpu.inventory import DeclaredGpus
from rackloom.claim.node.nic.config import read_profiles, read_stated_attributes
from rackloom.core.cluster.device_configs import decode_gpu_config
from rackloom.core.domains.network_config import decode_network_config
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.server import FakeKube
from rackloom.topology.discovery.discover import read_declaration


@pytest.fixture
def written(tmp_path):
    def write(text):
        (tmp_path / "example").write_text(text)
        return tmp_path / "example"

    return write


def test_the_configuration_of_the_first_day_only_looks(written):
    (text,) = fenced("docs/operating.md", "toml")
    nvlink = load_config(
        written("\n".join(line.removeprefix("   ") for line in text.splitlines()))
    ).nvlink_config
    assert (nvlink.enabled, nvlink.domain_discovery_enabled) == (False, True)


def test_a_declaration_of_a_machine():
    (text,) = fenced("docs/topology.md", "json")
    assert read_declaration(text.encode(), "docs/topology.md").nics["mlx5_8"].excluded == "storage"


def test_an_inventory_of_gpus(written):
    (text,) = fenced("docs/gpus.md", "json")
    (gpu,) = DeclaredGpus(written(text)).read().gpus
    assert gpu.minor == 0


def test_a_configuration_of_gpus():
    *_, text = fenced("docs/gpus.md", "yaml")
    (config,) = yaml.safe_load(text)["config"]
    assert decode_gpu_config(config["opaque"]["parameters"])


def test_the_fabric_of_a_node(written):
    (text,) = fenced("docs/compute-domains.md", "json")
    (gpu,) = read_fabric(written(text)).gpus
    assert gpu.clique_id == 1


def test_what_an_operator_says_of_nics(written):
    claim, attributes, profiles = fenced("docs/nics.md", "yaml")
    (config,) = yaml.safe_load(claim)["spec"]["spec"]["devices"]["config"]
    assert decode_network_config(config["opaque"]["parameters"]).interface.mtu == 9000
    assert read_stated_attributes(written(attributes))
    assert set(read_profiles(written(profiles)).known) == {"rail"}


def test_what_python_is_told_to_import_for_claims_is_there():
    (text,) = fenced("docs/claims.md", "python")
    compile(text, "docs/claims.md", "exec")
    exec("".join(re.findall(r"^from .*\n", text, re.MULTILINE)), {})  # noqa: S102 - our own page


def test_what_is_told_of_the_fake_api_server():
    (text,) = fenced("docs/testing.md", "python")
    known = {value.__name__: value for value in (FakeKube, DirectApi, RequestFault)}
    exec(text, known | {"webhook": None})  # noqa: S102 - our own page
