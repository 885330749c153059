from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackloom.prove.transfer.proof import prove_path, read_counters, traffic_between
from rackloom.prove.transfer.values import DeviceTraffic, TransferOp

MIB = 1 << 20


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


def moved(name: str, sent: int, received: int) -> DeviceTraffic:
    return DeviceTraffic(name, "netdev", sent, received)


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
    assert traffic_between(before, read_counters(tmp_path)) == (moved("eth0", 100, 5),)


@pytest.mark.parametrize(("op", "forward"), [("WRITE", True), ("READ", False)])
def test_the_promised_device_holds_in_the_direction_of_the_data(op: TransferOp, forward: bool) -> None:
    out, back = (MIB + 900, 700) if forward else (700, MIB + 900)
    mine, theirs = (moved("rdma0", out, back),), (moved("rdma0", back, out),)
    proof = prove_path(op, MIB, ["tcp/rdma0"], mine, theirs, "rdma0")
    assert proof.verdict == "holds"
    assert proof.carried_by == ("rdma0",)
    against = prove_path(op, MIB, ["tcp/rdma0"], theirs, mine, "rdma0")
    assert against.verdict == "unknown"


def test_a_swapped_device_is_named_whatever_ucx_says() -> None:
    ends = (moved("rdma1", MIB, 0),), (moved("rdma1", 0, MIB),)
    proof = prove_path("WRITE", MIB, ["tcp/rdma0"], *ends, "rdma0")
    assert proof.verdict == "does not hold"
    assert proof.carried_by == ("rdma1",)
    assert "rdma0 was promised" in proof.evidence


def test_a_second_rail_breaks_the_promise_of_one_device() -> None:
    ends = (moved("rdma0", MIB // 2, 0), moved("rdma1", MIB // 2, 0)), (moved("rdma0", 0, MIB),)
    assert prove_path("WRITE", MIB, ["tcp/rdma0", "tcp/rdma1"], *ends, "rdma0").verdict == "does not hold"


def test_an_hca_may_be_promised_without_its_port() -> None:
    mine, theirs = DeviceTraffic("mlx5_0:1", "rdma", MIB, 0), DeviceTraffic("mlx5_0:1", "rdma", 0, MIB)
    assert prove_path("WRITE", MIB, ["rc_mlx5/mlx5_0:1"], (mine,), (theirs,), "mlx5_0").verdict == "holds"


def test_bytes_that_no_counter_saw_are_unknown_and_not_a_success() -> None:
    assert prove_path("WRITE", MIB, ["rc_mlx5/mlx5_0:1"], (), (), "mlx5_0").verdict == "unknown"
    assert prove_path("WRITE", MIB, [], (), (), None).verdict == "unknown"


def test_bytes_that_left_but_did_not_arrive_by_a_device_are_unknown() -> None:
    proof = prove_path("WRITE", MIB, ["tcp/rdma0"], (moved("rdma0", MIB, 0),), (), "rdma0")
    assert (proof.verdict, proof.carried_by) == ("unknown", ("rdma0",))


def test_one_memory_carries_no_promise_and_cannot_keep_one() -> None:
    assert prove_path("WRITE", MIB, ["cma/memory"], (), (), None).verdict == "no promise"
    broken = prove_path("WRITE", MIB, ["cma/memory"], (), (), "rdma0")
    assert broken.verdict == "does not hold"
    assert "no network device" in broken.evidence


devices = st.lists(
    st.builds(moved, st.sampled_from(["a", "b", "c"]), st.integers(0, 4 * MIB), st.integers(0, 4 * MIB)),
    unique_by=lambda device: device.name,
)


@settings(max_examples=50)
@given(st.sampled_from(["WRITE", "READ"]), st.integers(1, 2 * MIB), devices, devices)
def test_a_promise_never_holds_unless_exactly_that_device_counted_the_payload(
    op: TransferOp, payload: int, mine: list[DeviceTraffic], theirs: list[DeviceTraffic]
) -> None:
    proof = prove_path(op, payload, ["tcp/a"], tuple(mine), tuple(theirs), "a")
    counted = {one.name: one.sent_bytes if op == "WRITE" else one.received_bytes for one in mine}
    if proof.verdict == "holds":
        assert counted["a"] >= 0.95 * payload
        assert all(count < 0.05 * payload for name, count in counted.items() if name != "a")
