"""How GPUs fail, and how that ends."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.node.gpu.condition import (
    HARMLESS_XIDS,
    QUIET_SECONDS,
    Look,
    health_of,
    looked,
    struck,
    taints_of,
)
from rackloom.claim.node.gpu.inventory import Gpu, Inventory, Recovery, Xid
from rackloom.claim.node.gpu.published import Node, devices_of, names_of
from rackloom.claim.node.values import Health

GPU = Gpu(
    minor=0,
    uuid="GPU-1",
    pci_address="0000:01:00.0",
    product="NVIDIA H100",
    memory_bytes=1 << 36,
    recovery=Recovery.NONE,
)


def look(*gpus, at=0.0, deaf=()):
    return Look(inventory=Inventory(gpus=gpus), unmonitored=frozenset(deaf), at=at)


def after(*steps):
    """Conditions after looks and errors (an error is (number, time))."""
    known = {}
    for step in steps:
        if isinstance(step, Look):
            known = looked(known, step, HARMLESS_XIDS)
        else:
            known = struck(known, [Xid(uuid="GPU-1", number=step[0])], step[1])
    return known["GPU-1"]


def told(one):
    return [
        (taint.key.rpartition("/")[2], taint.value, taint.effect) for taint in taints_of(one, HARMLESS_XIDS)
    ]


def asking(recovery):
    return msgspec.structs.replace(GPU, recovery=recovery)


def test_a_healthy_gpu_has_no_taints():
    one = after(look(GPU))
    assert told(one) == []
    assert health_of(one, HARMLESS_XIDS) == (Health.HEALTHY, "")


def test_an_error_keeps_claims_away_until_nothing_is_asked_for_any_more():
    struck_once = after(look(GPU), (79, 1.0))
    assert told(struck_once) == [("xid", "79", "NoSchedule")]
    later = 1.0 + QUIET_SECONDS
    waiting = after(look(GPU), (79, 1.0), look(asking(Recovery.GPU_RESET), at=later))
    assert told(waiting) == [("xid", "79", "NoSchedule"), ("recovery", "gpu-reset", "NoSchedule")]
    assert told(after(look(GPU), (79, 1.0), look(GPU, at=later - 1))) == [("xid", "79", "NoSchedule")]
    assert told(after(look(GPU), (79, 1.0), look(GPU, at=later))) == []


def test_an_old_driver_is_believed_after_the_gpu_was_away():
    old = asking(None)
    late = 10 * QUIET_SECONDS
    assert told(after(look(old), (79, 1.0), look(old, at=late))) == [("xid", "79", "NoSchedule")]
    lost = after(look(old), (79, 1.0), look(at=2.0))
    assert told(lost) == [("gpu-lost", "", "NoSchedule"), ("xid", "79", "NoSchedule")]
    assert health_of(lost, HARMLESS_XIDS)[0] is Health.UNHEALTHY
    assert told(after(look(old), (79, 1.0), look(at=2.0), look(old, at=3.0))) == []


@pytest.mark.parametrize("xid", sorted(HARMLESS_XIDS))
@pytest.mark.parametrize("recovery", [None, Recovery.NONE])
def test_errors_of_programs_keep_nothing_away_and_pass(xid, recovery):
    gpu = asking(recovery)
    one = after(look(gpu), (xid, 1.0))
    assert told(one) == [("xid", str(xid), "None")]
    assert health_of(one, HARMLESS_XIDS)[0] is Health.HEALTHY
    assert told(after(look(gpu), (xid, 1.0), look(gpu, at=1.0 + QUIET_SECONDS))) == []


def test_a_gpu_that_cannot_be_listened_to_says_so():
    one = after(look(GPU, deaf=["GPU-1"]))
    assert told(one) == [("unmonitored", "", "None")]
    assert health_of(one, HARMLESS_XIDS)[0] is Health.UNKNOWN


def test_a_fabric_that_is_ill_is_a_taint():
    ill = msgspec.structs.replace(GPU, fabric_health=Health.UNHEALTHY, fabric_message="limited")
    assert told(after(look(ill))) == [("fabric", "unhealthy", "NoSchedule")]
    assert told(after(look(ill), look(GPU))) == []


def test_a_lost_gpu_stays_published_until_another_has_its_minor():
    known = looked({}, look(GPU), HARMLESS_XIDS)
    known = looked(known, look(at=5.0), HARMLESS_XIDS)
    (device,) = devices_of(Node(conditions=known), HARMLESS_XIDS)
    assert device.name == "gpu-0"
    other = msgspec.structs.replace(GPU, uuid="GPU-2")
    known = looked(known, look(other, at=6.0), HARMLESS_XIDS)
    node = Node(conditions=known, inventory=Inventory(gpus=(other,)))
    (device,) = devices_of(node, HARMLESS_XIDS)
    assert device.attributes["uuid"].string == "GPU-2"
    assert device.taints == ()
    assert names_of(node)["gpu-0"].uuid == "GPU-2"


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([13, 48, 79]), st.none()),
        st.sampled_from([None, Recovery.NONE, Recovery.GPU_RESET]).map(asking),
        st.just("lost"),
    ),
    max_size=12,
)


@given(history=steps)
def test_whatever_happened_a_reset_gpu_that_stays_quiet_is_healthy_again(history):
    now, done = 0.0, [look(GPU)]
    for step in history:
        now += 1.0
        if isinstance(step, Gpu):
            done.append(look(step, at=now))
        elif step == "lost":
            done.append(look(at=now))
        else:
            done.append((step[0], now))
    reset = [look(at=now + 1), look(GPU, at=now + 2), look(GPU, at=now + 2 + QUIET_SECONDS)]
    one = after(*done, *reset)
    assert told(one) == []
    assert health_of(one, HARMLESS_XIDS) == (Health.HEALTHY, "")
