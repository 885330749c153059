"""Scenario files are read strictly: an impossible step is refused with its line and the fix."""

from pathlib import Path

import pytest
from inline_snapshot import snapshot
from tests.lab.scenario.texts import CARVED, END, HEAD

from rackloom.errors import Refused
from rackloom.lab.scenario import every_layer, model, tenants
from rackloom.lab.scenario.files import find_scenario, scenario_files
from rackloom.lab.scenario.reading import parse_scenario, read_scenario, shipped_scenarios


def refusal(text):
    with pytest.raises(Refused) as refused:
        parse_scenario(text, "incident", "incident.toml")
    return f"{refused.value.reason} / {refused.value.nearest_fix}"


def test_a_scenario_is_steps_in_order():
    read = parse_scenario(HEAD + CARVED + END, "incident", "incident.toml")
    assert read.steps[2] == tenants.make_instances(group="job", vpc="net", count=2)
    assert read.steps[-1] == every_layer.invariants(within=1)
    assert (read.racks, read.profile, read.layers) == (1, "gb200-nvl72", {"carve"})
    assert read.speeds == {"real", "virtual"}


def test_speeds_and_layers_follow_from_the_steps():
    clock = '[[step]]\ndo = "clock-set"\nby = -600.0\n'
    assert parse_scenario(HEAD + clock + END, "x", "x").speeds == {"virtual"}
    node = '[[step]]\ndo = "node-lost"\ntray = "rack-01/slot-0"\n'
    lost = parse_scenario(HEAD + node + END, "x", "x")
    assert (lost.layers, lost.speeds) == ({"carve", "cluster"}, {"real", "virtual"})
    assert parse_scenario(HEAD + clock + node + END, "x", "x").speeds == {"virtual"}
    assert parse_scenario(HEAD + 'controller = "nmx-m"\n' + END, "x", "x").speeds == {"virtual"}
    assert parse_scenario(HEAD + "processes = 2\n" + END, "x", "x").speeds == {"virtual"}


def test_what_is_not_toml():
    assert refusal("title =") == snapshot(
        "incident.toml is not TOML: Invalid value (at end of document) / correct that line"
    )


def test_no_steps():
    assert refusal(HEAD) == snapshot(
        "incident.toml has no steps / write one [[step]] for each thing that happens"
    )


def test_an_unknown_key_of_the_head():
    assert refusal(HEAD + 'speed = "fast"\n' + END) == snapshot(
        "incident.toml: it has the unknown key `speed` / "
        "its keys are title, seen, faults (optional), racks (optional), profile (optional), "
        "processes (optional), candidates (optional), controller (optional), setup (optional)"
    )


def test_a_setup_comes_before_the_steps_of_the_file():
    read = parse_scenario(HEAD + 'setup = "four-trays"\n' + END, "x", "x.toml")
    assert [step.step_kind.name for step in read.steps] == [
        "make-logical-partition",
        "make-vpc",
        "make-instances",
        "instances",
        "together",
        "invariants",
    ]
    wrong = '[[step]]\ndo = "tray-pulled"\ninstance = "job/5"\n'
    assert refusal(HEAD + 'setup = "four-trays"\n' + wrong + END).startswith(
        "incident.toml, line 4, step 1: instance: there is no instance 'job/5' yet / one of job/1, "
    )


def test_a_setup_that_is_not_there():
    assert refusal(HEAD + 'setup = "four-tray"\n' + END).startswith(
        "incident.toml: there is no setup 'four-tray' / four-trays, or one of four-trays, "
    )


def test_neither_done_nor_expected():
    assert refusal(HEAD + "[[step]]\nat = 3\n") == snapshot(
        'incident.toml, line 3, step 1 has to say one of `do` and `expect` / such as do = "heal"'
    )


def test_an_unknown_step():
    message = refusal(HEAD + CARVED + '[[step]]\ndo = "switch-explodes"\n' + END)
    assert message.startswith("incident.toml, line 16, step 4: do = 'switch-explodes' is not known / ")
    assert ", or one of api-server-" in message


def test_the_step_that_was_perhaps_meant_comes_first():
    message = refusal(HEAD + '[[step]]\ndo = "switch-stop"\n' + END)
    assert "do = 'switch-stop' is not known / switch-stops, or one of api-server-" in message
    message = refusal(HEAD + "[[step]]\nexpect = 7\n" + END)
    assert "expect = 7 is not known / one of alone, " in message


