"""Whether CDI is on in containerd's configuration."""

import pytest
from tests.prove.collectors.host_files import CONFIG, CONTAINERD, put

from rackloom.core.diagnosis.evidence import CdiSetting
from rackloom.prove.collectors.host import collect_host

ON = "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = true\n"
OFF = ON.replace("true", "false")
ON_IN_2 = "version = 2\n[plugins.'io.containerd.grpc.v1.cri']\nenable_cdi = true\n"
RUNTIME_IN_2 = "[plugins.'io.containerd.grpc.v1.cri'.containerd]\ndefault_runtime_name = 'nvidia'\n"
OWN = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("", CdiSetting.UNSAID),
        ("version = 2\n", CdiSetting.UNSAID),
        ("version = 3\n", CdiSetting.ON),
        ("[plugins.cri]\nenable_cdi = true\n", CdiSetting.ON),
        ("version = 1\n[plugins.cri]\nenable_cdi = true\n", CdiSetting.ON),
        ("version = 2\n[plugins.'io.containerd.grpc.v1.cri']\nenable_cdi = true\n", CdiSetting.ON),
        ("version = 2\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = true\n", CdiSetting.UNSAID),
        ("version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = false\n", CdiSetting.OFF),
        ("version = 4\n", CdiSetting.UNREADABLE),
        ("no toml [", CdiSetting.UNREADABLE),
    ],
)
def test_cdi_is_what_containerd_is_configured_to(tmp_path, text, setting):
    put(tmp_path, CONFIG, text)
    assert collect_host("n", tmp_path, "containerd://1.7.0").cdi_setting is setting


@pytest.mark.parametrize(
    ("own", "imported", "setting"),
    [
        ("imports = ['/etc/containerd/conf.d/*.toml']\n", ON, CdiSetting.ON),
        ("imports = ['/etc/*/conf.d/*.toml']\n" + ON, ON, CdiSetting.UNREADABLE),
        ("imports = ['conf.d/*.toml']\n" + ON_IN_2, "version = 2\n", CdiSetting.ON),
        ("imports = ['conf.d/*.toml']\n" + ON_IN_2, RUNTIME_IN_2, CdiSetting.UNSAID),
        ("imports = ['conf.d/*.toml']\n" + ON_IN_2, "version = 2\n" + RUNTIME_IN_2, CdiSetting.UNSAID),
        ("imports = ['conf.d/9?-*.toml']\n", ON, CdiSetting.ON),
        ("version = 3\nimports = ['conf.d/*.toml']\n", "", CdiSetting.ON),
        ("version = 3\nimports = ['conf.d/*.toml']\n", OFF, CdiSetting.OFF),
        ("imports = ['conf.d/*.toml']\n" + ON, OFF, CdiSetting.OFF),
        ("imports = ['elsewhere/*.toml']\n" + ON, OFF, CdiSetting.ON),
        ("imports = ['*.toml', 'conf.d/*.toml']\n", ON, CdiSetting.ON),
        ("imports = ['conf.d/*.toml']\n" + ON, "no toml [", CdiSetting.UNREADABLE),
    ],
)
def test_what_containerd_imports_counts_over_its_own_file(tmp_path, own, imported, setting):
    put(tmp_path, CONFIG, own)
    put(tmp_path, "etc/containerd/conf.d/99-nvidia.toml", imported)
    assert collect_host("n", tmp_path, CONTAINERD).cdi_setting is setting


@pytest.mark.parametrize(
    ("files", "setting"), [(60, CdiSetting.ON), (70, CdiSetting.UNREADABLE)], ids=["all read", "too many"]
)
def test_no_file_that_is_imported_is_left_out(tmp_path, files, setting):
    put(tmp_path, CONFIG, "imports = ['conf.d/*.toml']\n" + ON)
    for number in range(files):
        put(tmp_path, f"etc/containerd/conf.d/{number:02}.toml", "version = 3\n")
    assert collect_host("n", tmp_path, CONTAINERD).cdi_setting is setting


