"""One cause gives one finding. Its consequences are named under it, and never make it look better."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.diagnosis.catalogue import EXPLAINS, HOST_CHECKS, SITE_CHECKS, Check
from rackloom.core.diagnosis.examination import fold_consequences
from rackloom.core.diagnosis.findings import CheckState, Severity, fails, severity_order, unknown


def broken(check, *where, severity=Severity.ERROR):
    return fails(
        check, f"{check} at {'/'.join(where)}", "it is broken", "rackloom fix", severity=severity, where=where
    )


def test_what_follows_is_under_its_cause_through_several_steps():
    found = fold_consequences(
        [
            broken(Check.ACTIVE, "ComputeDomain a/b", "node n"),
            broken(Check.MESH, "ComputeDomain a/b", "node n"),
            broken(Check.NODE_READY, "node n"),
        ]
    )
    assert [finding.check for finding in found] == [Check.NODE_READY]
    assert len(found[0].consequences) == 2


def test_a_cause_is_as_bad_as_its_worst_consequence():
    found = fold_consequences(
        [
            broken(Check.PARTITION_OWNED, "gpu 1", severity=Severity.WARNING),
            broken(Check.INTERFACE, "gpu 1"),
        ]
    )
    assert [finding.severity for finding in found] == [Severity.ERROR]


def test_elsewhere_is_another_cause():
    found = fold_consequences([broken(Check.NODE_READY, "node n"), broken(Check.MESH, "node m")])
    assert len(found) == 2


def test_what_is_only_unknown_explains_no_failure():
    lost = unknown(Check.CONTROLLER, "domain d", "it is silent", "rackloom fix", where=("domain d",))
    assert len(fold_consequences([lost, broken(Check.INTERFACE, "domain d")])) == 2
    waiting = unknown(Check.INTERFACE, "instance i", "not read", "rackloom fix", where=("domain d",))
    assert [consequence.check for consequence in fold_consequences([lost, waiting])] == [Check.CONTROLLER]


def test_a_kubelet_that_is_silent_is_the_cause_of_what_fails_on_its_node():
    silent = unknown(Check.NODE_READY, "node n", "its kubelet is silent", "rackloom fix", where=("node n",))
    (found,) = fold_consequences([broken(Check.ACTIVE, "ComputeDomain a/b", "node n"), silent])
    assert (found.check, found.severity) == (Check.NODE_READY, Severity.ERROR)


def test_what_others_rest_on_comes_first_among_what_is_as_bad():
    checks = (Check.NIC_LINK, Check.ACTIVE, Check.GPU_HEALTH)
    reported = [broken(check, f"node {place}") for place, check in enumerate(checks)]
    assert [consequence.check for consequence in fold_consequences(reported)] == [
        Check.GPU_HEALTH,
        Check.ACTIVE,
        Check.NIC_LINK,
    ]


def apart(*sides):
    where = ("ComputeDomain a/b", *(place for side in sides for place in side))
    return msgspec.structs.replace(broken(Check.ONE_CLIQUE, *where), sides=sides)


def test_a_cause_explains_a_difference_only_when_it_takes_all_but_one_side_away():
    label = broken(Check.CLIQUE_LABEL, "node n")
    rest = ("node a", "node b")
    assert [consequence.check for consequence in fold_consequences([label, apart(rest, ("node n",))])] == [
        Check.CLIQUE_LABEL
    ]
    assert [
        consequence.check for consequence in fold_consequences([label, apart(("node n",), ("node a",))])
    ] == [Check.CLIQUE_LABEL]
    for sides in ((rest, ("node n",), ("node m",)), (rest, ("node m", "node n"))):
        assert [consequence.check for consequence in fold_consequences([label, apart(*sides)])] == [
            Check.CLIQUE_LABEL,
            Check.ONE_CLIQUE,
        ]
    other = broken(Check.CLIQUE_LABEL, "node m")
    assert {
        consequence.check
        for consequence in fold_consequences([label, other, apart(rest, ("node n",), ("node m",))])
    } == {Check.CLIQUE_LABEL}


def test_instances_in_the_dark_come_before_a_warning_and_after_an_error():
    def dark(place, instances):
        found = unknown(Check.CONTROLLER, f"domain {place}", "it is silent", "rackloom fix", where=(place,))
        return msgspec.structs.replace(found, instances=instances)

    reported = [
        dark("empty", 0),
        broken(Check.NIC_LINK, "node n", severity=Severity.WARNING),
        dark("full", 18),
        broken(Check.ACTIVE, "node m"),
    ]
    assert [consequence.subject for consequence in fold_consequences(reported)] == [
        f"{Check.ACTIVE} at node m",
        "domain full",
        f"{Check.NIC_LINK} at node n",
        "domain empty",
    ]


def test_a_warning_under_which_something_is_dark_stays_a_warning():
    waiting = msgspec.structs.replace(
        unknown(Check.MESH, "ComputeDomain a/b", "not read", "rackloom fix", where=("node n",)),
        instances=3,
    )
    (found,) = fold_consequences([broken(Check.HOST_IMEX, "node n", severity=Severity.WARNING), waiting])
    assert (found.severity, found.instances) == (Severity.WARNING, 3)


def test_no_check_explains_itself_not_even_around_a_corner():
    def reached(check):
        seen, waiting = set(), [check]
        while waiting:
            for effect in EXPLAINS.get(waiting.pop(), ()):
                if effect not in seen:
                    seen.add(effect)
                    waiting.append(effect)
        return seen

    every = (*SITE_CHECKS, *HOST_CHECKS)
    assert not [check for check in every if check in reached(check)]
    assert set(EXPLAINS) <= set(every)


findings = st.builds(
    broken,
    st.sampled_from((*SITE_CHECKS, *HOST_CHECKS)),
    st.sampled_from(["node a", "node b", "domain d"]),
    severity=st.sampled_from([Severity.CRITICAL, Severity.ERROR, Severity.WARNING]),
)


@given(st.lists(findings, max_size=12, unique_by=lambda finding: (finding.check, finding.where)))
def test_nothing_is_lost_and_the_worst_stays_first(reported):
    found = fold_consequences(reported)
    named = [f"{finding.check}: {finding.subject}" for finding in found]
    under = [line for finding in found for line in finding.consequences]
    assert sorted(named + under) == sorted(f"{finding.check}: {finding.subject}" for finding in reported)
    assert [severity_order(finding) for finding in found] == sorted(
        severity_order(finding) for finding in found
    )
    if reported:
        assert severity_order(found[0])[0] == min(severity_order(finding)[0] for finding in reported)
    assert all(finding.state is CheckState.FAILS for finding in found)
