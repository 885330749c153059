"""The device that carried the bytes, from counters of both ends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackloom.core.transfer.proof import prove_path
from rackloom.core.transfer.values import DeviceTraffic, TransferOp

MIB = 1 << 20


def moved(name: str, sent: int, received: int) -> DeviceTraffic:
    return DeviceTraffic(name, "netdev", sent, received)


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
    counted = {device.name: device.sent_bytes if op == "WRITE" else device.received_bytes for device in mine}
    if proof.verdict == "holds":
        assert counted["a"] >= 0.95 * payload
        assert all(count < 0.05 * payload for name, count in counted.items() if name != "a")
