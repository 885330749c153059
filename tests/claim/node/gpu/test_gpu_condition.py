"""How GPUs fail, and how that ends."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.node.gpu.inventory import GpuInventory, NodeGpu, RecoveryAction, XidError
from rackloom.claim.node.gpu.monitor import (
    REGISTRATION_SECONDS,
    GpuObservation,
    InventorySnapshot,
    NodeGpus,
    devices_by_name,
    gpu_health,
    gpu_taints,
    published_devices,
    record_errors,
    update_conditions,
)
from rackloom.claim.node.gpu.xids import QUIET_SECONDS, UNREPORTED_SECONDS, KernelXid, XidRules
from rackloom.claim.node.plugin import Health

DRIVER = "580.95.05"
GPU = NodeGpu(
    minor=0,
    uuid="GPU-1",
    pci_address="0000:01:00.0",
    product="NVIDIA H100",
    memory_bytes=1 << 36,
    recovery=RecoveryAction.NONE,
)


def look(*gpus, at=0.0, deaf=()):
    return InventorySnapshot(
        inventory=GpuInventory(gpus=gpus, driver_version=DRIVER), unmonitored=frozenset(deaf), at=at
    )


def after(*steps):
    """Conditions after looks and errors (an error is (number, time))."""
    known = {}
    for step in steps:
        if isinstance(step, InventorySnapshot):
            known = update_conditions(known, step, XidRules(now=step.at))
        else:
            known = record_errors(known, [XidError(uuid="GPU-1", number=step[0])], [], step[1])
    return known["GPU-1"]


def reported(condition, at=0.0):
    return [
        (taint.key.rpartition("/")[2], taint.value, taint.effect)
        for taint in gpu_taints(condition, XidRules(now=at))
    ]


def health(condition):
    return gpu_health(condition, XidRules(now=0.0))


def asking(recovery):
    return msgspec.structs.replace(GPU, recovery=recovery)


def test_a_healthy_gpu_has_no_taints():
    condition = after(look(GPU))
    assert reported(condition) == []
    assert health(condition) == (Health.HEALTHY, "")


def test_an_error_keeps_claims_away_until_nothing_is_asked_for_any_more():
    struck_once = after(look(GPU), (79, 1.0))
    assert reported(struck_once) == [("xid", "79", "NoSchedule")]
    later = 1.0 + QUIET_SECONDS
    waiting = after(look(GPU), (79, 1.0), look(asking(RecoveryAction.GPU_RESET), at=later))
    assert reported(waiting) == [("xid", "79", "NoSchedule"), ("recovery", "gpu-reset", "NoSchedule")]
    assert reported(after(look(GPU), (79, 1.0), look(GPU, at=later - 1))) == [("xid", "79", "NoSchedule")]
    assert reported(after(look(GPU), (79, 1.0), look(GPU, at=later))) == []


def test_an_old_driver_is_believed_after_the_gpu_was_away():
    old = asking(None)
    late = 10 * QUIET_SECONDS
    assert reported(after(look(old), (79, 1.0), look(old, at=late))) == [("xid", "79", "NoSchedule")]
    lost = after(look(old), (79, 1.0), look(at=2.0))
    assert reported(lost) == [("gpu-lost", "", "NoSchedule"), ("xid", "79", "NoSchedule")]
    assert health(lost)[0] is Health.UNHEALTHY
    assert reported(after(look(old), (79, 1.0), look(at=2.0), look(old, at=3.0))) == []


@pytest.mark.parametrize(
    ("xid", "recovery"),
    [(79, None), (119, RecoveryAction.NONE), (119, None), (173, RecoveryAction.NONE)],
    ids=["old driver", "not announced by XID 154", "neither", "not in the catalogue"],
)
def test_no_taint_stays_for_ever_because_a_repair_cannot_be_seen(xid, recovery):
    gpu, over = asking(recovery), 1.0 + UNREPORTED_SECONDS
    assert reported(after(look(gpu), (xid, 1.0), look(gpu, at=over - 1))) == [("xid", str(xid), "NoSchedule")]
    assert reported(after(look(gpu), (xid, 1.0), look(gpu, at=over))) == []


def test_the_recovery_of_an_imex_domain_is_no_fault_of_the_gpu():
    condition = after(look(asking(RecoveryAction.RECOVER_IMEX_DOMAIN)))
    assert reported(condition) == [("recovery", "recover-imex-domain", "None")]
    assert health(condition) == (Health.HEALTHY, "")


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68])
@pytest.mark.parametrize("recovery", [None, RecoveryAction.NONE])
def test_errors_of_programs_keep_nothing_away_and_pass(xid, recovery):
    gpu = asking(recovery)
    condition = after(look(gpu), (xid, 1.0))
    assert reported(condition) == [("xid", str(xid), "None")]
    assert health(condition)[0] is Health.HEALTHY
    assert reported(after(look(gpu), (xid, 1.0), look(gpu, at=1.0 + QUIET_SECONDS))) == []


def test_a_gpu_that_cannot_be_listened_to_says_so():
    condition = after(look(GPU, deaf=["GPU-1"]))
    assert reported(condition) == [("unmonitored", "", "None")]
    assert health(condition)[0] is Health.UNKNOWN


def test_a_fabric_that_is_ill_is_a_taint():
    ill = msgspec.structs.replace(GPU, fabric_health=Health.UNHEALTHY, fabric_message="limited")
    assert reported(after(look(ill))) == [("fabric", "unhealthy", "NoSchedule")]
    assert reported(after(look(ill), look(GPU))) == []


def test_an_error_between_a_return_and_the_next_look_counts():
    returned = after(look(GPU), (79, 1.0), look(at=10.0), (119, 15.0), look(GPU, at=20.0))
    assert reported(returned, at=20.0) == [("xid", "119", "NoSchedule")]
    old = asking(None)
    reset = KernelXid(pci_address="0000:01:00", number=154, sequence=1, recovery=RecoveryAction.GPU_RESET)
    known = update_conditions({}, look(old), XidRules(now=0.0))
    known = update_conditions(known, look(at=10.0), XidRules(now=10.0))
    known = record_errors(known, [], [reset], 15.0)
    known = update_conditions(known, look(old, at=20.0), XidRules(now=20.0))
    assert reported(known["GPU-1"], at=20.0) == [("recovery", "gpu-reset", "NoSchedule")]


def test_a_gpu_that_never_joins_its_fabric_is_judged_after_a_while():
    joining = msgspec.structs.replace(
        GPU, fabric_joining=True, fabric_health=Health.UNHEALTHY, fabric_message="ill"
    )
    late = after(look(joining), look(joining, at=REGISTRATION_SECONDS))
    for at, taints, health in (
        (REGISTRATION_SECONDS - 1, [], Health.UNKNOWN),
        (REGISTRATION_SECONDS, [("fabric", "unhealthy", "NoSchedule")], Health.UNHEALTHY),
    ):
        assert (reported(late, at=at), gpu_health(late, XidRules(now=at))[0]) == (taints, health)
    again = after(look(joining), look(at=500.0), look(joining, at=REGISTRATION_SECONDS))
    assert reported(again, at=REGISTRATION_SECONDS + 1) == []
    joined = after(look(joining), look(GPU, at=1.0))
    assert gpu_health(joined, XidRules(now=1.0)) == (Health.HEALTHY, "")


@pytest.mark.parametrize("lost", ["GPU-1", "GPU-2"])
def test_a_line_joins_the_gpu_that_answers(lost):
    both = {"GPU-1": GPU, "GPU-2": msgspec.structs.replace(GPU, uuid="GPU-2")}
    present = both[({*both} - {lost}).pop()]
    for first in both.values():
        known = update_conditions({}, look(first), XidRules(now=0.0))
        known = update_conditions(known, look(both[lost], at=1.0), XidRules(now=1.0))
        known = update_conditions(known, look(present, at=2.0), XidRules(now=2.0))
        known = record_errors(known, [], [KernelXid(pci_address="0000:01:00", number=119, sequence=1)], 3.0)
        assert reported(known[present.uuid]) == [("xid", "119", "NoSchedule")]


def test_a_lost_gpu_stays_published_until_another_has_its_minor():
    known = update_conditions({}, look(GPU), XidRules(now=0.0))
    known = update_conditions(known, look(at=5.0), XidRules(now=0.0))
    (device,) = published_devices(NodeGpus(conditions=known), XidRules(now=0.0))
    assert device.name == "gpu-0"
    other = msgspec.structs.replace(GPU, uuid="GPU-2")
    known = update_conditions(known, look(other, at=6.0), XidRules(now=0.0))
    node = NodeGpus(conditions=known, newest=GpuObservation(inventory=GpuInventory(gpus=(other,))))
    (device,) = published_devices(node, XidRules(now=0.0))
    assert device.attributes["uuid"].string == "GPU-2"
    assert device.taints == ()
    assert devices_by_name(node)["gpu-0"].uuid == "GPU-2"


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([13, 48, 79]), st.none()),
        st.sampled_from([None, RecoveryAction.NONE, RecoveryAction.GPU_RESET]).map(asking),
        st.just("lost"),
    ),
    max_size=12,
)


@given(history=steps)
def test_whatever_happened_a_reset_gpu_that_stays_quiet_is_healthy_again(history):
    now, done = 0.0, [look(GPU)]
    for step in history:
        now += 1.0
        if isinstance(step, NodeGpu):
            done.append(look(step, at=now))
        elif step == "lost":
            done.append(look(at=now))
        else:
            done.append((step[0], now))
    reset = [look(at=now + 1), look(GPU, at=now + 2), look(GPU, at=now + 2 + QUIET_SECONDS)]
    condition = after(*done, *reset)
    assert reported(condition) == []
    assert health(condition) == (Health.HEALTHY, "")