def test_an_unknown_key_of_a_step():
    assert refusal(HEAD + '[[step]]\ndo = "switch-stops"\nrak = 1\n' + END) == snapshot(
        "incident.toml, line 3, step 1, do = 'switch-stops': it has the unknown key `rak` / "
        "its keys are at (optional), rack (optional)"
    )


def test_a_value_of_the_wrong_kind():
    assert refusal(HEAD + '[[step]]\ndo = "switch-stops"\nrack = 1\n' + END) == snapshot(
        "incident.toml, line 3, step 1, do = 'switch-stops': Expected `str`, got `int` at `rack` / "
        'rack is a rack, such as "rack-01"'
    )


@pytest.mark.parametrize(
    ("step", "fix"),
    [
        ('do = "switch-restarts"\nforgets = "all"', "forgets is one of nothing, names, partitions, domain"),
        ('do = "heal"\nat = "noon"', "at is a number, such as 2.5"),
        ('do = "release-instances"\ngroup = 1', "group is a text in quotes"),
        ('do = "set-interfaces"\ninstance = "job/1"\nlogical-partitions = "lp"', "a list, each of it a text"),
        ('do = "imex-addresses-swapped"\ntrays = ["x"]', "trays is a list of 2, each of it a text in quotes"),
        ('do = "node-lost"\ntray = 3', 'tray is a tray, such as "rack-01/slot-2"'),
        ('do = "gpu-lost"\ngpu = 3', 'gpu is a GPU, such as "rack-01/slot-2/gpu-0"'),
        ('do = "nic-link-down"\nnic = 3', 'nic is a NIC, such as "rack-01/slot-2/nic-0"'),
        (
            'do = "gpu-health"\ninstance = "job/1"\ngpu = 3\nhealth = "degraded"',
            'gpu is a GPU of the instance, such as "gpu-0"',
        ),
        ('do = "tray-returned"\ninstance = "job/1"\nswapped = 1', "swapped is true or false"),
    ],
)
def test_what_a_key_takes(step, fix):
    assert fix in refusal(f"{HEAD}{CARVED}[[step]]\n{step}\n{END}").partition(" / ")[2]


def test_a_head_with_a_wrong_value():
    assert refusal(HEAD + "candidates = 3\n" + END) == snapshot(
        "incident.toml: Invalid enum value 3 at `candidates` / candidates is one of 1, 2"
    )


def test_more_racks_than_a_process_can_be():
    assert refusal(HEAD + "racks = 129\n" + END) == snapshot(
        "incident.toml: 129 racks are too many for one process / use up to 128"
    )


