"""A host's files read into evidence."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.prove.collectors.host_files import CONFIG, CONTAINERD, put

from rackloom.core.diagnosis.evidence import CdiSetting
from rackloom.prove.collectors.host import collect_host
from rackloom.topology.discovery.sysfs import MAX_TABLE_BYTES

TCP = """  sl  local_address rem_address   st tx_queue rx_queue
   0: 00000000:C350 00000000:0000 0A 00000000:00000000
   1: 0100007F:C355 0100007F:0016 01 00000000:00000000
"""
TCP6 = """  sl  local_address                         remote_address                        st
   0: 00000000000000000000000000000000:0016 00000000000000000000000000000000:0000 0A 0
"""


def test_nothing_to_read_is_unknown_and_not_well(tmp_path):
    seen = collect_host("n", tmp_path, None)
    assert (seen.driver_version, seen.imex.outside) == (None, None)
    assert seen.cdi_setting is CdiSetting.UNSAID
    assert (seen.imex.enabled, seen.busy_ports) == (None, None)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("sys/module/nvidia/version", "580.95.05\n"),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build  (b@h)\n"
            "GCC version:  gcc version 13.3.0\n",
        ),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\n",
        ),
    ],
)
def test_the_driver_is_the_loaded_module(tmp_path, path, text):
    put(tmp_path, path, text)
    assert collect_host("n", tmp_path, None).driver_version == "580.95.05"


def test_listening_sockets_of_both_families(tmp_path):
    put(tmp_path, "proc/1/net/tcp", TCP)
    put(tmp_path, "proc/1/net/tcp6", TCP6)
    assert collect_host("n", tmp_path, None).busy_ports == {50000, 22}


def test_sockets_that_are_no_table_are_unknown(tmp_path):
    put(tmp_path, "proc/1/net/tcp", "header\n 0: 00000000:ZZZZ 0:0 0A\n")
    assert collect_host("n", tmp_path, None).busy_ports is None


def test_a_table_that_is_too_long_to_be_read_in_full_is_unknown(tmp_path):
    put(tmp_path, "proc/1/net/tcp", TCP)
    with (tmp_path / "proc/1/net/tcp").open("ab") as file:
        file.truncate(MAX_TABLE_BYTES + 1)
    assert collect_host("n", tmp_path, None).busy_ports is None


@pytest.mark.parametrize("path", [CONFIG, "proc/1/net/tcp", "sys/module/nvidia/version"])
def test_a_pipe_is_not_waited_for(tmp_path, path):
    (tmp_path / path).parent.mkdir(parents=True)
    os.mkfifo(tmp_path / path)
    seen = collect_host("n", tmp_path, CONTAINERD)
    assert (seen.busy_ports, seen.driver_version) == (None, None)
    assert seen.cdi_setting is (CdiSetting.UNREADABLE if path == CONFIG else CdiSetting.UNSAID)


FILES = (
    "proc/1/comm",
    "proc/1/cgroup",
    "proc/1/cmdline",
    "proc/1/net/tcp",
    "proc/devices",
    "etc/nvidia-imex/config.cfg",
    "etc/nvidia-imex/nodes_config.cfg",
    CONFIG,
)
BEGINNINGS = (
    "",
    "containerd",
    "nvidia-imex",
    "Character devices:\n",
    "IMEX_NODE_CONFIG_FILE=",
    "imports = ['",
    "-c\0",
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(FILES), st.tuples(st.sampled_from(BEGINNINGS), st.text())))
def test_whatever_files_hold_they_are_read(contents):
    """The files may be a copy of another host, and hostile."""
    with TemporaryDirectory() as folder:
        for path, (beginning, rest) in contents.items():
            file = Path(folder) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes((beginning + rest).encode(errors="surrogatepass"))
        assert collect_host("n", Path(folder), CONTAINERD).here == "n"
