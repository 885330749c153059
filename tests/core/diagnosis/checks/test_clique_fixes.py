"""One command corrects a wrong clique label, and also names the writer that must not write it again."""

import pytest
from tests.core.diagnosis.healthy import clique, with_changed
from tests.core.diagnosis.ward import NODE, WELL, of_node, of_tray

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine

RIGHT = f"kubectl label node {NODE} nvidia.com/gpu.clique={clique(0)} --overwrite"


def fix_of(**changes):
    (found,) = examine(with_changed(WELL, "nodes", of_node, **changes))
    assert found.check == Check.CLIQUE_LABEL
    return found.fix


@pytest.mark.parametrize("wrong", ["c1u57e7-0.32766", clique(1)])
def test_the_right_label_is_written_and_its_writer_named(wrong):
    assert fix_of(clique=wrong) == (
        f"{RIGHT}  # and restart what writes it, or it is written again: gpu-feature-discovery"
    )


def test_a_label_by_hand_is_given_back():
    fix = fix_of(clique=clique(1), clique_writer="kubectl-label")
    assert fix.startswith(RIGHT)
    assert fix.removeprefix(RIGHT) == (
        f"  # kubectl-label wrote it by hand: kubectl label node {NODE} nvidia.com/gpu.clique- leaves "
        "it to its plugin again"
    )


def test_a_label_that_is_missing_is_its_plugins_to_write():
    assert fix_of(clique=None).startswith(
        f"kubectl get pods -A -o wide --field-selector spec.nodeName={NODE}  # "
    )


def test_a_tray_in_no_partition_has_no_label():
    free = with_changed(WELL, "fabric_gpus", of_tray, partition=None)
    fixes = [
        finding.fix
        for finding in examine(with_changed(free, "instance_gpus", lambda record: True, logical=None))
        if finding.check == Check.CLIQUE_LABEL
    ]
    assert [fix.partition("  # ")[0] for fix in fixes] == [
        f"kubectl label node {NODE} nvidia.com/gpu.clique-"
    ]


def test_where_the_devices_alone_differ_the_label_is_left():
    other = with_changed(
        WELL, "devices", lambda record: record.node == NODE and record.clique is not None, clique=clique(1)
    )
    (found,) = (finding for finding in examine(other) if finding.check == Check.CLIQUE_LABEL)
    assert found.fix.startswith("kubectl get pods")