def test_an_expectation_needs_a_time():
    assert refusal(HEAD + '[[step]]\nexpect = "invariants"\n') == snapshot(
        "incident.toml, line 3, step 1, expect = 'invariants': it lacks the key `within` / "
        "its keys are at (optional), within, stays (optional)"
    )


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            'do = "switch-stops"\nrack = "rack-02"',
            "rack = 'rack-02' is not there / one of rack-01 to rack-01, or write more racks",
        ),
        ('do = "heal"\nat = -5', "at = -5 is before the site answers / seconds from 0 up"),
        (
            'do = "gpu-xid"\ngpu = "rack-01/slot-0/gpu-0"\nxid = -3',
            "xid = -3 is too small / a number from 1 up",
        ),
        (
            'do = "tray-pulled"\ninstance = "other/1"',
            "there is no instance 'other/1' yet / one of job/1, job/2",
        ),
        ('do = "release-instances"\ngroup = "jbo"', "group: there is no group 'jbo' yet / one of job"),
        (
            'do = "tray-pulled"\ninstance = "job/3"',
            "instance: there is no instance 'job/3' yet / one of job/1, job/2",
        ),
        (
            'do = "make-vpc"\nname = "b"\nlogical-partition = "x"',
            "there is no logical partition 'x' yet / one of lp",
        ),
        (
            'do = "hand-lets-go"\nname = "x"',
            "there is no partition by hand 'x' yet / make it before, with do = \"partition-by-hand\"",
        ),
        (
            'do = "gpu-health"\ninstance = "job/1"\ngpu = "gpu-4"\nhealth = "degraded"',
            "gpu = 'gpu-4' is not there / one of gpu-0 to gpu-3",
        ),
        (
            'do = "partition-by-hand"\nname = "x"\ninstance = "job/1"\ngpus = ["gpu-0", "gpu-8"]',
            "gpus = 'gpu-8' is not there / one of gpu-0 to gpu-3",
        ),
        (
            'do = "set-interfaces"\ninstance = "job/1"\nlogical-partitions = ["lp"]',
            "a tray has 4 GPUs, named are 1 / name 4",
        ),
        ('do = "service-killed"\ndown = -1.0', "down is negative / give seconds from 0 up"),
        ('do = "controllers-die"\npoint = 0', "point = 0 is too small / a number from 1 up"),
        ('do = "controllers-die"\npoint = 1\nlives = 0', "lives = 0 is too small / a number from 1 up"),
        ('expect = "imex-mesh"\ncount = -1\nwithin = 1', "count = -1 is too small / a number from 0 up"),
        ('do = "clique-label-lags"\nseconds = -1.0', "seconds is negative / give seconds from 0 up"),
        (
            'do = "node-lost"\ntray = "rack-01/slot-18"',
            "tray = 'rack-01/slot-18' is not there / one of rack-01/slot-0 to rack-01/slot-17",
        ),
        (
            'do = "gpu-lost"\ngpu = "rack-01/slot-0/gpu-4"',
            "is not there / one of rack-01/slot-0/gpu-0 to rack-01/slot-17/gpu-3",
        ),
        (
            'do = "nic-link-down"\nnic = "rack-01/slot-0/mlx5_0"',
            "is not there / a NIC of a tray, such as rack-01/slot-0/nic-0",
        ),
        ('do = "switch-mistreats"\nrpc = "Helo"\nhow = "refuses"', "there is no RPC 'Helo' / one of AddGpus"),
        (
            'do = "api-server-bad"\nhow = "conflict"\nrate = 30.0',
            "rate is not a part of all / a number from 0",
        ),
        (
            'do = "list-written-by-hand"\nname = "x"',
            "there is no list read by hand 'x' yet / make it before, with do = \"list-read-by-hand\"",
        ),
        (
            'do = "imex-addresses-swapped"\ntrays = ["rack-01/slot-0", "rack-01/slot-18"]',
            "trays = 'rack-01/slot-18' is not there / one of rack-01/slot-0 to rack-01/slot-17",
        ),
        ('do = "submit"\nmanifest = "kind: [Job"', "the manifest is not YAML: "),
        ('do = "submit"\nmanifest = ""', "the manifest holds no object / write at least one"),
        (
            'do = "submit"\nmanifest = "kind: Job"',
            "an object of no known kind / one of admissionregistration",
        ),
        ('do = "service-killed"\ndown = nan', "down = nan is no number to reckon with / a finite number"),
        ('do = "clock-set"\nby = inf', "by = inf is no number to reckon with / a finite number"),
        ('do = "heal"\nat = nan', "at = nan is no number to reckon with / a finite number"),
        ('expect = "invariants"\nwithin = inf', "within = inf is no number to reckon with / a finite"),
        (
            'do = "switch-mistreats"\nrpc = "Hello"\nhow = "refuses"\ntimes = 0',
            "times = 0 is too small / a number from 1 up",
        ),
        ('do = "switch-hides"\ninstance = "job/1"\nlists = 0', "lists = 0 is too small / a number from 1 up"),
        (
            'do = "switch-claims-domain"\nrack = "rack-01"\ndomain-of = "rack-01"',
            "rack-01 is its own domain already / another rack in domain-of",
        ),
        (
            'expect = "gone"\nkind = "Job"\nname = "jbo"\nwithin = 1',
            "no step before names an object 'jbo' / submit it, or expect it as an object, before",
        ),
        (
            'expect = "devices"\ndriver = "gpu.nvidia.co"\ncount = 0\ntray = "rack-01/slot-0"\nwithin = 1',
            "there is no driver 'gpu.nvidia.co' / one of gpu.nvidia.com, ",
        ),
        ('do = "delete-object"\nkind = "Jobb"\nname = "x"', "kind Jobb is not known / one of "),
    ],
)
def test_what_cannot_be(step, message):
    assert message in refusal(f"{HEAD}{CARVED}[[step]]\n{step}\n{END}")


