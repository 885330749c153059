"""A named fix works. If no single change helps, none is named."""

from typing import Any

import pytest

from rackloom.core.allocate.allocator import allocate
from rackloom.core.allocate.inputs import DeviceId, InUse
from rackloom.core.allocate.outcome import Allocation, Refusal
from rackloom.core.allocate.planning import AllocationFix, nearest_fix
from rackloom.core.allocate.pools import SliceIndex

ROOTS = [{"name": f"d{n}", "attributes": {"root": {"int": n}, "kind": {"string": "a"}}} for n in range(3)]
HELD = InUse(
    dedicated=frozenset([DeviceId("d.example.com", "p", "d0")]),
    holders={DeviceId("d.example.com", "p", "d0"): ("other",)},
)


def fixed(cluster: Any, devices: list[dict[str, Any]], claim: Any, state: InUse) -> AllocationFix | None:
    index = SliceIndex([cluster.slice(devices)])
    assert isinstance(allocate(cluster.node, cluster.classes, index, [claim], state=state), Refusal)
    fix = nearest_fix(cluster.node, cluster.classes, index, [claim], state=state)
    if fix is not None:
        outcome = allocate(cluster.node, cluster.classes, index, fix.claims, state=fix.state)
        assert isinstance(outcome, Allocation)
    return fix


@pytest.mark.parametrize(
    ("ask", "more", "state", "says"),
    [
        ({"count": 3}, {}, HELD, "free the devices of claim other"),
        ({"count": 4}, {}, InUse(), "ask for 3 in request r of claim c"),
        ({"count": 5}, {}, HELD, "ask for 2 in request r of claim c"),
        (
            {"count": 1, "select": "device.attributes['d.example.com'].kind == 'b'"},
            {},
            InUse(),
            "leave out the selectors in request r of claim c",
        ),
    ],
)
def test_the_smallest_change_that_helps(
    cluster: Any, ask: dict[str, Any], more: dict[str, Any], state: InUse, says: str
) -> None:
    fix = fixed(cluster, ROOTS, cluster.claim(cluster.request(**ask), **more), state)
    assert fix is not None
    assert fix.text == says


def test_a_constraint_that_keeps_two_requests_apart(cluster: Any) -> None:
    match = [{"matchAttribute": "d.example.com/root"}]
    claim = cluster.claim(cluster.request("a"), cluster.request("b"), constraints=match)
    fix = fixed(cluster, ROOTS, claim, InUse())
    assert fix is not None
    assert fix.text == "leave out matchAttribute d.example.com/root of claim c"


def test_a_taint(cluster: Any) -> None:
    devices = [{"name": "d0", "taints": [{"key": "xid", "effect": "NoExecute"}]}]
    fix = fixed(cluster, devices, cluster.claim(cluster.request()), InUse())
    assert fix is not None
    assert fix.text == "tolerate the taint xid:NoExecute in request r of claim c"


def test_no_devices_at_all(cluster: Any) -> None:
    assert fixed(cluster, [], cluster.claim(cluster.request()), InUse()) is None
