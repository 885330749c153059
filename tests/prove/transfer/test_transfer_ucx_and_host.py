import time
from pathlib import Path

import pytest

from rackloom.core.transfer.proof import contention_reason
from rackloom.core.transfer.values import EndUsage, UcxPins
from rackloom.prove.transfer.agent import ucx_complaint, ucx_environment, ucx_protocols
from rackloom.prove.transfer.endpoints import UsageMeter

PREFIX = "[1795248427.762856] [vm:5939 :0]   "


def table(scope: str, operation: str, config: str) -> str:
    rows = [
        "+--------+-------------+-----------+",
        f"| initiator {scope} cfg#1 |",
        f"| remote memory {operation}* from host memory to host |",
        "| Range  | Description |  Config   |",
        f"| 0..inf | zero-copy   | {config}  |",
        "+--------+-------------+-----------+",
    ]
    return "\n".join(PREFIX + row for row in rows) + "\n"


def test_the_peer_table_of_the_operation_is_read_and_the_loopback_one_is_not() -> None:
    log = (
        table("self", "write by ucp_put", "tcp/lo")
        + table("inter-node", "write by ucp_put", "tcp/rdma0")
        + table("inter-node", "read by ucp_get", "tcp/rdma1")
    )
    assert ucx_protocols(log, "WRITE") == ("tcp/rdma0",)
    assert ucx_protocols(log, "READ") == ("tcp/rdma1",)


def test_a_silent_second_rail_is_seen() -> None:
    log = table("intra-node", "write by ucp_put", "52% on tcp/lo and 48% on tcp/eth0")
    assert ucx_protocols(log, "WRITE") == ("tcp/lo", "tcp/eth0")


def test_an_hca_with_its_port_is_read() -> None:
    assert ucx_protocols(table("inter-node", "write by ucp_put", "rc_mlx5/mlx5_0:1/path0"), "WRITE") == (
        "rc_mlx5/mlx5_0:1",
    )


def test_a_log_without_the_operation_says_nothing() -> None:
    assert ucx_protocols("", "WRITE") == ()
    assert ucx_protocols(table("inter-node", "read by ucp_get", "tcp/rdma1"), "WRITE") == ()


def test_the_last_complaint_is_kept() -> None:
    log = (
        "x.c:1 UCX  WARN  network device 'lo:1' is not available\nx.c:2 UCX  ERROR connect failed: no\nfine\n"
    )
    assert ucx_complaint(log) == "connect failed: no"
    assert ucx_complaint("nothing of note") is None


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        (UcxPins(), {"UCX_MAX_RMA_RAILS": "1"}),
        (
            UcxPins(("tcp",), ("rdma0",)),
            {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "rdma0", "UCX_MAX_RMA_RAILS": "1"},
        ),
        (UcxPins((), ("a:1", "b:1", "c:1")), {"UCX_NET_DEVICES": "a:1,b:1,c:1", "UCX_MAX_RMA_RAILS": "2"}),
    ],
)
def test_pins_become_variables_and_one_device_gets_one_rail(pins: UcxPins, expected: dict[str, str]) -> None:
    variables = ucx_environment(pins, Path("/x/ucx.log"))
    pinning = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_MAX_RMA_RAILS")
    pinned = {name: variables[name] for name in pinning if name in variables}

    assert pinned == expected


@pytest.mark.parametrize(
    ("initiator", "target", "flag"),
    [(9.9, 9.8, None), (9.9, 12.0, None), (6.5, 9.9, "initiator got 65%"), (9.0, 2.0, "target got 20%")],
)
def test_an_end_that_was_pushed_off_its_processor_is_named(
    initiator: float, target: float, flag: str | None
) -> None:
    verdict = contention_reason(EndUsage(10.0, initiator, 0, 0), EndUsage(10.0, target, 0, 0))
    assert (verdict is None) == (flag is None)
    assert verdict is None or flag is None or flag in verdict


def test_a_meter_counts_only_what_comes_after_its_start() -> None:
    counted = UsageMeter().stop()
    assert 0 <= counted.cpu_seconds <= time.process_time()
    assert counted.wall_seconds >= 0