@pytest.mark.parametrize("name", ["sent", "of-a-template", "seen"])
def test_what_a_step_named_can_be_expected_to_go(name):
    manifest = """
apiVersion: resource.nvidia.com/v1beta1
kind: ComputeDomain
metadata: {name: sent}
spec: {numNodes: 0, channel: {resourceClaimTemplate: {name: of-a-template}}}
"""
    submit = f'[[step]]\ndo = "submit"\nmanifest = """{manifest}"""\n'
    seen = '[[step]]\nexpect = "object"\nkind = "Node"\nname = "seen"\npath = ["spec"]\nwithin = 1\n'
    gone = f'[[step]]\nexpect = "gone"\nkind = "ComputeDomain"\nname = "{name}"\nwithin = 1\n'
    assert parse_scenario(HEAD + submit + seen + gone, "x", "x").steps[-1].name == name


def test_what_cannot_happen_to_an_nmx_m():
    step = '[[step]]\ndo = "switch-mistreats"\nrpc = "Hello"\nhow = "refuses"\n'
    assert refusal(HEAD + 'controller = "nmx-m"\n' + step + END) == snapshot(
        'incident.toml, line 4, step 1: this cannot happen to an NMX-M / leave out controller = "nmx-m"'
    )


def test_time_does_not_run_back():
    steps = '[[step]]\ndo = "heal"\nat = 5\n[[step]]\ndo = "heal"\nat = 4\n'
    assert refusal(HEAD + steps + END) == snapshot(
        "incident.toml, line 6, step 2: at = 4 is before the step above / at least 5, or put it further up"
    )


def test_nothing_expected_at_the_end():
    assert refusal(HEAD + CARVED) == snapshot(
        "incident.toml, line 11, step 3: nothing is expected after this step / "
        "end with what must be seen, such as expect = 'invariants'"
    )


def test_a_check_that_the_doctor_does_not_have():
    step = '[[step]]\nexpect = "finding"\ncheck = "GPU helth"\nwithin = 1\n'
    assert "there is no check 'GPU helth' / one of " in refusal(HEAD + step)


def test_a_leader_where_nobody_is_elected():
    assert refusal(HEAD + '[[step]]\ndo = "leader-killed"\n' + END) == snapshot(
        "incident.toml, line 3, step 1: nobody is elected here / write candidates = 2 above the steps"
    )


@pytest.mark.parametrize(
    "step",
    [
        'do = "controllers-killed"',
        'do = "controllers-doubled"',
        'expect = "controllers-ended"\ncount = 1\nwithin = 1',
    ],
)
def test_a_single_process_where_two_are_elected(step):
    assert refusal(HEAD + "candidates = 2\n[[step]]\n" + step + "\n" + END) == snapshot(
        "incident.toml, line 4, step 1: there are two, of which one leads / "
        "a step about the leader, or leave out candidates = 2"
    )


def test_an_unknown_profile():
    assert "gb200" in refusal(HEAD + 'profile = "gb100"\n' + END)


def test_a_step_inside_a_text_makes_no_wrong_line():
    odd = '[[step]]\ndo = "submit"\nmanifest = """\n[[step]]\n"""\n'
    assert refusal(HEAD + odd + END).startswith(
        "incident.toml, step 1: the manifest has an object of no known"
    )


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(Refused, match="cannot be read"):
        read_scenario(tmp_path / "nothing.toml")


def test_find_takes_a_file_or_a_name(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(HEAD + END)
    assert find_scenario(own) == own
    assert find_scenario(Path("switch-unreachable")).name == "switch-unreachable.toml"
    with pytest.raises(Refused, match="there is no scenario nowhere"):
        find_scenario(Path("nowhere"))


def test_every_shipped_scenario_can_be_read_and_expects_something():
    assert len(shipped_scenarios()) == len(scenario_files()) >= 40
    for scenario in shipped_scenarios():
        assert any(isinstance(step, model.Expectation) for step in scenario.steps)
        assert scenario.seen


def test_every_kind_of_step_is_used_by_a_shipped_scenario():
    used = {step.step_kind for scenario in shipped_scenarios() for step in scenario.steps}
    assert {*model.ACTIONS.values(), *model.EXPECTATIONS.values()} - used == set()
