"""Reports of two sides about one thing become one finding that loses nothing from either."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import merge_host_findings
from rackloom.core.diagnosis.findings import CheckState, Severity, fails, holds, severity_order, unknown

NIC, OTHER, NODE = "device n/nic-0", "device n/nic-1", "node n"


def down(side, *where, severity=Severity.WARNING):
    return fails(
        Check.NIC_LINK,
        f"NIC of {side}",
        "down",
        "fix",
        severity=severity,
        evidence=(f"{side}: down",),
        where=where,
    )


def test_the_worse_counts_under_the_clusters_name_for_it():
    cluster = unknown(
        Check.NIC_LINK, "NIC n/nic-0", "not told", "fix", evidence=("slice: -",), where=(NIC, NODE)
    )
    (finding,) = merge_host_findings([cluster], [down("host", NIC, NODE)])
    assert (finding.subject, finding.message, finding.severity) == ("NIC n/nic-0", "down", Severity.WARNING)
    assert finding.evidence == ("slice: -", "host: down")


def test_what_is_well_on_the_host_stands_beside_what_its_cluster_says():
    well = holds(Check.NIC_LINK, "NIC of host", "up", evidence=("host: up",), where=(NIC, NODE))
    (finding,) = merge_host_findings([down("slice", NIC, NODE)], [well])
    assert finding.message == "down"
    assert finding.evidence == ("slice: down", "host: up")


def test_what_is_of_one_node_and_of_two_devices_is_two_findings():
    assert len(list(merge_host_findings([down("slice", NIC, NODE)], [down("host", OTHER, NODE)]))) == 2


def test_without_a_device_the_node_ties():
    reported = [
        unknown(Check.MESH, subject, "-", "fix", where=(NODE,)) for subject in ("ComputeDomain a/b", NODE)
    ]
    (finding,) = merge_host_findings(reported[:1], reported[1:])
    assert finding.subject == "ComputeDomain a/b"


def test_a_pods_wrong_nic_is_not_the_hosts_far_one():
    """Both are of one check on one node, and neither names a device."""
    pod = fails(Check.NIC_ALIGNED, "Pod a/b", "it was given nic-1", "claim", where=("pod a/b", NODE))
    far = fails(Check.NIC_ALIGNED, "GPU 4 of node n", "no NIC is near", "discover", where=(NODE,))
    assert list(merge_host_findings([pod], [far])) == [pod, far]


def untold(*where, check=Check.NIC_LINK):
    return unknown(check, "of the cluster", "not told", "fix", evidence=("slice: unknown",), where=where)


def well(*where, check=Check.NIC_LINK):
    return holds(check, "of the host", "up", evidence=("host: up",), where=where)


def test_a_device_that_the_host_sees_well_is_not_unknown():
    (finding,) = merge_host_findings([untold(NIC, NODE)], [well(NIC, NODE)])
    assert (finding.state, finding.severity, finding.message, finding.fix) == (
        CheckState.HOLDS,
        Severity.NONE,
        "up",
        "",
    )
    assert finding.evidence == ("slice: unknown", "host: up")


def test_what_two_drivers_do_not_tell_of_one_device_its_host_does():
    found = merge_host_findings([untold(NIC, NODE), untold(OTHER, NODE)], [well(NIC, OTHER, NODE)])
    assert [finding.state for finding in found] == [CheckState.HOLDS] * 2


def test_one_device_that_is_well_does_not_tell_of_another():
    (finding,) = merge_host_findings([untold(NIC, OTHER, NODE)], [well(NIC, NODE)])
    assert finding.state is CheckState.UNKNOWN


def test_a_host_does_not_tell_of_the_mesh_of_other_nodes():
    apart = untold("ComputeDomain a/b", NODE, "node m", check=Check.MESH)
    (finding,) = merge_host_findings([apart], [well(NODE, check=Check.MESH)])
    assert (finding.state, finding.message) == (CheckState.UNKNOWN, "not told")


def says(number, check, severity, devices):
    return fails(
        check,
        f"subject {number}",
        f"message {number}",
        f"fix {number}",
        severity=severity,
        evidence=(f"evidence {number}",),
        where=(*devices, NODE),
    )


@st.composite
def sides(draw):
    """Faults of one node, of some of its devices or of none, each with a unique message."""
    numbers = count()
    finding = st.builds(
        lambda *reported: says(next(numbers), *reported),
        st.sampled_from([Check.NIC_LINK, Check.NIC_ALIGNED]),
        st.sampled_from([Severity.ERROR, Severity.WARNING]),
        st.sets(st.sampled_from([NIC, OTHER])),
    )
    return draw(st.lists(finding, max_size=4)), draw(st.lists(finding, max_size=4))


@given(sides())
def test_nothing_that_either_side_says_is_lost(reported):
    """All evidence stays. A message and its fix stay unless another for the same device is as severe."""
    cluster, host = reported
    found = list(merge_host_findings(cluster, host))
    for finding in (*cluster, *host):
        kept = [other for other in found if set(finding.evidence) <= set(other.evidence)]
        assert kept
        assert any(_is_said(finding, other) for other in kept)
    assert len(found) <= len(cluster) + len(host)


def _is_said(finding, by):
    devices = set(finding.where) - {NODE}
    replaced = (
        finding.check == by.check
        and devices & set(by.where)
        and severity_order(by)[0] <= severity_order(finding)[0]
    )
    return replaced or (finding.message, finding.fix) == (by.message, by.fix)
