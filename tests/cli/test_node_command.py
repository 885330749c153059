"""`rackloom node imex|nic|gpu`: what the flags become."""

from pathlib import Path

import pytest

from rackloom.app.node import gpu as node_gpu
from rackloom.app.node import imex, together
from rackloom.app.node import mps as node_mps
from rackloom.app.node import nic as node_nic
from rackloom.app.node.gpu import GpuOptions
from rackloom.app.node.imex import ImexOptions
from rackloom.app.node.mps import MpsOptions
from rackloom.app.node.process import NodeOptions
from rackloom.claim.node.gpu.inventory import ShareSettings
from rackloom.claim.node.run import PluginDirectories
from rackloom.cli.node import app
from rackloom.errors import Refused
from rackloom.topology.nics import DEFAULT_EXCLUSION_POLICY, ExclusionPolicy


@pytest.fixture
def nic(monkeypatch):
    calls = []
    monkeypatch.setattr(node_nic, "run_nic", lambda _common, options, _announce: calls.append(options))

    def run(*words):
        app(["nic", "--node", "n", *words], result_action="return_value")
        return calls[-1]

    return run


@pytest.fixture
def gpu(monkeypatch):
    calls = []
    monkeypatch.setattr(node_gpu, "run_gpu", lambda _common, options, _announce: calls.append(options))

    def run(*words):
        app(["gpu", "--node", "n", *words], result_action="return_value")
        return calls[-1]

    return run


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        ((), DEFAULT_EXCLUSION_POLICY),
        (("--filter", "true"), ExclusionPolicy(kinds=DEFAULT_EXCLUSION_POLICY.kinds - {"veth", "netkit"})),
        (
            ("--filter", "true", "--leave-out", "bridge"),
            ExclusionPolicy(kinds=frozenset({"bridge"}), names=()),
        ),
        (
            ("--leave-out", "veth", "--leave-out", "tun"),
            ExclusionPolicy(kinds=frozenset({"veth", "tun"}), names=()),
        ),
    ],
)
def test_a_filter_offers_ends_of_pairs_and_what_is_said_takes_the_place_of_the_default(nic, words, left_out):
    assert nic(*words).left_out == left_out


def test_ipoib_interfaces_stay_where_that_is_said(nic):
    assert nic().moves_ipoib
    assert not nic("--no-move-ib-interfaces").moves_ipoib


def test_shares_are_read_before_anything_is_served(gpu):
    assert gpu().shares == ShareSettings()
    assert gpu("--consumable-shares", "4").shares == ShareSettings("shares", 4)
    with pytest.raises(Refused, match="--consumable-shares is 'some'"):
        gpu("--consumable-shares", "some")


@pytest.mark.parametrize("variable", [None, "here", "pod"])
@pytest.mark.parametrize("words", [["gpu"], ["all"]])
def test_mps_daemons_run_here_unless_a_pod_is_said_to_be_there(monkeypatch, words, variable):
    calls = []
    monkeypatch.setattr(node_gpu, "run_gpu", lambda _common, options, _announce: calls.append(options))
    monkeypatch.setattr(together, "run_together", lambda _common, _imex, gpu, *_others: calls.append(gpu))
    if variable is not None:
        monkeypatch.setenv("MPS_DAEMONS", variable)
    app([*words, "--node", "n"], result_action="return_value")
    assert calls[-1].mps_in_pod == (variable == "pod")


def test_the_launcher_of_mps_daemons_is_told_where_plugins_and_the_driver_are(monkeypatch):
    calls = []
    monkeypatch.setattr(node_mps, "run_mps", lambda options, _announce: calls.append(options))
    app(["mps"], result_action="return_value")
    monkeypatch.setenv("KUBELET_PLUGINS_DIRECTORY_PATH", "/k/plugins")
    monkeypatch.setenv("DRIVER_ROOT_CTR_PATH", "/driver")
    app(["mps"], result_action="return_value")
    plain = MpsOptions(plugins=Path("/var/lib/kubelet/plugins"), driver_root=Path("/driver-root"))
    assert calls == [plain, MpsOptions(plugins=Path("/k/plugins"), driver_root=Path("/driver"))]


@pytest.fixture
def heard(monkeypatch):
    """The options that the process of each plugin gets: the common ones, and its own."""
    calls = []
    for module, name in ((imex, "run_imex"), (node_gpu, "run_gpu"), (node_nic, "run_nic")):
        monkeypatch.setattr(module, name, lambda common, options, _announce: calls.append((common, options)))

    def run(*words):
        app(words, result_action="return_value")
        return calls[-1]

    return run


COMMON = {
    "NODE_NAME": "n7",
    "KUBELET_REGISTRAR_DIRECTORY_PATH": "/k/registry",
    "KUBELET_PLUGINS_DIRECTORY_PATH": "/k/plugins",
    "CDI_ROOT": "/k/cdi",
    "HTTP_ENDPOINT": "127.0.0.1:8080",
    "HEALTHCHECK_PORT": "51515",
}
PLACES = PluginDirectories(registry=Path("/k/registry"), plugins=Path("/k/plugins"), cdi=Path("/k/cdi"))


@pytest.mark.parametrize("plugin", ["imex", "gpu", "nic"])
def test_every_plugin_is_told_of_its_node_by_the_same_variables(heard, monkeypatch, plugin):
    for name, value in COMMON.items():
        monkeypatch.setenv(name, value)
    options = NodeOptions(
        node="n7",
        directories=PLACES,
        listen="127.0.0.1:8080",
        health_listen="[::]:51515",
        sysroot=Path("/host"),
    )
    assert heard(plugin, "--sysroot", "/host")[0] == options


@pytest.mark.parametrize("plugin", ["imex", "gpu", "nic"])
def test_a_flag_counts_over_the_variable_and_no_port_is_no_service(heard, monkeypatch, plugin):
    monkeypatch.setenv("HEALTHCHECK_PORT", "51515")
    common, _ = heard(plugin, "--node", "n", "--healthcheck-port", "-1", "--kubeconfig", "/k/config")
    assert (common.node, common.health_listen, common.kubeconfig) == ("n", None, Path("/k/config"))


@pytest.mark.parametrize("plugin", ["imex", "gpu"])
def test_where_the_driver_is_may_be_said_by_variables_alone(heard, monkeypatch, plugin):
    variables = {"DRIVER_ROOT_CTR_PATH": "/d", "NVIDIA_DRIVER_ROOT": "/h", "ALT_PROC_DEVICES_PATH": "/p"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _, options = heard(plugin, "--node", "n")
    assert isinstance(options, ImexOptions | GpuOptions)
    assert [str(options.driver_root), str(options.host_driver_root), str(options.proc_devices)] == [
        "/d",
        "/h",
        "/p",
    ]
