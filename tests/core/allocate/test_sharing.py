"""Slices that share their equal parts are equal to those that were read."""

import msgspec

from rackloom.core.allocate.objects import ResourceSlice
from rackloom.core.allocate.sharing import SharedParts


def slice_of(number: int, memory: object = "80Gi") -> ResourceSlice:
    device = {
        "name": "gpu-0",
        "attributes": {"uuid": {"string": f"GPU-{number}"}, "model": {"string": "H200"}, "numa": {"int": 1}},
        "capacity": {"memory": {"value": memory}, "cores": {"value": "132"}},
        "taints": [{"key": "t", "effect": "NoSchedule"}],
        "consumesCounters": [{"counterSet": "x", "counters": {"m": {"value": "2"}}}],
    }
    counters = [{"name": "x", "counters": {"m": {"value": "7"}}}]
    pool = {"name": f"n{number}", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "d", "nodeName": f"n{number}", "pool": pool, "devices": [device]}
    written = {"metadata": {"name": f"s{number}"}, "spec": {**spec, "sharedCounters": counters}}
    return msgspec.json.decode(msgspec.json.encode(written), type=ResourceSlice)


def test_a_shared_slice_is_equal_and_keeps_the_order_of_its_fields() -> None:
    parts = SharedParts()
    for number in range(3):
        given = slice_of(number)
        shared = parts.of(given)
        assert shared == given
        assert msgspec.json.encode(shared) == msgspec.json.encode(given)


def test_equal_parts_are_kept_once() -> None:
    parts = SharedParts()
    first, second = (parts.of(slice_of(number)).spec for number in range(2))
    left, right = first.devices[0], second.devices[0]
    assert left.attributes["model"] is right.attributes["model"]
    assert left.attributes["uuid"] is not right.attributes["uuid"]
    assert left.capacity is right.capacity
    assert left.taints is right.taints
    assert left.consumes_counters is right.consumes_counters
    assert first.shared_counters[0] is second.shared_counters[0]


def test_numbers_that_are_written_differently_stay_as_written() -> None:
    parts = SharedParts()
    assert [
        repr(parts.of(slice_of(0, memory)).spec.devices[0].capacity["memory"].value) for memory in (1, 1.0)
    ] == [
        "1",
        "1.0",
    ]