@pytest.mark.parametrize(
    ("text", "others", "setting"),
    [
        (".".join("a" * 101) + " = 1\n", 0, CdiSetting.UNSAID),
        (".".join("a" * 102) + " = 1\n", 0, CdiSetting.UNREADABLE),
        (".".join(["a", "'\u2028'"] * 60) + " = 1\n", 0, CdiSetting.UNREADABLE),
        ("# " + "x" * 1024 * 1024 + "\n", 0, CdiSetting.UNREADABLE),
        ("imports = ['conf.d/*.toml']\n", 3, CdiSetting.UNSAID),
        ("imports = ['conf.d/*.toml']\n", 5, CdiSetting.UNREADABLE),
    ],
    ids=["many dots", "more dots", "dots between odd spaces", "long", "long together", "longer together"],
)
def test_what_takes_long_to_be_read_is_not_read(tmp_path, text, others, setting):
    put(tmp_path, CONFIG, text)
    for number in range(others):
        put(tmp_path, f"etc/containerd/conf.d/{number}.toml", "# " + "x" * 256 * 1024 + "\n")
    assert collect_host("n", tmp_path, CONTAINERD).cdi_setting is setting


@pytest.mark.parametrize(
    ("runtime", "processes", "setting"),
    [
        (None, [], CdiSetting.UNSAID),
        (None, ["crio"], CdiSetting.UNSAID),
        (None, ["crio", "containerd"], CdiSetting.UNSAID),
        (None, ["containerd"], CdiSetting.OFF),
        (CONTAINERD, [], CdiSetting.OFF),
    ],
)
def test_the_file_counts_where_containerd_is_known_to_run(tmp_path, runtime, processes, setting):
    put(tmp_path, CONFIG, OFF)
    for pid, name in enumerate(processes, 70):
        put(tmp_path, f"proc/{pid}/comm", f"{name}\n")
    assert collect_host("n", tmp_path, runtime).cdi_setting is setting


@pytest.mark.parametrize(
    "text",
    [
        "plugins = 'x'\n",
        "version = 3\n[plugins]\n'io.containerd.cri.v1.runtime' = 7\n",
        "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = 'false'\n",
        "imports = 'x'\n",
        "a = " + "[" * 5000 + "]" * 5000,
        "a = " + "9" * 5000,
        f"imports = {['conf.d/*.toml'] * 65}\n",
    ],
)
def test_a_configuration_that_is_none_of_containerds_is_not_understood(tmp_path, text):
    put(tmp_path, CONFIG, text)
    assert collect_host("n", tmp_path, CONTAINERD).cdi_setting is CdiSetting.UNREADABLE


@pytest.mark.parametrize("version", ["'3'", "[3]", "0x10", "3.0"])
def test_a_version_that_is_not_known_is_not_understood(tmp_path, version):
    put(tmp_path, CONFIG, f"version = {version}\n")
    assert collect_host("n", tmp_path, CONTAINERD).cdi_setting is CdiSetting.UNREADABLE


@pytest.mark.parametrize(
    ("commands", "setting"),
    [
        ({"70": ["containerd", "-c", OWN]}, CdiSetting.OFF),
        ({"70": ["/usr/bin/containerd", f"--config={OWN}", "-l", "info"]}, CdiSetting.OFF),
        ({"70": ["containerd"]}, CdiSetting.ON),
        ({"70": ["containerd"], "90": ["containerd", "--config", OWN]}, CdiSetting.UNREADABLE),
        ({"70": ["containerd", "-c", OWN], "90": ["containerd", "--config", OWN]}, CdiSetting.OFF),
        ({}, CdiSetting.ON),
    ],
)
def test_the_configuration_is_the_one_that_containerd_was_started_with(tmp_path, commands, setting):
    """With several it is not known which one kubelet uses."""
    put(tmp_path, CONFIG, ON)
    put(tmp_path, OWN.lstrip("/"), OFF)
    for pid, words in commands.items():
        put(tmp_path, f"proc/{pid}/comm", "containerd\n")
        put(tmp_path, f"proc/{pid}/cmdline", "\0".join(words) + "\0")
    assert collect_host("n", tmp_path, CONTAINERD).cdi_setting is setting
