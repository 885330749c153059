"""The parts of a finding that people read first: title, affected users, and the steps of the fix."""

import pytest
from tests.core.diagnosis import cluster_faults, fabric_faults
from tests.core.diagnosis.ward import WELL

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.repair_steps import (
    Effect,
    command_rule,
    is_known,
    repair_advice,
    repair_steps,
)
from rackloom.core.diagnosis.report import SiteCommands, with_site_commands
from rackloom.core.diagnosis.titles import TITLES

FAULTS = fabric_faults.FAULTS | cluster_faults.FAULTS
SITE = SiteCommands(kubectl="--kubeconfig '/a b/k' --context c", admin="RACKLOOM_ADMIN=h:1 X=y")


def finding_of(fault):
    (finding,) = examine(FAULTS[fault][0](WELL))
    return finding


def test_every_check_has_a_title():
    assert set(TITLES) == set(Check)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_title_is_a_sentence_that_holds_no_uuid(fault):
    title = finding_of(fault).title
    assert not title[0].islower() or title.startswith("rack-")
    assert "{" not in title
    assert len(title) < 160


@pytest.mark.parametrize("fault", FAULTS)
def test_every_step_of_a_fix_is_known(fault):
    for found in (finding_of(fault), *with_site_commands([finding_of(fault)], SITE)):
        assert found.steps
        assert all(is_known(step.command) for step in found.steps), found.fix
        assert found.steps == repair_steps(found.fix)


@pytest.mark.parametrize(
    ("fault", "title", "affects"),
    [
        (
            "gpu-sick",
            "rack-0/slot-2/gpu-1 is sick: the switch controller says NO_NVLINK",
            "pod team-0/worker-1",
        ),
        ("tray-out", "rack-0/slot-2 is missing from its switch controller", "tenant org-0"),
        ("paused", "The NVLink domain of rack-0 is paused", None),
        ("node-silent", "Unknown whether the node of rack-0/slot-2 is not ready", "pod team-0/worker-1"),
    ],
)
def test_a_title_names_the_place_as_the_map_does(fault, title, affects):
    found = finding_of(fault)
    assert found.title == title
    assert affects in (*found.affects, None)


def test_several_trays_are_counted():
    assert finding_of("switch-tray-out").title.startswith("4 trays of rack-0: GPUs of 4 trays are ")


REPAIR = (
    "kubectl cordon n1 && kubectl -n team delete pod w && kubectl debug node/n1 -it --profile=sysadmin"
    " --image=busybox -- chroot /host systemctl reboot  # the job stands still, then kubectl uncordon n1"
)


def test_a_fix_is_taken_apart():
    assert [(step.effect, step.command.split()[1]) for step in repair_steps(REPAIR)] == [
        (Effect.SAFE, "cordon"),
        (Effect.DISRUPTIVE, "-n"),
        (Effect.DISRUPTIVE, "debug"),
    ]
    assert repair_advice(REPAIR) == "the job stands still, then kubectl uncordon n1"


@pytest.mark.parametrize("fix", ["", "  # only advice"])
def test_a_fix_without_commands_has_no_steps(fix):
    assert repair_steps(fix) == ()


def test_what_is_quoted_is_no_separator():
    fix = "rackloom admin tray cordon m --reason 'a && b  # c'  # then see to it"
    (step,) = repair_steps(fix)
    assert step.command == "rackloom admin tray cordon m --reason 'a && b  # c'"
    assert repair_advice(fix) == "then see to it"


@pytest.mark.parametrize("command", ["rm -rf /", "kubectl delete node n1", "kubectl getx", ""])
def test_an_unknown_command_counts_as_disruptive(command):
    assert not is_known(command)
    assert command_rule(command).effect is Effect.DISRUPTIVE
