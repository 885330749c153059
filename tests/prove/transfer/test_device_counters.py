"""Byte counters from trees laid out like the kernel's."""

from pathlib import Path

from rackloom.core.transfer.proof import traffic_between
from rackloom.core.transfer.values import DeviceTraffic
from rackloom.prove.transfer.devices import read_counters


def netdev(root: Path, name: str, sent: int, received: int) -> None:
    statistics = root / "class/net" / name / "statistics"
    statistics.mkdir(parents=True, exist_ok=True)
    (statistics / "tx_bytes").write_text(f"{sent}\n")
    (statistics / "rx_bytes").write_text(f"{received}\n")


def hca(root: Path, name: str, port: int, sent_words: int, received_words: int) -> None:
    counters = root / "class/infiniband" / name / "ports" / str(port) / "counters"
    counters.mkdir(parents=True, exist_ok=True)
    (counters / "port_xmit_data").write_text(f"{sent_words}\n")
    (counters / "port_rcv_data").write_text(f"{received_words}\n")


def test_counters_of_both_kinds_are_read_and_rdma_words_become_bytes(tmp_path: Path) -> None:
    netdev(tmp_path, "eth0", 10, 20)
    hca(tmp_path, "mlx5_0", 1, 100, 200)
    assert read_counters(tmp_path) == {("netdev", "eth0"): (10, 20), ("rdma", "mlx5_0:1"): (400, 800)}


def test_unreadable_counters_and_absent_classes_are_left_out(tmp_path: Path) -> None:
    assert read_counters(tmp_path) == {}
    (tmp_path / "class/net/bonding_masters").mkdir(parents=True)
    netdev(tmp_path, "eth0", 1, 1)
    (tmp_path / "class/net/eth0/statistics/tx_bytes").write_text("-\n")
    assert read_counters(tmp_path) == {}


def test_traffic_is_the_difference_of_devices_that_stayed(tmp_path: Path) -> None:
    netdev(tmp_path, "eth0", 10, 20)
    netdev(tmp_path, "idle0", 5, 5)
    before = read_counters(tmp_path)
    netdev(tmp_path, "eth0", 110, 25)
    netdev(tmp_path, "late0", 1 << 40, 0)
    assert traffic_between(before, read_counters(tmp_path)) == (DeviceTraffic("eth0", "netdev", 100, 5),)
