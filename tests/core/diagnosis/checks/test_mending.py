"""The places to which the holder of a device can go, and the fix if there are none."""

import textwrap

import pytest
from inline_snapshot import snapshot
from tests.core.diagnosis.healthy import node, with_changed, without
from tests.core.diagnosis.ward import NODE, TRAY, WELL

from rackloom.claim.node.gpu.xids import xid_catalogue
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine

POD = f"team-0/worker-{TRAY}"
FREE = node(0, 3)
GANG = "rackloom.dev/gang=0b5e:NoSchedule"


def tainted(site, taint):
    return with_changed(
        site,
        "devices",
        lambda record: record.node == NODE and record.name == "gpu-2",
        taints=(f"{taint}:NoSchedule",),
    )


def freed(site, rack, tray):
    """The site with nothing on a tray."""
    pod = f"team-{rack}/worker-{tray}"
    site = without(site, "uses", lambda record: pod in record.pods)
    site = without(site, "pods", lambda record: f"{record.namespace}/{record.name}" == pod)
    return without(site, "claims", lambda record: f"{record.namespace}/{record.name}" == f"{pod}-devices")


def fix_of(site, check=Check.DEVICE_TAINT):
    (found,) = (finding for finding in examine(site) if finding.check == check)
    return found.fix


def folded(fix):
    return textwrap.fill(fix, 100, subsequent_indent="  ", break_on_hyphens=False)


LOST = tainted(WELL, "gpu.nvidia.com/gpu-lost")


def test_in_a_full_clique_the_device_is_healed_first():
    assert folded(fix_of(LOST)) == snapshot("""\
kubectl cordon host-98 && kubectl -n team-0 delete pod worker-1 && kubectl debug node/host-98 -it
  --profile=sysadmin --image=busybox -- chroot /host systemctl reboot  # no free tray in the clique
  c1u57e7-0.7: the job stands still until the device is well, then kubectl uncordon host-98\
""")


def test_an_error_without_effect_asks_for_no_reset():
    """An XID that cannot be judged on its node is no reason to reset a GPU whose fabric is ill."""
    ill = with_changed(
        WELL,
        "devices",
        lambda record: record.node == NODE and record.name == "gpu-2",
        taints=(
            "gpu.nvidia.com/fabric=unhealthy:NoSchedule",
            "gpu.nvidia.com/xid=145-needs-domain-view:None",
        ),
    )
    assert "reset" not in fix_of(ill)


def test_what_answers_is_reset():
    assert folded(fix_of(tainted(WELL, "gpu.nvidia.com/xid=48"))) == snapshot("""\
kubectl cordon host-98 && kubectl -n team-0 delete pod worker-1 && kubectl debug node/host-98 -it
  --profile=sysadmin --image=busybox -- chroot /host nvidia-smi --gpu-reset -i 0003:01:00.0  # no
  free tray in the clique c1u57e7-0.7: the job stands still until the device is well, then kubectl
  uncordon host-98\
""")


def test_the_repair_of_each_error_is_that_of_the_catalogue():
    by_lines = {"WORKFLOW_NVLINK_ERR", "WORKFLOW_NVLINK5_ERR", "WORKFLOW_XID_48"}
    for number, row in xid_catalogue().items():
        fix = fix_of(tainted(WELL, f"gpu.nvidia.com/xid={number}"))
        found = ("systemctl reboot" in fix, "--gpu-reset" in fix)
        reboots = row.action in {"RESTART_BM", "RESTART_VM"}
        assert found == (reboots, row.action in {"RESET_GPU", *by_lines}), number


def test_what_no_command_heals_is_said_so():
    assert folded(fix_of(tainted(WELL, "gpu.nvidia.com/fabric=unhealthy"))) == snapshot("""\
kubectl cordon host-98 && kubectl -n team-0 delete pod worker-1  # no free tray in the clique
  c1u57e7-0.7: the job stands still until the device is well; see to it, then kubectl uncordon
  host-98\
""")


def test_a_free_tray_of_its_clique_is_named():
    assert folded(fix_of(freed(LOST, 0, 3))) == snapshot("""\
kubectl -n team-0 delete pod worker-1  # made anew, it gets the free tray host-96; then see to the
  device: its plugin takes the taint away when it is well\
""")


def test_a_free_tray_of_another_clique_is_no_help():
    assert "no free tray in the clique" in fix_of(freed(LOST, 1, 0))


def test_who_shares_no_memory_goes_to_any_clique():
    alone = with_changed(freed(LOST, 1, 0), "claims", lambda record: record.domain == "uid-0", domain="")
    assert f"it gets the free tray {node(1, 0)}" in fix_of(alone)


@pytest.mark.parametrize(
    "changes",
    [
        {"ready": False},
        {"unschedulable": True},
        {"taints": ("rackloom.dev/gang=another:NoSchedule",)},
    ],
)
def test_a_tray_that_takes_no_newcomers_is_not_free(changes):
    closed = with_changed(freed(LOST, 0, 3), "nodes", lambda record: record.name == FREE, **changes)
    assert "no free tray in the clique" in fix_of(closed)


def test_a_tray_with_a_sick_device_of_its_own_is_not_free():
    sick = with_changed(
        freed(LOST, 0, 3),
        "devices",
        lambda record: record.node == FREE and record.name == "gpu-0",
        taints=("gpu.nvidia.com/gpu-lost:NoSchedule",),
    )
    (found,) = (
        finding
        for finding in examine(sick)
        if finding.check == Check.DEVICE_TAINT and f"node {NODE}" in finding.where
    )
    assert "no free tray in the clique" in found.fix


def test_the_spare_of_its_gang_is_named_before_others():
    kept = with_changed(
        freed(LOST, 0, 3), "nodes", lambda record: record.name in (NODE, FREE), taints=(GANG,)
    )
    assert f"it gets the spare tray of its gang, {FREE}" in fix_of(kept)


def test_a_device_that_is_published_no_more_moves_its_pod_only_where_there_is_room():
    gone = without(WELL, "devices", lambda record: record.node == NODE and record.name == "gpu-3")
    assert folded(fix_of(gone, Check.DEVICE_THERE)) == snapshot("""\
kubectl -n team-0 delete pod worker-1  # no free tray in the clique c1u57e7-0.7: first bring gpu-3
  of host-98 back\
""")
    assert folded(fix_of(freed(gone, 0, 3), Check.DEVICE_THERE)) == snapshot(
        "kubectl -n team-0 delete pod worker-1  # made anew, it gets the free tray host-96"
    )


def test_a_pod_that_needs_less_than_its_tray_has_stays_there():
    """It has one of four GPUs and the others are free, so it is recreated on the same node."""
    one_gpu = without(
        WELL,
        "uses",
        lambda record: (
            POD in record.pods and record.driver != "dra.net" and record.device in ("gpu-0", "gpu-1", "gpu-3")
        ),
    )
    assert folded(fix_of(tainted(one_gpu, "gpu.nvidia.com/xid=48"))) == snapshot("""\
kubectl -n team-0 delete pod worker-1  # made anew, it gets other devices of host-98; then see to
  the device: its plugin takes the taint away when it is well\
""")
